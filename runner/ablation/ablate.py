"""An ablation from its folder to its report: new or continued, measured, written and published."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from runner.ablation.ablation_folder import (
    REPORT,
    RESULT,
    RUNS,
    choose_folder,
    describe_experiment,
)
from runner.ablation.ablation_plots import draw
from runner.ablation.ablation_record import recorded
from runner.ablation.analysis import CaseResult, Result, VariantResult, analyse, slope
from runner.ablation.experiment import Experiment, keep_budgets
from runner.ablation.measurement_log import ROUNDS, MeasurementLog
from runner.ablation.measurement_rounds import Gate, Measurement, Reporter
from runner.ablation.recommendation import recommend
from runner.ablation.report import markdown, summary, write_recipe
from runner.plugin.registry import Registry
from runner.recipe.lock import write_lock
from runner.recipe.recipe import flatten
from runner.system.errors import ExitCode, RunnerError, StorageError
from runner.system.files import make_folder, write_durably, write_text
from runner.system.hardware import hardware
from runner.system.secrets import redact_values
from runner.system.stored_json import json_text
from runner.system.suggestions import shown_path
from runner.system.workspace_paths import RECORD
from runner.tracking.description import DESCRIPTION, code, describe
from runner.tracking.mlflow_view import view_of
from runner.tracking.store import Store, params_of
from runner.tracking.workspace import Workspace, folder_name
from runner.training.signals import Stop, stop_on_signals
from runner.verify.variants import AGAIN, BASELINE

GATE_SHARE = 0.2
"""Share of the time that is reserved for the gate after the measurement."""
FINISH_SECONDS = 8.0
"""Time that is reserved for report, plots and MLflow."""
_FIGURES = (
    "compile_s",
    "warmup_s",
    "peak_memory",
    "peak_host_memory",
    "limit_fraction",
    "break_even_updates",
)


def ablate(
    experiment: Experiment,
    registry: Registry,
    workspace: Workspace,
    out: Path | None,
    fresh: bool,
    command: str,
    gate: Gate | None,
    reporter: Reporter,
) -> Result:
    """Measures an experiment and writes its report, its figures and its plots.

    The folder is ``out``, or one of the workspace. An interrupted ablation is
    continued unless ``fresh`` is set. The gate judges every variant for which
    there is time; without it, the column of verdicts stays empty. The budget
    counts from the start of the reporter. The report contains the command.

    Raises:
        StorageError: MLflow's store cannot be reached at the start, or the folder not be written.
        UsageError: the folder belongs to something else, or the budget is too small for a single
            variant.
        RunnerError: the recipe cannot run here.
    """
    experiment = keep_budgets(experiment, registry, reporter.say)
    with reporter.phase("opening the tracking store"):
        store = Store(workspace)
    description = describe_experiment(experiment)
    with stop_on_signals() as stop:
        folder = choose_folder(workspace, description, out, fresh)
        if (folder / ROUNDS).exists():
            reporter.say(f"continuing in {folder}")
        try:
            with (
                closing(MeasurementLog(folder, description)) as log,
                recorded(experiment, log, workspace) as finish,
            ):
                # A lock must record the files as they are before the measurement.
                for case in experiment.cases:
                    name = folder_name(case.name) if case.name else "recipe"
                    locks = folder / "locks" / name
                    make_folder(locks)
                    write_lock(case.recipe, locks, registry, results=folder)
                time_share = 1.0 if gate is None else 1.0 - GATE_SHARE
                measurements = [
                    Measurement(
                        case,
                        experiment.config,
                        registry,
                        log,
                        reporter,
                        stop,
                        time_share / len(experiment.cases),
                    )
                    for case in experiment.cases
                ]
                result = _measured(experiment, measurements, log, gate, stop, command)
                with reporter.phase("writing the report"):
                    _write(experiment, result, folder)
                try:
                    with reporter.phase("sending it to MLflow"):
                        result = replace(
                            result, run_id=_publish(store, experiment, result, log)
                        )
                # A client may raise anything, and the measurements are safe in the folder.
                except Exception as error:
                    problem = (
                        f"MLflow does not take the ablation: {error}; the result is in "
                        f"{folder}, and the same command sends it again"
                    )
                    result = replace(result, tracking_problem=problem)
                    reporter.say(problem)
                finish(result)
                # The file that marks the ablation as finished.
                if not stop and not result.tracking_problem:
                    write_durably(
                        folder / RESULT,
                        json_text(redact_values(result.data()), indent=1) + "\n",
                    )
        except OSError as error:
            raise StorageError(
                f"{folder}: {error.strerror}; free some space, or name another --out"
            ) from error
    return replace(result, signal=stop.received or 0)


def _measured(
    experiment: Experiment,
    all_cases: list[Measurement],
    log: MeasurementLog,
    gate: Gate | None,
    stop: Stop,
    command: str,
) -> Result:
    """Measures and verifies the remaining variants, and returns the results of all."""
    log.add(load=os.getloadavg()[0])
    budget = experiment.config.budget - log.earlier_seconds - FINISH_SECONDS
    deadline = all_cases[0].reporter.started + budget
    reserved = 0.0
    if gate is not None:
        reserved = GATE_SHARE * max(0.0, deadline - time.monotonic())

    # Every case is measured before the gate judges any: its verdicts can be had later, too.
    for case, case_deadline in _shares(all_cases, deadline - reserved):
        if not stop:
            case.run(case_deadline, case_deadline + reserved / len(all_cases))
    for case, case_deadline in _shares(all_cases, deadline):
        if gate is not None:
            case.judge(gate, case_deadline)

    # After a signal, a case with a single process has no interval.
    finished = [
        case for case in all_cases if not stop or case.lines.ratio(AGAIN, [BASELINE])
    ]
    if not finished:
        error = RunnerError(
            "interrupted before each variant had two processes; the same command continues"
        )
        error.exit_code = ExitCode(128 + int(stop.received or 0))
        raise error
    cases = tuple(
        analyse(case.case, case.variants, case.lines, experiment.config.processes)
        for case in finished
    )
    return Result(
        name=experiment.config.name,
        digest=experiment.digest,
        command=command,
        machine=hardware(),
        load=max(entry["load"] for entry in log.entries if "load" in entry),
        cases=cases,
        recommendations=tuple(
            recommend(measurement.case, case, measurement.registry)
            for measurement, case in zip(finished, cases, strict=True)
        ),
        slope=slope(cases),
        seconds=log.seconds,
        folder=str(log.folder),
        interrupted=bool(stop),
        published_by=experiment.config.published_by,
    )


def _shares(
    all_cases: Sequence[Measurement], deadline: float
) -> Iterator[tuple[Measurement, float]]:
    """Yields each case with its deadline; time that a case does not use is shared by the
    following ones.
    """
    for index, case in enumerate(all_cases):
        started = time.monotonic()
        remaining_cases = len(all_cases) - index
        yield case, started + max(0.0, deadline - started) / remaining_cases


def _write(experiment: Experiment, result: Result, folder: Path) -> None:
    """Writes recipes, plots and the report to the folder."""
    # An interrupted ablation has no result for its last cases.
    cases = zip(experiment.cases, result.cases, result.recommendations, strict=False)
    for case, measured, recommendation in cases:
        suffix = f"-{folder_name(case.name)}" if case.name else ""
        path = folder / f"recommended{suffix}.yaml"
        write_recipe(recommendation, case, measured, path)
    # An experiment file may be in the folder of its results already.
    is_elsewhere = experiment.path.parent.resolve() != folder.resolve()
    if experiment.path.suffix == ".yaml" and is_elsewhere:
        text = experiment.path.read_text(encoding="utf-8")
        write_text(folder / "experiment.yaml", text)
    write_durably(folder / REPORT, markdown(result, draw(result, folder)))


def _publish(
    store: Store, experiment: Experiment, result: Result, log: MeasurementLog
) -> str:
    """Writes a run for the ablation to MLflow, with a child run for every variant.

    A repetition changes only what is new.

    Returns:
        The id of the ablation's run.
    """
    folder = log.folder
    finished_ms = time.time_ns() // 1_000_000
    # All variants took turns from the first round to the last.
    started_ms = finished_ms - int(1000 * result.seconds)
    recipe = experiment.cases[0].recipe
    view = view_of(recipe, ("ratio",))
    experiment_id = store.experiment(recipe.tracking.experiment, view)
    run_ids: dict[str, str] = {}
    if (folder / RUNS).exists():
        run_ids = json.loads((folder / RUNS).read_bytes())

    def run(*qualifiers: str) -> str:
        title = f"ablation {folder.name}"
        name = " ".join(filter(None, (folder.name, *qualifiers)))
        if name not in run_ids:
            # The lists of MLflow shorten names, so what distinguishes a run comes first.
            if qualifiers:
                title = " ".join(filter(None, (*qualifiers, "of", title)))
            run_ids[name] = store.create_run(experiment_id, title, started_ms)
            # Written after every run, so that a repetition creates none a second time.
            write_durably(folder / RUNS, json_text(run_ids, indent=1) + "\n")
        return run_ids[name]

    parent = run()
    _send_ablation(store, parent, experiment, result, finished_ms)
    for case, configured_case in zip(result.cases, experiment.cases, strict=False):
        for variant in case.variants:
            run_id = run(case.name, variant.name)
            tags = {
                "mlflow.parentRunId": parent,
                "kind": "variant",
                "overrides": ", ".join(configured_case.sets) or "none",
                "stages": ",".join(variant.stages) or "none",
                "effect": variant.effect,
                "verdict": variant.verdict or "not judged",
                **({"case": case.name} if case.name else {}),
                DESCRIPTION: describe(_of_variant(variant, folder.name)),
            }
            values = configured_case.recipe.values()
            values["optimization"] = {
                kind: values["optimization"][kind] for kind in variant.stages
            }
            metrics = _variant_metrics(variant, case, log, finished_ms)
            store.send(run_id, metrics, params_of(values), params_of(tags))
            store.set_status(run_id, "FINISHED", finished_ms)

    for path in sorted(folder.iterdir()):
        # The ids belong to this store, and the record changes while the ablation ends.
        is_internal = path.name in (RUNS, RECORD) or path.name.startswith(".")
        if path.is_file() and not is_internal:
            store.client.log_artifact(parent, str(path))
    status = "STOPPED" if result.interrupted else "FINISHED"
    store.set_status(parent, status, finished_ms)
    return parent


def _send_ablation(
    store: Store, run_id: str, experiment: Experiment, result: Result, now_ms: int
) -> None:
    """Sends figures of the cases, settings and description to the run of an ablation."""
    shared = [
        assignment
        for assignment in experiment.cases[0].sets
        if all(assignment in case.sets for case in experiment.cases)
    ]
    facts = describe(_facts(experiment, result, shared))
    tags = {
        "kind": "ablation",
        "overrides": ", ".join(shared) or "none",
        "ablation.digest": result.digest,
        "command": result.command,
        "mlflow.source.name": str(experiment.path),
        "hardware": result.machine,
        DESCRIPTION: f"{facts}\n\n{summary(result)}",
    }
    metrics = []
    # The number of the case is the step, so that MLflow plots the figures over the cases.
    for step, case in enumerate(result.cases):
        figures = {
            "a_a": case.a_a.value,
            "a_a_low": case.a_a.low,
            "a_a_high": case.a_a.high,
            "baseline_ms": case.baseline_ms,
            "limit_ms": case.limit_ms,
        }
        if case.interaction is not None:
            figures["interaction"] = case.interaction.value
        if case.beyond_usual is not None:
            figures["beyond_usual"] = case.beyond_usual.value
        metrics += [(name, value, now_ms, step) for name, value in figures.items()]
    settings = flatten(experiment.config.model_dump(mode="json"), "experiment")
    configured = {path: value for path, value in settings if value not in ("", [], {})}
    store.send(run_id, metrics, params_of(configured), params_of(tags))


def _variant_metrics(
    variant: VariantResult, case: CaseResult, log: MeasurementLog, now_ms: int
) -> list[tuple[str, float, int, int]]:
    """Returns name, value, time and step of a variant's metrics."""
    figures = _variant_figures(variant, case.unit)
    metrics = [
        (name, float(value), now_ms, 0)
        for name, value in figures.items()
        if value is not None
    ]
    for entry in log.of(case.name).rounds:
        if variant.name in entry["update"]:
            update_ms = 1e3 * entry["update"][variant.name]
            metrics.append(("rounds/update_ms", update_ms, now_ms, entry["round"]))
    return metrics


