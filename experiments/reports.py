"""Writes reports and plots of ablations and searches again, from their stored results.

python experiments/reports.py [NAME ...]
"""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pydantic import TypeAdapter

from runner.ablation import report
from runner.ablation.ablation_plots import draw
from runner.ablation.analysis import CaseResult, Result, StageGain, _step_s
from runner.ablation.case_log import CaseLog, Entry
from runner.ablation.experiment import Case, load_experiment
from runner.ablation.inference_ablation import Answering, InferenceResult
from runner.ablation.inference_report import write as write_inference
from runner.ablation.recommendation import recommend
from runner.plugin.registry import Registry
from runner.proof.interleaved_timing import Timing
from runner.proof.ratios import NO_RATIO, Ratio, effect, of_rounds
from runner.proof.verdict import Outcome, Verdict
from runner.proof.warm_up import WarmUp
from runner.study import study_plots
from runner.study.summary import Summary
from runner.tracking.workspace import folder_name
from runner.verify.variants import AGAIN, BASELINE, BASELINES

HERE = Path(__file__).parent
RENAMED = {
    "env_steps": "done",
    "work": "cost",
    "steps_per_second": "per_second",
    "sample": "draw",
    "model.actor_lr": "optimizer.actor.lr",
    "model.critic_lr": "optimizer.critic.lr",
}
"""Names in older results, and their present names."""
REWORDED = {"was begun": "was started", "what is held out": "the held-out data"}
"""Phrases in older verdicts, and their present wording."""
UNKNOWN_WARM_UP = WarmUp(first_s=0.0, seconds=0.0, steps=0, steady_s=0.0, steady=True)
ONE_PROCESS = """\
* Every variant was measured in one process, and the interval is that of its rounds (bootstrap). The
  difference between two identical processes, a few percent, is not contained in it. Such logs are
  not continued by the present version.
"""
NOT_COMPARED = """\
* The updates of variants were not compared with the baseline's after the timing: this measurement
  is older than that check.
"""


def write_ablation(folder: Path) -> None:
    """Writes the report, the plots and the recommended recipes of an ablation from its ``result.json``."""
    stored = json.loads((folder / "result.json").read_text(), object_hook=_rename)
    log = _read_log(folder)
    experiment = load_experiment(folder / f"{folder.name}.yaml", (), Registry())
    cases = [_case(content, stored, log) for content in stored["cases"]]
    pairs = [(_case_of(experiment.cases, case.name), case) for case in cases]
    recommendations = tuple(recommend(given, case, Registry()) for given, case in pairs)
    fields = {name: value for name, value in stored.items() if name not in ("cases", "variants", "recommendations")}
    result = Result(**{**fields, "cases": tuple(cases), "recommendations": recommendations})
    for (given, case), recommendation in zip(pairs, recommendations, strict=True):
        suffix = f"-{folder_name(case.name)}" if case.name else ""
        _write_recipe(recommendation, given, case, folder / f"recommended{suffix}.yaml")
    text = report.markdown(result, draw(result, folder))
    (folder / "README.md").write_text(_with_method(text, result))


def _write_recipe(recommendation: Any, given: Case, case: CaseResult, path: Path) -> None:
    """Writes a recommended recipe with the machine and the date of the measurement instead of today's."""
    header = path.read_text().partition("\n")[0]
    report.write_recipe(recommendation, given, case, path)
    _, _, recipe = path.read_text().partition("\n")
    path.write_text(f"{header}\n{recipe}")


def _with_method(text: str, result: Result) -> str:
    """Returns a report that states the method by which an older result was measured."""
    if all(case.a_a.processes == 1 for case in result.cases):
        text = _replace_bullet(text, "* Every variant was measured in several processes", ONE_PROCESS)
    if not any(variant.compared for case in result.cases for variant in case.variants):
        text = _replace_bullet(text, "* After the timed updates", NOT_COMPARED)
        text = text.replace(" No update gets a batch that another update has had.", "")
    return text


def _replace_bullet(text: str, beginning: str, bullet: str) -> str:
    before, found, after = text.partition(beginning)
    assert found, beginning
    _, _, following = after.partition("\n* ")
    return f"{before}{bullet}* {following}"


def _case_of(cases: tuple[Case, ...], name: str) -> Case:
    return next(case for case in cases if case.name == name)


def _read_log(folder: Path) -> list[Entry]:
    with gzip.open(folder / "rounds.jsonl.gz", "rt") as file:
        return [json.loads(line, object_hook=_rename) for line in file]


def _case(content: dict[str, Any], stored: Mapping[str, Any], entries: list[Entry]) -> CaseResult:
    """Returns the result of a case, with what the present analysis adds to an older one."""
    log = CaseLog([entry for entry in entries if entry.get("case") == content["name"]])
    a_a = TypeAdapter(Ratio).validate_python(content["a_a"])
    if "training_a_a" not in content:
        content["training_a_a"] = _training_a_a(log, a_a)
    earlier = {item["case"]: item for item in stored["recommendations"]}
    older = {"unit": "env_steps", "planned_updates": earlier.get(content["name"], {}).get("updates", 1)}
    variants = [
        _variant(variant, log, a_a, content["training_a_a"])
        for variant in stored["variants"]
        if variant["case"] == content["name"]
    ]
    content["worth"] = [_gain(gain) for gain in content["worth"]]
    return TypeAdapter(CaseResult).validate_python({**older, **content, "variants": variants})


