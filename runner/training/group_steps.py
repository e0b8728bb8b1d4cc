"""Steps of a training at which the processes of a group wait for each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runner.distributed.refusals import refuse_recipe
from runner.recipe.lock import locked_processes
from runner.system.errors import ExitCode, RunnerError, UsageError
from runner.training.signals import GroupStop, GroupVote, Stop

if TYPE_CHECKING:
    from runner.distributed.process_group import ProcessGroup
    from runner.plugin.source import State
    from runner.recipe.recipe import Recipe


def join_training(recipe: Recipe, group: ProcessGroup | None) -> float | None:
    """Connects the processes of a training, if there are several.

    Returns:
        The limit of a stall in seconds, None without one. Several processes wait for each other, so
            that their connection has the limit.

    Raises:
        UsageError: Several processes cannot train this recipe.
    """
    if group is None:
        return recipe.train.stall_s
    refuse_recipe(recipe, group.count)
    is_on_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    group.connect("cpu" if is_on_cpu else "cuda", recipe.train.stall_s)
    return None


def count_of(group: ProcessGroup | None) -> int:
    """Returns the number of processes of a training."""
    return 1 if group is None else group.count


def vote_of(group: ProcessGroup | None) -> GroupVote | None:
    """Returns the votes on the end of a training; None for a single process."""
    return None if group is None else group.vote


def refuse_other_count(recipe: Recipe, lock: Path, count: int) -> None:
    """Raises a UsageError if another number of processes has trained a run whose data have a state
    in every process.
    """
    locked = locked_processes(lock)
    if count == locked or recipe.data.division == "rows":
        return
    trained = f"run {lock.parent.name} was trained by {locked} processes"
    raise UsageError(
        f"{trained}, and this would be {count}: '{recipe.data.kind}' has "
        "a state in each; runner resume starts as many as before"
    )


def changed_count(recipe: Recipe, lock: Path, count: int) -> list[str]:
    """Returns a remark if another number of processes has trained a run until now.

    Raises:
        UsageError: Its data have a state in every process.
    """
    refuse_other_count(recipe, lock, count)
    locked = locked_processes(lock)
    if count == locked:
        return []
    return [
        f"number of processes: {count} instead of {locked}, so sums are rounded in another order"
    ]


def release_checkpoint(group: ProcessGroup | None) -> None:
    """Lets the other processes read a checkpoint, after the first one has renamed damaged ones."""
    if group is not None:
        group.decide(lambda: None)


def announce_checkpoint(group: ProcessGroup | None, state: State | None) -> None:
    """Sends all processes the step from which the first one resumes.

    Raises:
        RunnerError: This process has read another checkpoint.
    """
    if group is None:
        return
    step = None if state is None else state["step"]
    first_step = group.decide(lambda: step)
    if step != first_step:
        problem = f"this process resumes at step {step}"
        raise RunnerError(f"{problem}, and the first one at {first_step}")


def start_together(group: ProcessGroup | None) -> None:
    """Waits until the first process is ready to train.

    Its tracking store may take longer to open than an update may take.
    """
    if group is not None:
        group.decide(lambda: None)


def report_stop(group: ProcessGroup | None, stop: Stop, code: ExitCode) -> None:
    """Reports a stop without the other processes to them."""
    is_abandoned = isinstance(stop, GroupStop) and stop.is_abandoned
    if group is not None and is_abandoned and stop.received is not None:
        group.claim_stop(code, f"stopped by {stop.received.name}")
