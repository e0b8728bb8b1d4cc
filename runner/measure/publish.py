"""An ablation in MLflow: a run for the whole, and below it one for every variant."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from runner.measure.experiment import Experiment
from runner.measure.measurement_log import MeasurementLog
from runner.measure.report import summary
from runner.measure.result import CaseResult, Result, VariantResult
from runner.system.errors import StorageError
from runner.system.files import write_durably
from runner.tracking.store import Metric, Store
from runner.tracking.values import key, params_of, text

RUNS = "mlflow.json"
"""The ids of the runs, so that publishing again goes to the same ones."""


def publish(store: Store, experiment: Experiment, result: Result, log: MeasurementLog) -> str:
    """Writes a result to MLflow; done again, it changes nothing but what is new.

    Args:
        store: has answered.
        experiment: what was measured; its first recipe names the MLflow experiment.
        result: what came out.
        log: the rounds, which become the history of ``update_ms``.

    Returns:
        The parent run's id.

    Raises:
        StorageError: the store cannot be written.
    """
    try:
        return _publish(store, experiment, result, log)
    except Exception as error:  # a store's client may raise anything: of HTTP, of a cloud, of a database
        raise StorageError(
            f"MLflow does not take the ablation: {error}; the result is in {log.folder}, and the same command "
            "sends it again"
        ) from error


def _publish(store: Store, experiment: Experiment, result: Result, log: MeasurementLog) -> str:
    folder = log.folder
    known = _known(folder)
    experiment_id = store.experiment(experiment.cases[0].recipe.tracking.experiment)

    now = time.time_ns() // 1_000_000
    started = now - int(1000 * result.seconds)  # all variants took turns from the first round to the last

    def run(name: str) -> str:
        if name not in known:
            known[name] = store.create_run(experiment_id, name, started)
            write_durably(folder / RUNS, json.dumps(known, indent=1) + "\n")
        return known[name]

    title = folder.name
    parent = run(title)
    tags = {"ablation": "parent", "ablation.digest": result.digest, "command": result.command,
            "mlflow.note.content": summary(result),
            **{f"hardware.{name}": str(value) for name, value in result.machine.items()}}  # fmt: skip
    settings = {"experiment": experiment.config.model_dump(mode="json")}
    store.send(parent, _whole(result, now), params_of(settings), {key(n): text(v) for n, v in tags.items()})
    for case, given in zip(result.cases, experiment.cases, strict=False):
        for variant in case.variants:
            below = run(" ".join(filter(None, (title, case.name, variant.name))))
            own = {
                "mlflow.parentRunId": parent,
                "case": case.name,
                "stages": ",".join(variant.stages) or "none",
                "effect": str(variant.effect),
                "verdict": str((variant.verdict or {}).get("outcome", "not asked")),
            }
            metrics = [*_metrics(variant, now), *_history(case, variant, log, now)]
            values = given.recipe.values()
            values["optimization"] = {kind: values["optimization"][kind] for kind in variant.stages}
            store.send(below, metrics, params_of(values), {name: text(value) for name, value in own.items()})
            store.set_status(below, "FINISHED", now)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != RUNS and not path.name.startswith("."):
            store.client.log_artifact(parent, str(path))
    store.set_status(parent, "KILLED" if result.interrupted else "FINISHED", now)
    return parent


def _known(folder: Path) -> dict[str, str]:
    try:
        known: dict[str, str] = json.loads((folder / RUNS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known


def _whole(result: Result, now: int) -> list[Metric]:
    metrics: list[Metric] = []
    for step, case in enumerate(result.cases):
        fields: dict[str, float] = {"a_a": case.a_a.value, "a_a_low": case.a_a.low, "a_a_high": case.a_a.high,
                                    "baseline_ms": case.baseline_ms, "limit_ms": case.limit_ms}  # fmt: skip
        if case.interaction is not None:
            fields["interaction"] = case.interaction.value
        metrics += [(name, value, now, step) for name, value in fields.items()]
    return metrics


def _metrics(variant: VariantResult, now: int) -> list[Metric]:
    fields: dict[str, Any] = {
        "ratio": variant.ratio.value,
        "ratio_low": variant.ratio.low,
        "ratio_high": variant.ratio.high,
        "compile_s": variant.compile_s,
        "warmup_s": variant.warmup_s,
        "steady_ms": variant.steady_ms,
        "peak_memory": variant.peak_memory,
        "peak_host_memory": variant.peak_host_memory,
        "limit_fraction": variant.limit_fraction,
        "break_even_updates": variant.break_even_updates,
    }
    if variant.throughput is not None:
        fields["per_second"] = variant.throughput.per_second
        fields |= {f"{name}_share": share for name, share in variant.throughput.shares.items()}
    return [(name, float(value), now, 0) for name, value in fields.items() if value is not None]


def _history(case: CaseResult, variant: VariantResult, log: MeasurementLog, now: int) -> list[Metric]:
    own = [entry for entry in log.entries if entry.get("case") == case.name and "update" in entry]
    return [
        ("update_ms", 1e3 * entry["update"][variant.name], now, entry["round"])
        for entry in own
        if variant.name in entry["update"]
    ]
