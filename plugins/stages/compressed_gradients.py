"""Gradients that several processes exchange in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.api import Pipeline, Setting, Stage, StageConfig, State, Statistical

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    from runner.api import GradientBucket

LEAST_NORM = 1e-8
"""Added to norms when matrices are orthogonalised: a gradient may be zero."""
LEAST_COMPRESSION = 2
"""How many times as small a matrix has to become."""
EXACT_UPDATES = 2
"""Updates whose gradients PowerSGD leaves as they are, the least that torch allows."""


class CompressedGradientsConfig(StageConfig):
    """Compresses the gradients that several processes exchange, by torch's communication hooks.

    ``fp16`` and ``bf16`` send half as many bytes. ``powersgd`` sends a matrix of n times m numbers as
    two of n and m times ``rank``, and adds what is lost to the next gradient (Vogels et al. 2019,
    arXiv:1905.13727); vectors, and matrices that would not become smaller, are sent as they are.

    When it helps: it is made for networks between machines that are slower than the computation;
    that was not measured.
    When it hurts: on one machine, 0.71 to 0.97 times the speed without it (two processes, three
    recipes, November 2026). Gradients are rounded, and fp16 loses those below 6e-8. 16 bits passed
    with a small classifier and a small language model. Rank 1 lost 1.7 points of accuracy, and
    rank 4 less than 1; in short trainings of the language model both lost more than 0.1 nats.
    """

    kind: ClassVar[str] = "compressed_gradients"
    implementation = "CompressedGradients"
    phase: ClassVar[int] = 2
    claims: ClassVar[frozenset[str]] = frozenset({"sum_gradients"})

    format: Literal["fp16", "bf16", "powersgd"] = "fp16"
    """How gradients are sent."""
    rank: Annotated[int, Field(ge=1, le=64)] = 2
    """The rank of matrices that PowerSGD sends."""

    def contract(self, setting: Setting) -> Statistical:
        """Returns Statistical: gradients are rounded."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns why nothing is sent, or None."""
        return "one process sends no gradients" if setting.processes == 1 else None


class CompressedGradients(Stage):
    """Replaces the sum of gradients over all processes."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the sum."""
        self._learner = pipeline.learner
        # By the identity of the first parameter of a bucket.
        self._keys: dict[int, str] = {}
        self._powers: dict[str, PowerSGDState] = {}
        # State of a resumed training, until its buckets are met again.
        self._stored: Mapping[str, Any] = {}
        self._gather: Callable[[Any], list[Any]] | None = None
        self._sent = 0
        self._uncompressed = 0
        pipeline.slots.replace("sum_gradients", self.sum)

    def sum(self, bucket: GradientBucket) -> None:
        """Adds up the gradients of a bucket over all processes, compressed."""
        processes = bucket.processes
        self._gather = processes.gather
        # Counts are exact, because a parameter without a gradient must not be stepped.
        processes.sum_in_place(bucket.flags)
        mean = processes.exchange(lambda: self._mean(bucket))
        bucket.gradients.copy_(mean).mul_(processes.count)
        self._uncompressed += bucket.gradients.nbytes

    def _mean(self, bucket: GradientBucket) -> Tensor:
        """Returns the compressed mean of a bucket's gradients."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        views = _Bucket(bucket)
        if self.config.format == "powersgd":
            power = self._power_of(bucket)
            is_exact = power.iter < power.start_powerSGD_iter
            rank = None if is_exact else self.config.rank
            self._sent += bytes_of_powersgd(bucket.shapes, bucket.flat.element_size(), rank)
            # torch leaves its hooks untyped for other buckets than those of its own reducer.
            hook: Any = powerSGD_hook.powerSGD_hook
            mean: Tensor = hook(power, views).wait()
            return mean
        self._sent += bucket.gradients.nbytes * 2 // bucket.flat.element_size()
        is_fp16 = self.config.format == "fp16"
        cast: Any = default_hooks.fp16_compress_hook if is_fp16 else default_hooks.bf16_compress_hook
        rounded: Tensor = cast(None, views).wait()
        return rounded

    def _power_of(self, bucket: GradientBucket) -> PowerSGDState:
        """Returns the state of PowerSGD for a bucket: an optimizer's parameters of one type."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        first = id(bucket.parameters[0])
        if first not in self._keys:
            named = self._learner.named_parameters()
            self._keys = {id(parameter): name for name, parameter in named}
        key = self._keys[first]
        if key not in self._powers:
            power: Any = PowerSGDState(
                None,
                self.config.rank,
                EXACT_UPDATES,
                LEAST_COMPRESSION,
                orthogonalization_epsilon=LEAST_NORM,
            )
            if key in self._stored:
                _restore(power, self._stored[key], bucket.flat.device)
            self._powers[key] = power
        return self._powers[key]

    def closing_notes(self) -> Sequence[str]:
        """Returns how many bytes a process has handed to the others, and how many without the stage."""
        if not self._sent:
            return ()
        ratio = self._uncompressed / self._sent
        return (f"gradients of {self._sent / 2**20:,.1f} MiB were added up, {ratio:.1f} times fewer than without it",)

    def state_dict(self) -> State:
        """Returns the state of PowerSGD in all processes, each of which has lost other parts."""
        powers = {key: _state_of(power) for key, power in self._powers.items()}
        stored = {**self._stored, **powers}
        if self._gather is None or not powers:
            return {"powers": [stored]} if stored else {}
        return {"powers": self._gather(stored)}

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        if not state:
            return
        from torch import distributed

        by_rank = state["powers"]
        is_connected = distributed.is_initialized()
        count = distributed.get_world_size() if is_connected else 1
        if len(by_rank) == count:
            self._stored = by_rank[distributed.get_rank() if is_connected else 0]
        else:
            self._stored = shared_powers(by_rank, count)
        self._powers = {}