def _variant_figures(variant: VariantResult, unit: str) -> dict[str, float | None]:
    """Returns the metrics of a variant's run, without a ratio if it does not do the baseline's
    work.
    """
    figures: dict[str, float | None] = {
        name: getattr(variant, name) for name in _FIGURES
    }
    if not variant.caught:
        figures |= {
            "ratio": variant.ratio.value,
            "ratio_low": variant.ratio.low,
            "ratio_high": variant.ratio.high,
        }
        figures["perf/update_ms"] = variant.steady_ms
    if (traffic := variant.traffic) is not None:
        figures |= {
            "computed_bytes": traffic.computed,
            "counted_bytes": traffic.counted,
        }
    if (trained := variant.throughput) is not None:
        figures[f"perf/{unit}_per_second"] = trained.per_second
        figures |= {f"{name}_share": share for name, share in trained.shares.items()}
    return figures


def _facts(
    experiment: Experiment, result: Result, shared: Sequence[str]
) -> dict[str, str]:
    """Returns a description of the results, with the next commands."""
    recipe = experiment.cases[0].recipe
    unproven = [
        candidate
        for recommendation in result.recommendations
        for candidate in recommendation.unproven[:1]
    ]
    return {
        "recipe": f"{code(recipe.name)}, from {code(shown_path(recipe.path))}",
        "result": "; ".join(map(str, [*result.recommendations, *unproven])),
        "overridden": code(*shared),
        "prove it": code(*(recommendation.command for recommendation in unproven)),
        "measured by": code(result.command),
        "report": f"{code(REPORT)} in the artifacts",
    }


def _of_variant(variant: VariantResult, ablation: str) -> dict[str, str]:
    judged = (
        f"; {variant.verdict}: {variant.verdict_summary}" if variant.verdict else ""
    )
    effect = (
        f"{variant.effect}: {variant.caught}"
        if variant.caught
        else f"{variant.ratio}, {variant.effect}"
    )
    return {
        "variant": f"{variant.title} of the ablation {code(ablation)}",
        "result": "" if variant.name == BASELINE else f"{effect}{judged}",
        "stages": code(*variant.stages) or "none",
    }
