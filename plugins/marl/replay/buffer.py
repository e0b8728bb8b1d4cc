"""The ring buffer under both kinds of replay."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from runner.api import Batch, Ring, State, UsageError, available_memory

GIB = 2**30


class Replay(ABC):
    """Transitions of fixed shapes, the oldest overwritten once the buffer is full.

    All fields of a transition lie side by side in one row of float32 numbers, so that drawing a
    batch fetches every row from memory once, whatever the number of fields. Booleans
    (``terminated``) come back as 0 and 1.

    Nothing in ``add``, ``sample`` and ``update_priorities`` waits for a GPU. ``store``, ``fetch``
    and ``update_priorities`` can be captured in a CUDA graph: they change only tensors that stay
    where they are, and what differs between calls is in tensors.
    """

    extra_bytes = 0
    """Bytes per transition that a kind of replay stores in addition to the row."""

    def __init__(
        self,
        capacity: int,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        """Reserves memory; a page of it is taken only when a transition is written there.

        Args:
            capacity: transitions kept.
            shapes: shape of every field of one transition.
            device: where they are kept.
            generator: what ``sample`` draws from, on the same device; its state belongs to the
                caller.

        Raises:
            UsageError: the buffer will not fit in the memory that is free now.
        """
        self.capacity = capacity
        self.shapes = dict(shapes)
        self.device = device
        self.generator = generator
        self._widths = [math.prod(shape) for shape in self.shapes.values()]
        width = sum(self._widths)
        _require_memory(
            capacity, width * torch.float32.itemsize + self.extra_bytes, device
        )
        self._rows = torch.empty(
            capacity, width, dtype=torch.float32, device=device
        )
        self._written = 0
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        """Transitions ever stored, as ``_written``, where a captured ``store`` reads it."""

    def __len__(self) -> int:
        return min(self._written, self.capacity)

    def add(self, batch: Batch) -> Tensor:
        """Stores and counts transitions; see ``store``."""
        index = self.store(batch)
        self.count(len(index))
        return index

    @torch.no_grad()
    def store(self, batch: Batch) -> Tensor:
        """Stores transitions over the oldest ones; ``count`` has to follow.

        Args:
            batch: tensors [E, *shape], one for every field.

        Returns:
            Where they are now, [E].

        Raises:
            UsageError: More transitions in one call than the buffer has places.
        """
        count = len(next(iter(batch.values())))
        if count > self.capacity:
            raise UsageError(
                f"data.replay.capacity: {count} transitions of one step exceed a buffer of "
                f"{self.capacity}; "
                f"raise it to at least {count} or lower data.envs"
            )
        fields = zip(self.shapes, self._widths, strict=True)
        rows = torch.cat(
            [
                batch[name].reshape(count, width).float()
                for name, width in fields
            ],
            dim=1,
        )
        index = torch.arange(count, device=self.device).add_(self._position)
        index.remainder_(self.capacity)
        self._rows.index_copy_(0, index, rows.to(self.device))
        self._position.add_(count)
        return index

    def count(self, transitions: int) -> None:
        """Counts transitions that were stored; they can be sampled from now on."""
        self._written += transitions

    def sample(self, batch_size: int, progress: float) -> Batch:
        """Draws transitions with replacement.

        Args:
            batch_size: how many; B below.
            progress: share of the training that is over, 0 to 1.

        Returns:
            Every field, [B, *shape]; ``index``, [B], where they are stored; ``weight``, [B],
            importance weights.

        Raises:
            UsageError: the buffer is empty.
        """
        return self.fetch(self.draw(batch_size, progress))

    @abstractmethod
    def draw(self, batch_size: int, progress: float) -> Batch:
        """Returns the random numbers of a batch, and what else ``fetch`` reads; see ``sample``."""

    @abstractmethod
    def fetch(self, drawn: Batch) -> Batch:
        """Returns the batch that follows from what ``draw`` returned; see ``sample``."""

    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:  # noqa: B027 (only prioritized replay has any)
        """Updates the priorities with the critics' errors for the transitions at
        ``index``, [B] each.
        """

    def state_dict(self) -> State:
        """Returns the transitions, as a ring that reads the buffer's memory."""
        return {
            "rows": Ring(self.capacity, self._written, self._read),
            "shapes": {
                name: list(shape) for name, shape in self.shapes.items()
            },
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned; with the generator's state, the same batches
        follow.

        Raises:
            UsageError: the state is that of a buffer of another capacity or other fields.
        """
        ring: Ring = state["rows"]
        expected = {
            "capacity": self.capacity,
            "shapes": self.state_dict()["shapes"],
        }
        for name, stored in (
            ("capacity", ring.capacity),
            ("shapes", state["shapes"]),
        ):
            if stored != expected[name]:
                raise UsageError(
                    f"the checkpoint's replay buffer has {name} {stored}, the recipe's "
                    f"{expected[name]}; "
                    "resume with the settings of the run that wrote it"
                )
        for first, rows in ring.pieces():
            index = self._places(first, first + len(rows))
            self._rows.index_copy_(0, index, rows.to(self.device))
        self._written = ring.written
        self._position.fill_(ring.written)

    def _read(self, first: int, last: int) -> Tensor:
        return self._rows.index_select(0, self._places(first, last))

    def _places(self, first: int, last: int) -> Tensor:
        """Returns the positions of the transitions with these numbers, counted from the first that
        was ever stored.
        """
        return torch.arange(first, last, device=self.device).remainder_(
            self.capacity
        )

    def _require_transitions(self) -> None:
        if not len(self):
            raise UsageError(
                "the replay buffer is empty; collect at least one step before the first update"
            )

    def _take(self, index: Tensor) -> Batch:
        # Called with torch.ops because the stub of torch.split_with_sizes_copy declares
        # no return value.
        rows = self._rows.index_select(0, index)
        columns = torch.ops.aten.split_with_sizes_copy(rows, self._widths, 1)
        fields = zip(self.shapes.items(), columns, strict=True)
        return {
            name: column.view(len(index), *shape)
            for (name, shape), column in fields
        }


def _require_memory(
    capacity: int, transition: int, device: torch.device
) -> None:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        hint = ", or keep it in host memory with data.replay.device: cpu"
    elif device.type == "cpu":
        free = available_memory()
        hint = ""
    else:
        return
    required = capacity * transition
    if required > free:
        raise UsageError(
            f"data.replay.capacity: {capacity} transitions of {transition} bytes need "
            f"{required / GIB:.1f} GiB, but "
            f"{device} has {free / GIB:.1f} GiB free; lower it to at most "
            f"{free // transition}{hint}"
        )
