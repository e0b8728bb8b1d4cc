"""The closing table of a training."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.system.console import Console
from runner.system.suggestions import shown_path
from runner.system.synthetic import SMOKE_REMARK, SYNTHETIC_REMARK
from runner.system.text_lines import amount, duration, figure

if TYPE_CHECKING:
    from runner.training.result import RunResult


def show(result: "RunResult", headline: Sequence[str], console: Console) -> None:
    """Prints the result, the time, the stages and the location of a run."""
    from runner.tracking.run_summary import print_sections

    print_sections(result.run_name, result.status, _sections(result, headline), console)


def _sections(result: "RunResult", headline: Sequence[str]) -> dict[str, list[str]]:
    """Returns the lines of the closing table by label."""
    sections = {
        "result": _evaluation(result, headline, "eval/") or ["nothing was evaluated"],
        "best": _best(result),
        "test": _test(result, headline),
        "newest": _newest_checkpoint(result),
        "data": [SYNTHETIC_REMARK] if result.synthetic else [],
        "smoke": [SMOKE_REMARK] if result.smoke else [],
        "time": _time(result),
        "stages": _stages(result) or ["none (baseline)"],
    }
    # Few runs have these lines, which stand before the place and the commands.
    if result.processes > 1:
        sections["processes"] = [f"{result.processes}, each on a part of every batch"]
    # A smoke test always leaves data out, and has another line.
    if result.limited and not result.smoke:
        sections["limited"] = [f"{result.limited}; the result is not that of all data"]
    if result.ended_early:
        sections["ended"] = [f"early: {result.ended_early}"]
    if result.skipped_updates:
        sections["skipped"] = [result.skipped_updates]
    if result.changed_by:
        sections["callbacks"] = [f"{result.changed_by}; the result is not that of the recipe without them"]
    if result.sentinel:
        sections["sentinel"] = [result.sentinel]
    sections["run"] = [f"MLflow id {result.run_id}", shown_path(Path(result.run_dir))]
    sections["next"] = _next_commands(result)
    return sections


def _evaluation(result: "RunResult", headline: Sequence[str], prefix: str) -> list[str]:
    evaluated = {name.removeprefix(prefix): value for name, value in result.metrics.items() if name.startswith(prefix)}
    names = [name for name in headline if name in evaluated]
    names += sorted(set(evaluated) - set(headline))
    return [f"{name} {figure(evaluated[name])}" for name in names]


def _best(result: "RunResult") -> list[str]:
    best = result.best
    if best is None:
        return []
    progress = amount(best.step, best.unit)
    return [f"{best.metric[5:]} {figure(best.value)} after {progress}: {_checkpoint(best.checkpoint)}"]


def _test(result: "RunResult", headline: Sequence[str]) -> list[str]:
    """Returns the metrics on the test part, or the reason why a finished run has none."""
    if result.status != "FINISHED" or result.smoke:
        return []
    if result.untested is not None:
        return [f"none: {result.untested}"]
    lines = _evaluation(result, headline, "test/")
    checkpoint = "best" if result.best else "last"
    return [*lines, f"of the {checkpoint} checkpoint"] if lines else []


def _newest_checkpoint(result: "RunResult") -> list[str]:
    """Returns from where the run would be resumed; nothing if it is finished."""
    if result.status == "FINISHED":
        return []
    path = result.newest_checkpoint
    return [_checkpoint(path) if path else "no checkpoint has been written"]


def _stages(result: "RunResult") -> list[str]:
    lines = []
    for report in result.stages:
        state = "active" if report.active else f"inactive: {report.reason}"
        lines.append("; ".join([f"{report.kind} {state}", *report.notes]))
    return lines


def _next_commands(result: "RunResult") -> list[str]:
    if result.status != "FINISHED":
        return [result.resume, "runner ls"]
    # Eight digits name a run as well as its complete name.
    digits = result.run_name.rpartition("-")[2]
    evaluate = result.resume.replace(f"resume {result.run_name}", f"evaluate {digits}")
    return [evaluate, f"runner compare {digits} OTHER_RUN", "runner ui"]


def _checkpoint(path: str) -> str:
    return f"checkpoints/{Path(path).name}"


def _time(result: "RunResult") -> list[str]:
    """Returns lines about the time of the command, of an update, and of every activity."""
    metrics = result.metrics
    resumed = ""
    if result.resumed_at is not None:
        unit = "" if result.best is None else f"{result.best.unit.removesuffix('s').replace('_', ' ')} "
        resumed = f" since resuming at {unit}{result.resumed_at:,}"
    startup = result.startup_seconds
    training = duration(result.seconds - startup)
    lines = [f"{duration(result.seconds)}{resumed}: start-up {duration(startup)}, training {training}"]
    if result.update_seconds is not None:
        first_seconds = metrics.get("perf/first_update_seconds", 0.0)
        first_update = f"{first_seconds:.1f} s" if first_seconds >= 1 else f"{1000 * first_seconds:.3g} ms"
        lines.append(f"{figure(1e3 * result.update_seconds, 3)} ms per update; the first took {first_update}")
    if "perf/roofline_fraction" in metrics:
        lines.append(f"{metrics['perf/roofline_fraction']:.0%} of this machine's limit (its roofline)")
    shares = sorted(result.shares.items(), key=lambda item: -item[1])
    # Smaller shares would be shown as 0 %.
    share_texts = [f"{name} {share:.0%}" for name, share in shares if share >= 0.005]
    lines.append(f"shares of all: {', '.join(share_texts)}")
    return lines
