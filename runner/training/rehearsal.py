"""Rehearsal of a checkpoint: pack, write, read, load and compare, before there is anything to lose.

It costs at most about ``COMPLETE_BYTES`` of disk and host memory for a moment: larger tensors are written in part, and
loaded from where they are. Nothing of it stays on the disk.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.plugin.source import State
from runner.system.errors import CheckpointError, RunnerError
from runner.system.files import remove_quietly
from runner.system.tensor_trees import leaves
from runner.training.checkpoint import REHEARSAL, write_rehearsal
from runner.training.checkpoint_files import read_files
from runner.training.packing import pack, stored
from runner.training.state_difference import differences
from runner.training.unpacking import unpack

COMPLETE_BYTES = 64 * 2**20
"""Tensors are written and read completely, the smallest first, up to this sum."""
EXCERPT_BYTES = 2**16
"""About how much is written of each tensor beyond that."""
NOTHING = re.compile(r"(?!)")
OF_STAGES = re.compile(r"/param_groups/|/optimizers/.*/step$")
"""Entries of optimizers that depend on the stages: which kernels they use, and where these count their steps."""
_LONGEST_ERROR = 400


@dataclass(frozen=True)
class RehearsedState:
    """A state that has been written and read.

    Attributes:
        state: The state as it was read; tensors that were not written completely are those of the
            training.
        is_complete: Whether every tensor was written completely.
        places: Type, device and need of a gradient of every tensor before, by entry.
    """

    state: State
    is_complete: bool
    places: Mapping[str, tuple[Any, ...]]

    def part(self, *path: str) -> RehearsedState:
        """Returns one entry of the state alone, inside of the entries that contain it.

        Its places are still those of the complete state.
        """
        state: Any = reduce(getitem, path, self.state)
        for name in reversed(path):
            state = {name: state}
        return replace(self, state=state)


def rehearse(
    folder: Path, state: State, load: Callable[[State], State] | None = None
) -> RehearsedState | None:
    """Writes and reads a state, and loads it if ``load`` is given.

    Args:
        folder: Folder of the run's checkpoints, in which a temporary folder is made.
        state: What the next checkpoint would contain.
        load: Loads a state and returns what is then there to be saved.

    Returns:
        The state as it was read; None if the disk refuses the files, which the first checkpoint reports.

    Raises:
        RunnerError: an entry of the state does not come back as it was. The message names it.
    """
    read = _write_and_read(folder, state)
    if read is not None and load is not None:
        check_loaded(read, load)
    return read


def check_loaded(
    read: RehearsedState,
    load: Callable[[State], State],
    ignored: re.Pattern[str] = NOTHING,
) -> None:
    """Loads a state that was read, and compares what is there then, except for entries that ``ignored`` finds.

    Raises:
        RunnerError: loading failed, or an entry differs.
    """
    try:
        loaded = load(read.state)
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_ERROR]
        text = (
            reason
            if isinstance(error, RunnerError)
            else f"{type(error).__name__}: {reason}"
        )
        raise _refusal(
            f"load_state_dict fails for what state_dict returned: {text}"
        ) from error
    lines = differences(read.state, loaded)
    _refuse_first(
        (line for line in lines if not ignored.search(line.partition(": ")[0])),
        "after load_state_dict",
    )
    for entry, place in _places(loaded).items():
        if read.places.get(entry, place) != place and not ignored.search(entry):
            before, after = (_place_text(each) for each in (read.places[entry], place))
            raise _refusal(
                f"{entry}: {before} has become {after} after load_state_dict"
            )


def _write_and_read(folder: Path, state: State) -> RehearsedState | None:
    rest, tensors, rings = pack(state)
    complete = _completely_written(tensors)
    excerpts = {
        name: tensor if name in complete else _excerpt(tensor)
        for name, tensor in tensors.items()
    }
    try:
        path = write_rehearsal(folder, rest, excerpts)
        text, contents, _ = read_files(path)
        for name in excerpts.keys() - complete:
            tensor = excerpts[name]
            _refuse_first(
                differences(stored(tensor), contents[name], name.lstrip("0123456789")),
                "in its file",
            )
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        return None
    except CheckpointError as error:
        raise _refusal(
            f"a checkpoint could not be read after it was written: {error}"
        ) from error
    finally:
        remove_quietly(folder / REHEARSAL)
    live = {name: tensor for name, tensor in tensors.items() if name not in complete}
    read: State = unpack(text, contents, lambda name, **_: rings[name], live)
    _refuse_first(differences(state, read), "in a checkpoint")
    return RehearsedState(read, not live, _places(state))


def _completely_written(tensors: Mapping[str, Tensor]) -> set[str]:
    names = set()
    total = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].nbytes):
        total += tensor.nbytes
        if total > COMPLETE_BYTES:
            break
        names.add(name)
    return names


def _excerpt(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor with about ``EXCERPT_BYTES``: its corner."""
    for dimension in range(tensor.dim()):
        if tensor.nbytes > EXCERPT_BYTES:
            below = tensor.nbytes // tensor.shape[dimension]
            tensor = tensor.narrow(dimension, 0, max(1, EXCERPT_BYTES // below))
    return tensor


def _places(state: State) -> dict[str, tuple[Any, ...]]:
    found = (
        (entry.replace(".", "/"), leaf)
        for entry, leaf in leaves(state)
        if isinstance(leaf, Tensor)
    )
    return {
        entry: (type(leaf).__name__, str(leaf.device), leaf.requires_grad)
        for entry, leaf in found
    }


def _place_text(place: tuple[Any, ...]) -> str:
    kind, device, requires_grad = place
    return f"a {kind} on {device}" + (
        " that requires a gradient" if requires_grad else ""
    )


def _refuse_first(found: Iterator[str], stage: str) -> None:
    first = next(found, None)
    if first is not None:
        raise _refusal(f"{first.lstrip('/')} {stage}")


def _refusal(reason: str) -> RunnerError:
    return RunnerError(f"the state of this training cannot be resumed from: {reason}")
