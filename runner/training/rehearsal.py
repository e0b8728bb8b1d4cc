"""Rehearsal of a checkpoint: pack, write, read, load and compare, before there is anything to lose.

It costs at most about ``COMPLETE_BYTES`` of disk and host memory for a moment: larger tensors are
written in part, and loaded from memory. Its files are removed from the disk.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from runner.plugin.source import State
from runner.system import generators
from runner.system.errors import CheckpointError, RunnerError
from runner.system.files import remove_quietly
from runner.system.tensor_trees import leaves
from runner.training.checkpoint import REHEARSAL, write_rehearsal
from runner.training.checkpoint_files import read_files
from runner.training.packing import pack, stored
from runner.training.state_difference import differences
from runner.training.unpacking import unpack

if TYPE_CHECKING:
    from runner.training.pipeline import Assembly

# Tensors are written and read completely, the smallest first, up to this sum.
COMPLETE_BYTES = 64 * 2**20
# About the size of the excerpt that is written of each larger tensor.
EXCERPT_BYTES = 2**16
NOTHING = re.compile(r"(?!)")
# Some entries of optimizers depend on the stages: kernels, and where these count their steps.
OF_STAGES = re.compile(r"/param_groups/|/optimizers/.*/step$")
_LONGEST_ERROR = 400
# The first checkpoint reports a full or failing disk.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class TensorForm(NamedTuple):
    """Properties of a tensor that loading must not change."""

    kind: str
    device: str
    requires_grad: bool

    def __str__(self) -> str:
        suffix = " that requires a gradient" if self.requires_grad else ""
        return f"a {self.kind} on {self.device}{suffix}"


@dataclass(frozen=True)
class RehearsedState:
    """A state that has been written and read.

    Attributes:
        state: The state as it was read; tensors that were not written completely are those of the
            training.
        is_complete: Whether every tensor was written completely.
        forms: Type, device and need of a gradient of every tensor before, by entry.
    """

    state: State
    is_complete: bool
    forms: Mapping[str, TensorForm]

    def part(self, *path: str) -> RehearsedState:
        """Returns one entry of the state alone, inside of the entries that contain it.

        Its forms are still those of the complete state.
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
        state: The state that the next checkpoint would contain.
        load: Loads a state and returns the state that would then be saved.

    Returns:
        The state as it was read; None if the disk refuses the files, which the first checkpoint
            reports.

    Raises:
        RunnerError: An entry of the state has changed. The message names it.
    """
    rehearsed = _write_and_read(folder, state)
    if rehearsed is not None and load is not None:
        check_loaded(rehearsed, load)
    return rehearsed


def check_loaded(
    rehearsed: RehearsedState,
    load: Callable[[State], State],
    ignored: re.Pattern[str] = NOTHING,
) -> None:
    """Loads a state that was read, and compares the result, except for ``ignored`` entries.

    Raises:
        RunnerError: Loading failed, or an entry differs.
    """
    # Plugins may raise anything.
    try:
        loaded = load(rehearsed.state)
    except Exception as error:
        text = " ".join(str(error).split())[:_LONGEST_ERROR]
        if not isinstance(error, RunnerError):
            text = f"{type(error).__name__}: {text}"
        message = f"load_state_dict fails for what state_dict returned: {text}"
        raise _refusal(message) from error
    lines = (
        line
        for line in differences(rehearsed.state, loaded)
        if not ignored.search(line.partition(": ")[0])
    )
    _refuse_first(lines, "after load_state_dict")
    for entry, form in _tensor_forms(loaded).items():
        expected = rehearsed.forms.get(entry, form)
        if expected != form and not ignored.search(entry):
            raise _refusal(
                f"{entry}: {expected} has become {form} after load_state_dict"
            )


def _write_and_read(folder: Path, state: State) -> RehearsedState | None:
    node, tensors, rings = pack(state)
    complete = _completely_written(tensors)
    contents = dict(tensors)
    for name in tensors.keys() - complete:
        contents[name] = _excerpt(tensors[name])
    try:
        path = write_rehearsal(folder, node, contents)
        read_node, read_tensors, _ = read_files(path)
        for name in tensors.keys() - complete:
            entry = name.lstrip("0123456789")
            lines = differences(stored(contents[name]), read_tensors[name], entry)
            _refuse_first(lines, "in its file")
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        return None
    except CheckpointError as error:
        raise _refusal(
            f"a checkpoint could not be read after it was written: {error}"
        ) from error
    finally:
        remove_quietly(folder / REHEARSAL)
    # Tensors that were written in part are loaded from memory.
    live = {name: tensor for name, tensor in tensors.items() if name not in complete}
    read: State = unpack(read_node, read_tensors, lambda name, **_: rings[name], live)
    _refuse_first(differences(state, read), "in a checkpoint")
    return RehearsedState(read, not live, _tensor_forms(state))


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
            slice_bytes = tensor.nbytes // tensor.shape[dimension]
            length = max(1, EXCERPT_BYTES // slice_bytes)
            tensor = tensor.narrow(dimension, 0, length)
    return tensor


def _tensor_forms(state: State) -> dict[str, TensorForm]:
    """Returns the form of every tensor in a state, by entry."""
    forms = {}
    for path, leaf in leaves(state):
        if isinstance(leaf, Tensor):
            kind = type(leaf).__name__
            form = TensorForm(kind, str(leaf.device), leaf.requires_grad)
            forms[path.replace(".", "/")] = form
    return forms


def _refuse_first(lines: Iterator[str], stage: str) -> None:
    """Raises a RunnerError for the first of some differences, if there is one."""
    line = next(lines, None)
    if line is not None:
        raise _refusal(f"{line.lstrip('/')} {stage}")


def _refusal(reason: str) -> RunnerError:
    return RunnerError(f"the state of this training cannot be resumed from: {reason}")


def rehearse_learner(folder: Path, state: State, pipeline: Assembly) -> None:
    """Raises a RunnerError if the state after the first update does not survive a checkpoint.

    The state goes into another learner, because stages may hold tensors of the one that trains
    (a CUDA graph), and batches are drawn ahead. A model so large that a second one may not fit
    is not built again.

    Args:
        folder: Folder of the checkpoints.
        state: State of the training.
        pipeline: The pipeline of the training.
    """
    rehearsed = rehearse(folder, state)
    if rehearsed is None or not rehearsed.is_complete:
        return

    def load(state: State) -> State:
        learner = pipeline.build_another_learner()
        learner.load_complete_state(state["pipeline"]["learner"])
        return {"pipeline": {"learner": learner.complete_state()}}

    with generators.restored():
        check_loaded(rehearsed.part("pipeline", "learner"), load, OF_STAGES)
