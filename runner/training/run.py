"""Trains one recipe, from its assembly to the final status; also the interface for Python."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

from runner.distributed.process_group import PeerError, ProcessGroup
from runner.plugin.media import MediaLog
from runner.plugin.plugin_errors import described, mistake, told
from runner.plugin.registry import Registry
from runner.recipe.loader import assignments, load
from runner.recipe.lock import (
    PROCESSES,
    copy_recipe,
    data_drift,
    locked_threads,
    read_lock,
    update_lock,
    write_lock,
    write_tuning,
)
from runner.recipe.provenance import Checkout, source
from runner.recipe.recipe import Recipe
from runner.recipe.resumption import Change, refuse_fixed
from runner.recipe.yaml_nodes import is_lock
from runner.system import generators, torch_settings
from runner.system.errors import ExitCode, PluginError, RunnerError, UsageError
from runner.system.faults import reach
from runner.system.processor import ProcessorUse, share_processor
from runner.system.secrets import redact
from runner.system.suggestions import shown_path
from runner.system.terminal import print_error
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking import RunFolder, Status, Workspace, run_log
from runner.tracking.description import DESCRIPTION
from runner.tracking.lookup import computing
from runner.tracking.run_curves import CURVES, draw_run
from runner.tracking.tracker import Tracker
from runner.training.budget import fitted
from runner.training.checkpoint_selection import load_resumed
from runner.training.final_test import test_best, untested
from runner.training.group_data import Group, refuse_other_data
from runner.training.group_steps import (
    announce_checkpoint,
    changed_count,
    count_of,
    join_training,
    refuse_other_count,
    release_checkpoint,
    report_stop,
    start_together,
    vote_of,
)
from runner.training.interruption import interruptible
from runner.training.loop import Loop
from runner.training.model import write_model
from runner.training.outputs import Display
from runner.training.pipeline import Assembly, assemble, resolve_device
from runner.training.progress_lines import displayed
from runner.training.recipe_errors import located
from runner.training.result import RunResult, result_of, stopped_by, stopped_status
from runner.training.run_tags import (
    description_of,
    resume_tags,
    stage_tags,
    start_tags,
)
from runner.training.signals import Stop, stop_on_signals
from runner.training.stall_report import StallReport
from runner.training.tuning import fresh_tuning

PathLike = str | Path
PATIENCE_SECONDS = 30.0
# A scheduler kills soon after SIGTERM; metrics missing in MLflow are then in the spool.
STOPPED_PATIENCE_SECONDS = 5.0
_LAST_SECONDS = 1.0
# Drawing the evaluations takes about a second, which is too long for a short run.
CURVE_SECONDS = 20.0
_ARTIFACTS = ("*.yaml", "*.patch", "diagnosis.json", CURVES, run_log.NAME)
_log = logging.getLogger(__name__)
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


def train(
    recipe: PathLike | Mapping[str, Any],
    set: Mapping[str, Any] | None = None,  # noqa: A002
    *,
    plugins: Sequence[PathLike | type[Any]] = (),
    tags: Mapping[str, str] | None = None,
    note: str = "",
    progress: bool | None = None,
) -> RunResult:
    """Trains a recipe and logs it to MLflow, as ``runner run`` does.

    Args:
        recipe: A recipe file, the lock of a run, the name of a recipe that ships, or a mapping with
            the structure of a file.
        set: Values that override the recipe's, by dotted path.
        plugins: Python files with plugins, or classes of their settings.
        tags: Tags of the run in MLflow, in addition to the runner's tags.
        note: The description of the run in MLflow.
        progress: Whether a line on stdout shows the progress every few seconds, later every
            minute; by default in a notebook only.

    Returns:
        Metrics, run id, folder and more. After an interruption, its ``status`` is ``STOPPED`` or
            ``PREEMPTED``, and ``resume`` is the command that continues the run.

    Raises:
        RunnerError: The recipe is wrong, or the training failed.
    """
    registry = Registry(plugins)
    loaded = load(recipe, assignments(set or {}), registry)
    with displayed(loaded, progress) as display:
        return run(loaded, registry, Workspace(), display, own_tags=tags, note=note)


def run(
    recipe: Recipe,
    registry: Registry,
    workspace: Workspace,
    display: Display,
    folder: RunFolder | None = None,
    drift: Sequence[str] = (),
    own_tags: Mapping[str, str] | None = None,
    note: str = "",
    parent: Group | None = None,
    takeover: bool = False,
    allow_drift: bool = False,
    retune: bool = False,
    started: float | None = None,
    processes: ProcessGroup | None = None,
) -> RunResult:
    """Trains a recipe, or resumes the run of a folder from its newest usable checkpoint.

    Args:
        recipe: The recipe; a resumed run has that of its lock.
        registry: The plugins.
        workspace: Contains the run.
        display: Shows the progress.
        folder: The run to resume; None for a new run.
        drift: Changes since the lock was written.
        own_tags: The user's tags of a new run.
        note: The user's description of a new run.
        parent: The group of the run.
        takeover: Whether a process on another machine that may own the run counts as dead.
        allow_drift: Whether a run is resumed with other data.
        retune: Whether stages search again instead of using the tuning choices of a lock.
        started: The start of the command (``perf_counter``); now by default.
        processes: The processes that train together, of which this is the first.

    Raises:
        RunnerError: The run's process is alive, all checkpoints are damaged or do not fit the
            recipe, a plugin raised an error, the recipe cannot run here, the store cannot be
            reached, or the training failed.
    """
    started = time.perf_counter() if started is None else started
    state = None
    changes: list[Change] = []
    count = count_of(processes)
    with ExitStack() as stack:
        # The environment: reports of stalls, generators, errors of plugins, the log.
        stall_report = StallReport(display, join_training(recipe, processes))
        display = stack.enter_context(stall_report)
        stack.enter_context(generators.exclusive(f"the training of {recipe.name}"))
        stack.enter_context(told())
        log = stack.enter_context(run_log.RunLog())

        # The recipe and the checkpoint.
        if folder is None:
            recipe = fitted(recipe, registry, log.keep)
        else:
            folder.claim(takeover=takeover)
            stack.callback(folder.release)
            state, changes = _resumed(recipe, folder, processes)
        announce_checkpoint(processes, state)
        use = stack.enter_context(_shared_processor(recipe, workspace, folder, log))

        # The pipeline.
        generators.seed(recipe.seed)
        pipeline, fingerprint = _assembled(
            recipe, registry, state, retune, display, processes
        )
        refuse_other_data(parent, pipeline, fingerprint, allow_drift)
        drift = [
            *drift,
            *_changes_since(recipe, folder, fingerprint, allow_drift, count),
        ]

        # The run in MLflow.
        checkout = None if state else source(recipe.path)
        tags = {} if state else start_tags(recipe, pipeline, parent, checkout)
        sinks = [registry.sink(kind) for kind in recipe.tracking.plugin_sinks]
        for sink in sinks:
            sink.require()
        signals = stop_on_signals(interrupts=True, vote=vote_of(processes))
        stop = stack.enter_context(signals)
        step = state["step"] if state else 0
        if folder is not None:
            tags |= resume_tags(recipe, changes, drift, step)
        with display.phase("opening the tracking store"):
            if folder is None:
                group = parent.name if parent else ""
                tracker = Tracker.open(
                    workspace,
                    recipe,
                    tags,
                    own_tags,
                    note,
                    group,
                    started,
                    count,
                )
            else:
                cursor = state["cursor"] if state else 0
                tracker = Tracker.reopen(
                    workspace,
                    folder,
                    recipe,
                    tags,
                    cursor,
                    step,
                    started,
                    count,
                )
        tracker.feed(sinks)
        stop.give_up = partial(_give_up, tracker, recipe, stall_report)
        log.open(tracker.run_dir)
        beginning = ["begun"] if folder is None else [f"resumed at step {step}", *drift]
        log.keep("; ".join(beginning))
        tracker.dataset(pipeline.recipe.values()["data"], fingerprint)

        pipeline.context.media = MediaLog(
            tracker.run_dir, pipeline.progress, tracker.artifact
        )

        # The training.
        loop = stack.enter_context(
            _concluded(pipeline, tracker, display, stop, registry, log)
        )
        if folder is None:
            _write_start(
                pipeline, tracker.run_dir, registry, use, fingerprint, checkout
            )
        else:
            if state is not None:
                loop.load_state_dict(state)
            is_changed = bool(changes or drift)
            _update_start(
                pipeline, tracker.run_dir, registry, step, fingerprint, is_changed
            )
        stall_report.start_training(loop)
        start_together(processes)
        with interruptible(loop, stop):
            loop.run()
    result = result_of(loop, tracker, None if folder is None else step)
    report_stop(processes, stop, result.exit_code)
    return result


def _resumed(
    recipe: Recipe, folder: RunFolder, processes: ProcessGroup | None
) -> tuple[dict[str, Any] | None, list[Change]]:
    """Returns the checkpoint of a run that is resumed, and the settings that have changed."""
    lock = folder.path / LOCK_NAME
    # The checkpoint has no part for a process that was not there.
    refuse_other_count(recipe, lock, count_of(processes))
    state = load_resumed(folder.checkpoints)
    release_checkpoint(processes)
    locked = read_lock(lock)
    return state, refuse_fixed(locked["recipe"], recipe)


def _assembled(
    recipe: Recipe,
    registry: Registry,
    state: dict[str, Any] | None,
    retune: bool,
    display: Display,
    processes: ProcessGroup | None,
) -> tuple[Assembly, str | None]:
    """Returns the pipeline of a run that starts or is resumed, and the fingerprint of its data."""
    # Before stages change settings.
    _report_settings()
    with display.phase("building model and data"):
        tuning = fresh_tuning(resolve_device(recipe.device)) if retune else None
        resumed = state["pipeline"] if state else None
        pipeline = assemble(
            recipe, registry.files, resumed=resumed, tuning=tuning, processes=processes
        )
        _report_start(pipeline)
    with display.phase("checking the data"):
        return pipeline, pipeline.source.fingerprint()


def _record_tuning(pipeline: Assembly, run_dir: Path) -> None:
    """Writes the tuning choices into the lock, also those that follow during the training."""
    choices = pipeline.tuning.data()
    if choices:
        write_tuning(run_dir, choices)
    # Some stages choose during the training.
    pipeline.tuning.listen(partial(write_tuning, run_dir))


@contextmanager
def _shared_processor(
    recipe: Recipe, workspace: Workspace, folder: RunFolder | None, log: run_log.RunLog
) -> Iterator[ProcessorUse]:
    """Uses the processor according to the recipe; a resumed run keeps its number of threads."""
    threads = None if folder is None else locked_threads(folder.path / LOCK_NAME)
    system = recipe.system
    trainings = computing(workspace)
    with share_processor(system.threads, system.wait, threads, trainings) as use:
        log.keep(str(use))
        yield use


def _write_start(
    pipeline: Assembly,
    run_dir: Path,
    registry: Registry,
    use: ProcessorUse,
    fingerprint: str | None,
    checkout: Checkout | None,
) -> None:
    """Writes a copy of the recipe and the lock of a new run."""
    recipe = pipeline.recipe
    start = pipeline.start
    processes = pipeline.context.processes
    processor = use.data()
    if processes is not None:
        processor[PROCESSES] = processes.count
    copy_recipe(recipe, run_dir / "recipe.yaml")
    write_lock(
        recipe,
        run_dir,
        registry,
        init_from=None if start is None else dataclasses.asdict(start),
        tuning=pipeline.tuning.data(),
        processor=processor,
        fingerprint=fingerprint,
        checkout=checkout,
    )
    _record_tuning(pipeline, run_dir)
    reach("start.locked")


def _update_start(
    pipeline: Assembly,
    run_dir: Path,
    registry: Registry,
    step: int,
    fingerprint: str | None,
    is_changed: bool,
) -> None:
    """Writes what has changed into the lock of a run that is resumed."""
    recipe = pipeline.recipe
    processes = pipeline.context.processes
    count = 1 if processes is None else processes.count
    update_lock(recipe, run_dir, registry, step, fingerprint, is_changed, count)
    _record_tuning(pipeline, run_dir)
    reach("resume.loaded")


def _report_settings() -> None:
    """Warns about settings of torch that neither torch nor the recipe has chosen."""
    settings = torch_settings.unusual()
    if settings:
        values = ", ".join(
            f"{name} is {present} instead of {usual}"
            for name, (present, usual) in settings.items()
        )
        _log.warning(
            "%s: set by a plugin or the calling program, not by the recipe; results depend on it",
            values,
        )


def _report_start(pipeline: Assembly) -> None:
    """Prints what is unusual about the first weights, if they are those of another run."""
    if pipeline.start is None:
        return
    path = pipeline.recipe.path
    locked = read_lock(path).get("init_from") if is_lock(path) else None
    for remark in pipeline.start.remarks(locked):
        _log.warning(remark)


def _changes_since(
    recipe: Recipe,
    folder: RunFolder | None,
    fingerprint: str | None,
    allow_drift: bool,
    count: int,
) -> list[str]:
    """Returns and prints what differs from the run that is resumed, or from the lock that is run
    again: data, number of processes.

    Raises:
        UsageError: The data of a run have changed, and that was not allowed, or another number of
            processes cannot continue it.
    """
    if folder is None:
        return _changed_data(recipe, None, fingerprint, allow_drift)
    remarks = changed_count(recipe, folder.path / LOCK_NAME, count)
    for remark in remarks:
        _log.warning("%s", remark)
    return [*remarks, *_changed_data(recipe, folder, fingerprint, allow_drift)]


def _changed_data(
    recipe: Recipe, folder: RunFolder | None, fingerprint: str | None, allow_drift: bool
) -> list[str]:
    """Returns a message if the data differ from those of the lock that is resumed or run again.

    Raises:
        UsageError: The data of a run have changed, and that was not allowed.
    """
    lock = recipe.path if folder is None else folder.path / LOCK_NAME
    change = data_drift(read_lock(lock), recipe, fingerprint) if is_lock(lock) else None
    if change is None:
        return []
    _log.warning("drift: %s", change)
    # A new run of a lock may differ from it, but a resumed run would be two trainings in one.
    if folder is not None and not allow_drift:
        raise UsageError(
            f"run {folder.name} would not continue as it started: its data have changed; "
            "restore them, or accept that with --allow-drift"
        )
    return [str(change)]


@contextmanager
def _concluded(
    pipeline: Assembly,
    tracker: Tracker,
    display: Display,
    stop: Stop,
    registry: Registry,
    log: run_log.RunLog,
) -> Iterator[Loop]:
    """Makes the loop; the run gets its true status, whatever happens inside the ``with``."""
    resume_command = registry.command(f"runner resume {tracker.run_name}")
    loop: Loop | None = None
    status: Status = "FAILED"
    reason = ""
    try:
        description = description_of(pipeline, tracker, resume_command)
        tracker.tag(DESCRIPTION, description)
        loop = Loop(pipeline, tracker.run_dir, tracker, display, stop, resume_command)
        with located(pipeline.recipe):
            yield loop
        reason = loop.ended_early
        # A run whose test fails is not finished: it is resumed, and tested again.
        _record_results(loop, tracker)
        status = "FINISHED" if loop.complete else stopped_status(pipeline.recipe)
    except KeyboardInterrupt:
        status = stopped_status(pipeline.recipe)
        raise
    except BaseException as error:
        if isinstance(error, PeerError) and error.failure.is_stop:
            status = stopped_status(pipeline.recipe)
        elif getattr(error, "exit_code", None) == ExitCode.PREEMPTED:
            status = "PREEMPTED"
        plugin_error = None if isinstance(error, RunnerError) else mistake(error)
        reason = _reason(error, plugin_error)
        processes = pipeline.context.processes
        if isinstance(processes, ProcessGroup) and not isinstance(error, PeerError):
            processes.claim_failure(error, reason)
        if not isinstance(error, RunnerError):
            log.keep("".join(traceback.format_exception(error)))
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            has_lock = (tracker.run_dir / LOCK_NAME).exists()
            hint = resume_command if has_lock else "start a new run"
            message = f"{reason}; when the disk takes files again: {hint}"
            raise RunnerError(message) from error
        if plugin_error is not None:
            log_path = shown_path(tracker.run_dir / run_log.NAME)
            message = f"{plugin_error}\n    the complete traceback is in {log_path}"
            raise PluginError(message) from error
        if isinstance(error, SystemExit):
            raise RunnerError(reason) from error
        raise
    finally:
        ending = f"{status} at {tracker.step:,} {pipeline.recipe.length[0]}"
        if reason:
            ending += f": {reason}"
        metrics = loop.metrics if loop else {}
        changes = loop.callbacks.summary() if loop and loop.callbacks else ""
        if changes:
            tracker.mark_changed(changes)
        description = description_of(
            pipeline, tracker, resume_command, ending, metrics, changes
        )
        tracker.tag(DESCRIPTION, description)
        log.keep(": ".join(filter(None, [status, reason])))
        for pattern in _ARTIFACTS:
            for path in sorted(tracker.run_dir.glob(pattern)):
                tracker.artifact(path)
        patience = STOPPED_PATIENCE_SECONDS if stop else PATIENCE_SECONDS
        with display.phase("sending metrics to MLflow"):
            tracker.close(status, reason, patience)


def _record_results(loop: Loop, tracker: Tracker) -> None:
    """Logs what is measured, written and drawn after a training."""
    pipeline = loop.pipeline
    # It makes an update, in which all processes would have to take part.
    if loop.complete and pipeline.context.processes is None:
        loop.measure_roofline_fraction()
    # The first updates may have shown that a stage has no effect.
    for name, value in stage_tags(pipeline).items():
        tracker.tag(name, value)
    if loop.sentinel is not None:
        alarms = "; ".join(loop.sentinel.alarms)
        tracker.tag("sentinel", alarms or "no alarm")
    # The model of an unfinished run would be replaced when it is resumed.
    if not loop.complete:
        return
    model = write_model(tracker.run_dir, pipeline.learner.config.request)
    if model is not None:
        tracker.model(*model)
    # Last, because a failure must not cost the model; the resumed run tests again.
    if untested(pipeline.recipe, pipeline.source, is_complete=True) is None:
        tested = test_best(loop, tracker.run_dir)
        loop.metrics |= tested
        tracker.log(tested, pipeline.progress.done)
        reach("run.tested")
    if time.perf_counter() - tracker.began > CURVE_SECONDS:
        with loop.display.phase("drawing the evaluations"):
            draw_run(RunFolder(tracker.run_dir), pipeline.recipe)


def _reason(error: BaseException, plugin_error: Exception | None) -> str:
    """Returns the reason of a failure in one line, for the record of the run."""
    if plugin_error is not None:
        return str(plugin_error).partition("\n")[0]
    if isinstance(error, RunnerError):
        return redact(str(error))
    return redact(described(error))


def _give_up(
    tracker: Tracker,
    recipe: Recipe,
    stall_report: StallReport,
    signal: Signals | None,
) -> None:
    """Ends the process with its true status, because the training lets no exception through."""
    status: Status = "FAILED"
    exit_code = ExitCode.FAILED
    reason = f"code does not return: {stall_report.where()}"
    if signal is not None:
        status = stopped_status(recipe)
        exit_code = stopped_by(signal, recipe)
        reason = f"stopped by {signal.name} although {reason}"
    print_error(reason)
    # A store that hangs must not keep this process, either.
    closing = threading.Thread(
        target=tracker.close, args=(status, reason, _LAST_SECONDS), daemon=True
    )
    closing.start()
    closing.join(_LAST_SECONDS)
    os._exit(exit_code)
