"""An ablation from its folder to its report: new or continued, measured, written and published."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from runner.measure.ablation_folder import (
    REPORT,
    RESULT,
    RUNS,
    choose_folder,
    describe_experiment,
)
from runner.measure.ablation_plots import draw
from runner.measure.analysis import Result, VariantResult, analyse, slope
from runner.measure.experiment import Experiment, keep_budgets
from runner.measure.measurement_log import ROUNDS, MeasurementLog
from runner.measure.recommend import recommend
from runner.measure.record import recorded
from runner.measure.report import markdown, summary, write_recipe
from runner.measure.rounds import Gate, Measurement, Reporter
from runner.plugin.registry import Registry
from runner.recipe.lock import write_lock
from runner.recipe.recipe import flatten
from runner.system.errors import ExitCode, RunnerError, StorageError
from runner.system.files import make_folder, write_durably, write_text
from runner.system.hardware import hardware
from runner.system.names import shown_path
from runner.system.places import RECORD
from runner.system.secrets import redact_values
from runner.tracking.description import DESCRIPTION, code, describe
from runner.tracking.store import Store, params_of
from runner.tracking.view import view_of
from runner.tracking.workspace import Workspace, folder_name
from runner.train.signals import Stop, stop_on_signals
from runner.verify.variants import AGAIN, BASELINE

# Of the time, for the gate after the measuring.
GATE_SHARE = 0.2
# For report, pictures and MLflow.
FINISH_SECONDS = 8.0
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
                recorded(experiment, log, workspace) as ended,
            ):
                # before anything is measured: what is changed later was not there then
                for case in experiment.cases:
                    locks = (
                        folder
                        / "locks"
                        / (folder_name(case.name) if case.name else "recipe")
                    )
                    make_folder(locks)
                    write_lock(case.recipe, locks, registry, results=folder)
                share = (1.0 if gate is None else 1.0 - GATE_SHARE) / len(
                    experiment.cases
                )
                measurements = [
                    Measurement(
                        case, experiment.config, registry, log, reporter, stop, share
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
                # a client may raise anything; a store that has gone costs no measurement
                except Exception as error:
                    problem = (
                        f"MLflow does not take the ablation: {error}; the result is in "
                        f"{folder}, and the same "
                    )
                    result = replace(
                        result, tracking_problem=f"{problem}command sends it again"
                    )
                    reporter.say(result.tracking_problem)
                ended(result)
                # The file that marks the ablation as finished.
                if not stop and not result.tracking_problem:
                    write_durably(
                        folder / RESULT,
                        json.dumps(redact_values(result.data()), indent=1) + "\n",
                    )
        except OSError as error:
            raise StorageError(
                f"{folder}: {error.strerror}; free some space, or name another --out"
            ) from error
    return replace(result, signal=stop.asked or 0)


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
    deadline = (
        all_cases[0].reporter.started
        + experiment.config.budget
        - log.earlier_seconds
        - FINISH_SECONDS
    )
    reserved = (
        0.0 if gate is None else GATE_SHARE * max(0.0, deadline - time.monotonic())
    )
    for each, until in _shares(all_cases, deadline - reserved):
        if not stop:
            each.run(until, until + reserved / len(all_cases))
    for each, until in _shares(all_cases, deadline):
        if gate is not None:
            each.judge(gate, until)
    measured = [
        each for each in all_cases if not stop or each.lines.ratio(AGAIN, [BASELINE])
    ]
    if not measured:
        error = RunnerError(
            "interrupted before each variant had two processes; the same command continues"
        )
        error.exit_code = ExitCode(128 + int(stop.asked or 0))
        raise error
    cases = tuple(analyse(each.case, each.variants, each.lines) for each in measured)
    return Result(
        name=experiment.config.name,
        digest=experiment.digest,
        command=command,
        machine=hardware(),
        load=max(entry["load"] for entry in log.entries if "load" in entry),
        cases=cases,
        recommendations=tuple(
            recommend(each.case, case, each.registry)
            for each, case in zip(measured, cases, strict=True)
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
    for number, each in enumerate(all_cases):
        now = time.monotonic()
        yield each, now + max(0.0, deadline - now) / (len(all_cases) - number)


def _write(experiment: Experiment, result: Result, folder: Path) -> None:
    """Leaves recipes, pictures and the report in the folder."""
    for case, measured, recommendation in zip(
        experiment.cases, result.cases, result.recommendations, strict=False
    ):
        suffix = f"-{folder_name(case.name)}" if case.name else ""
        write_recipe(
            recommendation, case, measured, folder / f"recommended{suffix}.yaml"
        )
    if (
        experiment.path.suffix == ".yaml"
        and experiment.path.parent.resolve() != folder.resolve()
    ):
        write_text(
            folder / "experiment.yaml", experiment.path.read_text(encoding="utf-8")
        )
    write_durably(folder / REPORT, markdown(result, draw(result, folder)))


def _publish(
    store: Store, experiment: Experiment, result: Result, log: MeasurementLog
) -> str:
    """Writes to MLflow a run for the ablation, and below it one for every variant; returns the
    first one's id.

    A repetition changes only what is new.
    """
    folder = log.folder
    now = time.time_ns() // 1_000_000
    # All variants took turns from the first round to the last.
    started = now - int(1000 * result.seconds)
    recipe = experiment.cases[0].recipe
    experiment_id = store.experiment(
        recipe.tracking.experiment, view_of(recipe, ("ratio",))
    )
    known: dict[str, str] = (
        json.loads((folder / RUNS).read_bytes()) if (folder / RUNS).exists() else {}
    )

    def run(*below: str) -> str:
        of = f"ablation {folder.name}"
        name = " ".join(filter(None, (folder.name, *below)))
        if name not in known:
            # The difference comes first.
            shown = " ".join(filter(None, (*below, "of", of))) if below else of
            known[name] = store.create_run(experiment_id, shown, started)
            write_durably(folder / RUNS, json.dumps(known, indent=1) + "\n")
        return known[name]

    parent = run()
    shared = [
        each
        for each in experiment.cases[0].sets
        if all(each in case.sets for case in experiment.cases)
    ]
    tags = {
        "kind": "ablation",
        "overrides": ", ".join(shared) or "none",
        "ablation.digest": result.digest,
        "command": result.command,
        "mlflow.source.name": str(experiment.path),
        "hardware": result.machine,
        DESCRIPTION: f"{describe(_facts(experiment, result, shared))}\n\n{summary(result)}",
    }
    metrics = []
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
        metrics += [(name, value, now, step) for name, value in figures.items()]
    settings = flatten(experiment.config.model_dump(mode="json"), "experiment")
    asked = {path: value for path, value in settings if value not in ("", [], {})}
    store.send(parent, metrics, params_of(asked), params_of(tags))
    for case, given in zip(result.cases, experiment.cases, strict=False):
        for variant in case.variants:
            below = run(case.name, variant.name)
            tags = {
                "mlflow.parentRunId": parent,
                "kind": "variant",
                "overrides": ", ".join(given.sets) or "none",
                "stages": ",".join(variant.stages) or "none",
                "effect": variant.effect,
                "verdict": variant.verdict or "not judged",
                **({"case": case.name} if case.name else {}),
                DESCRIPTION: describe(_of_variant(variant, folder.name)),
            }
            values = given.recipe.values()
            values["optimization"] = {
                kind: values["optimization"][kind] for kind in variant.stages
            }
            known_figures = _variant_figures(variant, case.unit).items()
            metrics = [
                (name, float(value), now, 0)
                for name, value in known_figures
                if value is not None
            ]
            metrics += [
                (
                    "rounds/update_ms",
                    1e3 * each["update"][variant.name],
                    now,
                    each["round"],
                )
                for each in log.of(case.name).rounds
                if variant.name in each["update"]
            ]
            store.send(below, metrics, params_of(values), params_of(tags))
            store.set_status(below, "FINISHED", now)
    for path in sorted(folder.iterdir()):
        if (
            path.is_file()
            and path.name not in (RUNS, RECORD)
            and not path.name.startswith(".")
        ):
            store.client.log_artifact(parent, str(path))
    store.set_status(parent, "KILLED" if result.interrupted else "FINISHED", now)
    return parent


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
    if (trained := variant.throughput) is not None:
        figures[f"perf/{unit}_per_second"] = trained.per_second
        figures |= {f"{name}_share": share for name, share in trained.shares.items()}
    return figures


def _facts(
    experiment: Experiment, result: Result, shared: Sequence[str]
) -> dict[str, str]:
    """Returns a description of the results, with the next commands."""
    recipe = experiment.cases[0].recipe
    unproven = [own for each in result.recommendations for own in each.unproven[:1]]
    return {
        "recipe": f"{code(recipe.name)}, from {code(shown_path(recipe.path))}",
        "result": "; ".join(map(str, [*result.recommendations, *unproven])),
        "overridden": code(*shared),
        "prove it": code(*(each.command for each in unproven)),
        "measured by": code(result.command),
        "report": f"{code(REPORT)} in the artifacts",
    }


def _of_variant(variant: VariantResult, ablation: str) -> dict[str, str]:
    judged = (
        f"; {variant.verdict}: {variant.verdict_summary}" if variant.verdict else ""
    )
    said = (
        f"{variant.effect}: {variant.caught}"
        if variant.caught
        else f"{variant.ratio}, {variant.effect}"
    )
    return {
        "variant": f"{variant.title} of the ablation {code(ablation)}",
        "result": f"{said}{judged}" if variant.stages else "",
        "stages": code(*variant.stages) or "none",
    }
