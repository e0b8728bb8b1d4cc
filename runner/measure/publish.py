"""An ablation in MLflow: a run for the whole, and below it one for every variant."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from runner.system.errors import StorageError
from runner.system.files import write_durably
from runner.tracking.values import key, params_of, text

if TYPE_CHECKING:
    from runner.measure.analysis import CaseResult, Result, VariantResult
    from runner.measure.experiment import Experiment
    from runner.measure.measurement_log import MeasurementLog
    from runner.tracking.store import Metric, Store

RUNS = "mlflow.json"
"""The ids of the runs, so that publishing again goes to the same ones."""
_FIGURES = ("compile_s", "warmup_s", "steady_ms", "peak_memory", "peak_host_memory", "limit_fraction",
            "break_even_updates")  # fmt: skip


def publish(store: Store, experiment: Experiment, result: Result, summary: str, log: MeasurementLog) -> str:
    """Writes a result to MLflow; done again, it changes nothing but what is new.

    Args:
        store: has answered.
        experiment: what was measured; its first recipe names the MLflow experiment.
        result: what came out.
        summary: Markdown that MLflow shows beside it.
        log: the rounds, which become the history of ``update_ms``.

    Returns:
        The parent run's id.

    Raises:
        StorageError: the store cannot be written.
    """
    try:
        return _publish(store, experiment, result, summary, log)
    except Exception as error:  # a store's client may raise anything: of HTTP, of a cloud, of a database
        raise StorageError(
            f"MLflow does not take the ablation: {error}; the result is in {log.folder}, and the same command "
            "sends it again"
        ) from error


def _publish(store: Store, experiment: Experiment, result: Result, summary: str, log: MeasurementLog) -> str:
    folder = log.folder
    try:
        known: dict[str, str] = json.loads((folder / RUNS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    experiment_id = store.experiment(experiment.cases[0].recipe.tracking.experiment)
    now = time.time_ns() // 1_000_000
    started = now - int(1000 * result.seconds)  # all variants took turns from the first round to the last

    def run(*names: str) -> str:
        name = " ".join(filter(None, names))
        if name not in known:
            known[name] = store.create_run(experiment_id, name, started)
            write_durably(folder / RUNS, json.dumps(known, indent=1) + "\n")
        return known[name]

    parent = run(folder.name)
    tags = {"ablation": "parent", "ablation.digest": result.digest, "command": result.command,
            "mlflow.note.content": summary,
            **{f"hardware.{name}": str(value) for name, value in result.machine.items()}}  # fmt: skip
    settings = {"experiment": experiment.config.model_dump(mode="json")}
    store.send(parent, _of_cases(result, now), params_of(settings), {key(n): text(v) for n, v in tags.items()})
    for case, given in zip(result.cases, experiment.cases, strict=False):
        for variant in case.variants:
            below = run(folder.name, case.name, variant.name)
            own = {
                "mlflow.parentRunId": parent,
                "case": case.name,
                "stages": ",".join(variant.stages) or "none",
                "effect": str(variant.effect),
                "verdict": variant.told("outcome") or "not asked",
            }
            values = given.recipe.values()
            values["optimization"] = {kind: values["optimization"][kind] for kind in variant.stages}
            metrics = _of_variant(case, variant, log, now)
            store.send(below, metrics, params_of(values), {name: text(value) for name, value in own.items()})
            store.set_status(below, "FINISHED", now)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != RUNS and not path.name.startswith("."):
            store.client.log_artifact(parent, str(path))
    store.set_status(parent, "KILLED" if result.interrupted else "FINISHED", now)
    return parent


def _of_cases(result: Result, now: int) -> list[Metric]:
    metrics: list[Metric] = []
    for step, case in enumerate(result.cases):
        fields = {"a_a": case.a_a.value, "a_a_low": case.a_a.low, "a_a_high": case.a_a.high,
                  "baseline_ms": case.baseline_ms, "limit_ms": case.limit_ms}  # fmt: skip
        if case.interaction is not None:
            fields["interaction"] = case.interaction.value
        metrics += [(name, value, now, step) for name, value in fields.items()]
    return metrics


def _of_variant(case: CaseResult, variant: VariantResult, log: MeasurementLog, now: int) -> list[Metric]:
    ratio = variant.ratio
    fields = {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}
    fields |= {name: getattr(variant, name) for name in _FIGURES if getattr(variant, name) is not None}
    if variant.throughput is not None:
        fields["per_second"] = variant.throughput.per_second
        fields |= {f"{name}_share": share for name, share in variant.throughput.shares.items()}
    rounds = log.of(case.name).rounds.items()
    history = [(number, seconds[variant.name]) for number, seconds in rounds if variant.name in seconds]
    return [
        *((name, float(value), now, 0) for name, value in fields.items()),
        *(("update_ms", 1e3 * seconds, now, number) for number, seconds in history),
    ]
