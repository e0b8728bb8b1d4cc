"""The part of a process in a training on several processes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from runner.plugin.media import MediaLog
from runner.plugin.plugin_errors import told
from runner.recipe.lock import locked_threads
from runner.system import generators
from runner.system.errors import ExitCode
from runner.system.processor import share_processor
from runner.system.workspace_paths import LOCK_NAME
from runner.training.checkpoint_selection import load_resumed
from runner.training.group_steps import (
    announce_checkpoint,
    join_training,
    release_checkpoint,
    report_stop,
    start_together,
)
from runner.training.group_writer import state_of_process
from runner.training.interruption import interruptible
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.result import stopped_by
from runner.training.signals import stop_on_signals

if TYPE_CHECKING:
    from runner.distributed.process_group import ProcessGroup
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.tracking import RunFolder


def follow_training(
    recipe: Recipe, registry: Registry, group: ProcessGroup, folder: RunFolder | None
) -> ExitCode:
    """Trains like ``run``, as a process that writes nothing.

    Args:
        recipe: The recipe.
        registry: The plugins.
        group: The processes, of which this is not the first.
        folder: The folder of a run that is resumed; None for a new run.

    Returns:
        The exit code of this process.

    Raises:
        RunnerError: As ``run``.
    """
    with ExitStack() as stack:
        stack.enter_context(generators.exclusive(f"the training of {recipe.name}"))
        stack.enter_context(told())
        join_training(recipe, group)
        state, threads = _resumed(group, folder)
        system = recipe.system
        stack.enter_context(share_processor(system.threads, system.wait, threads))

        generators.seed(recipe.seed)
        resumed = None if state is None else state["pipeline"]
        pipeline = assemble(recipe, registry.files, resumed=resumed, processes=group)
        pipeline.source.fingerprint()
        vote = group.vote
        stop = stack.enter_context(stop_on_signals(interrupts=True, vote=vote))
        stop.give_up = partial(_give_up, recipe)

        # Rehearsals and a diagnosis are written, and forgotten.
        scratch = Path(
            stack.enter_context(TemporaryDirectory(prefix="runner-process-"))
        )
        if pipeline.learner.sharding is not None:
            # The first process cannot draw with its part of the parameters alone.
            pipeline.context.media = MediaLog(scratch, pipeline.progress, _forget)
        output = NoOutput()
        loop = Loop(pipeline, scratch, output, output, stop)
        if state is not None:
            loop.load_state_dict(state)
        with interruptible(loop, stop):
            # The first process may be interrupted while it opens its tracking store.
            start_together(group)
            loop.run()
        code = ExitCode.DONE
        if stop.received is not None and not loop.complete:
            code = stopped_by(stop.received, recipe)
        report_stop(group, stop, code)
    return code


def _resumed(
    group: ProcessGroup, folder: RunFolder | None
) -> tuple[dict[str, Any] | None, int | None]:
    """Returns the checkpoint and the number of threads of a run that is resumed."""
    if folder is None:
        announce_checkpoint(group, None)
        return None, None
    release_checkpoint(group)
    state = load_resumed(folder.checkpoints)
    announce_checkpoint(group, state)
    if state is not None:
        state = state_of_process(state, group)
    return state, locked_threads(folder.path / LOCK_NAME)


def _forget(path: Path) -> None:
    """Keeps no file of a process that is not the first."""


def _give_up(recipe: Recipe, received: Any) -> None:
    """Ends this process, because the training lets no exception through."""
    os._exit(ExitCode.FAILED if received is None else stopped_by(received, recipe))