def _gain(gain: Mapping[str, Any]) -> StageGain:
    return TypeAdapter(StageGain).validate_python(gain)


def _training_a_a(log: CaseLog, a_a: Ratio) -> Ratio:
    """Returns the baseline against itself in training steps; in updates if no steps were measured."""
    rounds = [entry for entry in log.rounds if set(BASELINES) <= entry["train"].keys()]
    if not rounds:
        return a_a
    if "process" in rounds[0]:
        return log.ratio(AGAIN, [BASELINE], of=_step_s) or a_a
    steps = [_step_s(entry) for entry in rounds]
    return of_rounds([seconds[BASELINE] / seconds[AGAIN] for seconds in steps])


def _variant(
    variant: dict[str, Any], log: CaseLog, a_a: Ratio, training_a_a: Ratio | Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a variant with the effects that the present rule has."""
    ratio = NO_RATIO
    if variant["ratio"] is not None:
        low, high = variant["ci95"]
        processes = variant.get("processes", 1)
        ratio = Ratio(variant["ratio"], low, high, variant["rounds"], processes)
    changed = {"ratio": ratio, "verdict_summary": _reword(variant["verdict_summary"])}
    if variant["name"] == BASELINE:
        changed["effect"] = "unclear"
    elif not variant.get("caught"):
        changed["effect"] = effect(ratio, a_a)
    if variant["throughput"] is not None:
        noise = TypeAdapter(Ratio).validate_python(training_a_a)
        changed["throughput"] = _throughput(variant, log, noise)
    return {**variant, **changed}


def _throughput(variant: Mapping[str, Any], log: CaseLog, training_a_a: Ratio) -> dict[str, Any]:
    """Returns the figures about training steps, with effect and seconds for each update."""
    stored = variant["throughput"]
    ratio = TypeAdapter(Ratio).validate_python(stored["ratio"])
    baselines = [
        entry["train"][name]
        for entry in log.rounds
        for name in BASELINES
        if variant["name"] in entry["train"] and name in entry["train"]
    ]
    seconds = statistics.median(block["seconds"] / block["updates"] for block in baselines)
    added = {"update_s": seconds / ratio.value, "effect": "unclear"}
    if variant["name"] != BASELINE:
        added["effect"] = effect(ratio, training_a_a)
    return {**added, **stored}


def write_inference_ablation(folder: Path) -> None:
    """Writes report and plot of an ablation of inference stages from its ``inference.json``."""
    stored = json.loads((folder / "inference.json").read_text())
    rows = tuple(_answering(variant) for variant in stored.pop("variants"))
    write_inference(InferenceResult(**stored, rows=rows, folder=folder))


def _answering(variant: Mapping[str, Any]) -> Answering:
    timings = {}
    for size, timing in variant["timings"].items():
        ratio, a_a = (TypeAdapter(Ratio).validate_python(timing[name]) for name in ("ratio", "a_a"))
        timings[int(size)] = Timing(
            ratio, a_a, ratio.value, timing["baseline_ms"], timing["ms"], UNKNOWN_WARM_UP, UNKNOWN_WARM_UP
        )
    verdict = variant["verdict"]
    if verdict is not None:
        verdict = Verdict(Outcome(verdict["verdict"]), "", _reword(verdict["summary"]) or "")
    return Answering(
        variant["name"], tuple(variant["stages"]), timings, variant["bytes"], variant["bytes_in_memory"],
        variant["value"], verdict,
    )  # fmt: skip


def draw_search(folder: Path) -> None:
    """Draws the plots of a search from its ``summary.json`` and its file."""
    stored = json.loads((folder / "summary.json").read_text())
    space = yaml.safe_load(folder.with_suffix(".yaml").read_text())["space"]
    for row in stored["rows"]:
        row["settings"] = {RENAMED.get(path, path): value for path, value in row["settings"].items()}
        row["recipe"] = None
    logarithmic = [path for path, axis in space.items() if axis.get("log")]
    older = {"seeds": 1, "logarithmic": logarithmic, "dashboard": ""}
    del stored["schema_version"], stored["best"]
    with TemporaryDirectory() as drawn:
        for picture in study_plots.draw(TypeAdapter(Summary).validate_python(older | stored), Path(drawn)):
            if (folder / picture.name).exists():
                shutil.copy(picture, folder)


def _reword(summary: str | None) -> str | None:
    for phrase, present in REWORDED.items():
        summary = summary and summary.replace(phrase, present)
    return summary


def _rename(content: dict[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(name, name): value for name, value in content.items()}


WRITERS = {
    "result.json": write_ablation,
    "inference.json": write_inference_ablation,
    "summary.json": draw_search,
}
"""By the file with the stored result."""


def main() -> None:
    """Writes the reports of the named experiments, or of all."""
    for name, write in WRITERS.items():
        for path in sorted(HERE.glob(f"*/{name}")):
            if path.parent.name in (sys.argv[1:] or [path.parent.name]):
                write(path.parent)
                print(path.parent.name)


if __name__ == "__main__":
    main()
