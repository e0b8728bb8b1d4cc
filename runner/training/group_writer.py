"""Checkpoints of several processes, which the first of them writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from runner.distributed.gathered_state import gathered_states, send_state
from runner.distributed.process_group import ProcessGroup
from runner.training.checkpoint import CHECKPOINTS, Writer
from runner.training.state_schema import fitting

if TYPE_CHECKING:
    from runner.plugin.source import State
    from runner.training.pipeline import Assembly

OTHERS = "processes"
"""The entry of a checkpoint with the parts of all processes but the first, by rank."""


class NoWriter(Writer):
    """Writes no checkpoint, because the first process writes that of all."""

    def save(
        self,
        step: int,
        state: State,
        score: float | None = None,
        done: int | None = None,
        scores: Mapping[str, float] | None = None,
    ) -> None:
        """Writes nothing."""


class PartSender(NoWriter):
    """Sends the first process what is different in this one."""

    group: ProcessGroup

    def save(
        self,
        step: int,
        state: State,
        score: float | None = None,
        done: int | None = None,
        scores: Mapping[str, float] | None = None,
    ) -> None:
        """Sends the part of this process, and its rings as the first process writes them."""
        send_state(self.group, part_of(state))


class GroupWriter(Writer):
    """Writes checkpoints with the parts of all processes."""

    group: ProcessGroup

    def save(
        self,
        step: int,
        state: State,
        score: float | None = None,
        done: int | None = None,
        scores: Mapping[str, float] | None = None,
    ) -> None:
        """Writes a checkpoint; see ``Writer.save``. All processes have to call it."""
        with gathered_states(self.group) as parts:
            super().save(step, {**state, OTHERS: parts}, score, done, scores)


def make_writer(
    pipeline: Assembly, run_dir: Path, prepare: Callable[[], None]
) -> Writer:
    """Returns the writer of a training's checkpoints in this process.

    Args:
        pipeline: The pipeline of the training.
        run_dir: Folder of the run, or of this process alone if it is not the first.
        prepare: Called before a checkpoint gets its name.
    """
    group = pipeline.context.processes
    folder = run_dir / CHECKPOINTS
    keep = pipeline.recipe.train.keep
    if not isinstance(group, ProcessGroup):
        return Writer(folder, prepare, keep)
    if not pipeline.draws_parts:
        return NoWriter(folder) if group.rank else Writer(folder, prepare, keep)
    writer = PartSender(folder) if group.rank else GroupWriter(folder, prepare, keep)
    writer.group = group
    return writer


def part_of(state: State) -> State:
    """Returns the entries of a training's state that differ between processes."""
    pipeline = state["pipeline"]
    return {
        "source": pipeline["source"],
        "generators": pipeline["generators"],
        "global_generators": state["generators"],
    }


def state_of_process(state: State, group: ProcessGroup) -> State:
    """Returns the state with which a process resumes.

    Raises:
        CheckpointError: The checkpoint has no part of this process.
    """
    if not group.rank or OTHERS not in state:
        return state
    with fitting():
        part = state[OTHERS][group.rank - 1]
        entries = {name: part[name] for name in ("source", "generators")}
        return {
            **state,
            "pipeline": state["pipeline"] | entries,
            "generators": part["global_generators"],
        }