class _Bucket:
    """The part of torch's ``GradBucket`` that its hooks use."""

    def __init__(self, bucket: GradientBucket) -> None:
        self._bucket = bucket

    def buffer(self) -> Tensor:
        """Returns the gradients as one vector."""
        return self._bucket.gradients

    def gradients(self) -> list[Tensor]:
        """Returns the gradients in their shapes; a single number is a vector of one."""
        return [view.reshape(1) if view.dim() == 0 else view for view in self._bucket.views()]

    def index(self) -> int:
        """Returns 0: every bucket has a state of its own."""
        return 0

    def is_last(self) -> bool:
        """Returns True: the state counts every sum."""
        return True


def bytes_of_powersgd(shapes: Sequence[torch.Size], item_bytes: int, rank: int | None) -> int:
    """Returns the bytes that PowerSGD adds up for gradients of these shapes.

    A matrix of n times m becomes r (n + m) numbers, if those are at most half as many: the rule of
    torch's hook.

    Args:
        shapes: Shapes of the gradients.
        item_bytes: Bytes of a number.
        rank: The rank; None for an update whose gradients are exact.
    """
    numbers = 0
    for shape in shapes:
        size = shape.numel()
        rows = shape[0] if shape else 1
        columns = size // rows if rows else 0
        compressed = min(rows, columns, rank or 0) * (rows + columns)
        is_smaller = rank is not None and compressed * LEAST_COMPRESSION < size
        numbers += compressed if is_smaller else size
    return numbers * item_bytes


def shared_powers(by_rank: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Returns the state of PowerSGD for each of another number of processes.

    Each has an equal part of what all processes together have yet to send.

    Args:
        by_rank: The states of the processes that were saved.
        count: Number of processes that continue.
    """
    powers = {}
    for key, first in by_rank[0].items():
        errors = {index: sum(state[key]["errors"][index] for state in by_rank) / count for index in first["errors"]}
        powers[key] = {**first, "errors": errors}
    return powers


def _state_of(power: PowerSGDState) -> dict[str, Any]:
    """Returns the state of PowerSGD in one process, on the host."""
    from torch import from_numpy

    generator: Any = power.rng.get_state(legacy=True)
    _, keys, position, _, _ = generator
    tensors = {"errors": power.error_dict, "left": power.p_memory_dict, "right": power.q_memory_dict}
    return {
        "iterations": power.iter,
        "rank": power.matrix_approximation_rank,
        "keys": from_numpy(keys.astype("int64")),
        "position": position,
        **{name: {index: value.cpu() for index, value in values.items()} for name, values in tensors.items()},
    }


def _restore(power: PowerSGDState, state: Mapping[str, Any], device: torch.device) -> None:
    """Restores what ``_state_of`` returned; matrices of another rank are drawn again."""
    power.iter = state["iterations"]
    power.rng.set_state(("MT19937", state["keys"].numpy().astype("uint32"), state["position"], 0, 0.0))
    tensors = {"errors": power.error_dict}
    if state["rank"] == power.matrix_approximation_rank:
        tensors |= {"left": power.p_memory_dict, "right": power.q_memory_dict}
    for name, values in tensors.items():
        values.update({int(index): value.to(device) for index, value in state[name].items()})
