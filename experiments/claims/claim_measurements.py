"""Reads the measurements behind claims from the result files of experiments."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from runner.system.interval import student

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
CARDS = ROOT / "plugins" / "stages" / "measured.json"
SEEDS = (0, 1, 2)
MONTH = "2026-11"
"""Month of all measurements; the index of the experiments contains the days."""

Entry = Mapping[str, Any]


class ClaimError(ValueError):
    """Raised for an entry of a data file that does not match a result."""


@dataclass(frozen=True)
class Measurement:
    """A measured figure with its circumstances.

    Attributes:
        label: Name of the model or of the case.
        value: The figure; None if only ``text`` states it.
        interval: Its two ends; None if the method has none.
        unit: ``x`` for a factor of speed, ``%`` for a saved share in percent, or a word.
        text: The figure for a reader.
        method: Method of the measurement, and what the interval is about.
        date: Date of the result, ISO 8601.
        machine: Device, processor, threads and version of torch.
        verdict: The gate's verdict; empty if it has not judged.
        report: Path of the report with the command, relative to the repository.
        published: The claimed figure that the result contains itself.
    """

    label: str
    value: float | None
    interval: tuple[float, float] | None
    unit: str
    text: str
    method: str
    date: str
    machine: str
    verdict: str
    report: str
    published: float | None = None


def read_measurement(entry: Entry) -> Measurement:
    """Returns the measurement that an entry of a data file names.

    Raises:
        ClaimError: The entry is incomplete, or no result contains it.
    """
    kinds = [kind for kind in READERS if kind in entry]
    if len(kinds) != 1:
        raise ClaimError(f"{dict(entry)}: name exactly one of {', '.join(READERS)}")
    return READERS[kinds[0]](entry)


def read_card(entry: Entry) -> Measurement:
    """Returns the speed of a stage alone, or in addition to all others, from its card."""
    experiment = f"experiments/{entry['experiment']}"
    key = entry.get("key", "alone")
    case = entry.get("case", "")
    for figures in load(CARDS).get(entry["card"], ()):
        if figures["experiment"] == experiment and figures["case"] == case and key in figures:
            break
    else:
        raise ClaimError(f"the card of {entry['card']} has no '{key}' of {experiment} {case}")
    value, low, high = figures[key]
    variant = find_variant(experiment, entry["card"], case) if key == "alone" else {}
    return Measurement(
        label=label_of(entry, entry["experiment"], case),
        value=value,
        interval=(low, high),
        unit="x",
        text=factor(value, (low, high)),
        method=f"{figures['method']}, 95 %",
        date=figures["date"],
        machine=figures["machine"],
        verdict=variant.get("verdict") or "",
        report=f"{experiment}/README.md",
    )


def read_ablation(entry: Entry) -> Measurement:
    """Returns the speed of a variant of an ablation."""
    experiment = f"experiments/{entry['ablation']}"
    case = entry.get("case", "")
    variant = find_variant(experiment, entry["variant"], case)
    if not variant:
        raise ClaimError(f"{experiment} has no variant '{entry['variant']}' of '{case}'")
    value = variant["ratio"]
    interval = (variant["ci95"][0], variant["ci95"][1])
    processes = variant.get("processes", 1)
    rounds = f"{variant['rounds']} rounds of one process"
    return Measurement(
        label=label_of(entry, entry["ablation"], case),
        value=value,
        interval=interval,
        unit="x",
        text=factor(value, interval),
        method=f"{f'{processes} processes' if processes > 1 else rounds}, 95 %",
        date=date_of(entry["ablation"]),
        machine=machine_of(experiment, case),
        verdict=variant["verdict"] or "",
        report=f"{experiment}/README.md",
        published=entry.get("claimed", variant["published"]),
    )


def read_waiting(entry: Entry) -> Measurement:
    """Returns the saved share of the time for which an update waits for its batch."""
    experiment = f"experiments/{entry['waiting']}"
    seconds = {}
    for name in ("baseline", entry["variant"]):
        training = find_variant(experiment, name, "").get("throughput")
        if training is None:
            raise ClaimError(f"{experiment} has no training with '{name}'")
        seconds[name] = training["shares"]["draw"] / training["per_second"]
    value = 100 * (1 - seconds[entry["variant"]] / seconds["baseline"])
    return Measurement(
        label=label_of(entry, entry["waiting"], ""),
        value=value,
        interval=None,
        unit="%",
        text=f"{value:.0f} % less waiting",
        method="means over the rounds of five processes, without an interval",
        date=date_of(entry["waiting"]),
        machine=machine_of(experiment, ""),
        verdict=find_variant(experiment, entry["variant"], "")["verdict"] or "",
        report=f"{experiment}/README.md",
    )


def read_memory(entry: Entry) -> Measurement:
    """Returns the saved share of the memory of an update, by torch's count and the kernel's."""
    experiment = f"experiments/memory/{entry['memory']}"
    result = load(ROOT / experiment / "result.json")
    variants = {variant["name"]: variant["memory"] for variant in result["variants"]}
    if entry["variant"] not in variants:
        raise ClaimError(f"{experiment} has no variant '{entry['variant']}'")
    shares = {
        count: 100 * (1 - variants[entry["variant"]][count] / variants["baseline"][count])
        for count in ("tracked", "grown")
    }
    value = shares["tracked"]
    interval = (min(shares.values()), max(shares.values()))
    return Measurement(
        label=label_of(entry, entry["memory"], ""),
        value=value,
        interval=interval,
        unit="%",
        text=saving(value, interval),
        method="bytes at the peak of an update; the range is that of torch's and the kernel's count",
        date=str(entry.get("date") or date_of("memory")),
        machine=f"cpu, {result['machine']['cpu']}, torch {result['machine']['torch']}",
        verdict=verdict_of(entry["memory"], entry["variant"]),
        report="experiments/memory/README.md",
    )


def read_inference(entry: Entry) -> Measurement:
    """Returns the speed of a trained model's variant, or its saved bytes."""
    experiment = f"experiments/{entry['inference']}"
    result = load(ROOT / experiment / "inference.json")
    variants = {variant["name"]: variant for variant in result["variants"]}
    if entry["variant"] not in variants:
        raise ClaimError(f"{experiment} has no variant '{entry['variant']}'")
    variant = variants[entry["variant"]]
    interval: tuple[float, float] | None = None
    if entry.get("quantity") == "bytes":
        unit = "%"
        value = 100 * (1 - variant["bytes"] / variants["baseline again"]["bytes"])
        text = saving(value, None)
        method = "bytes of the weights in a file, exact"
    else:
        requests = str(entry.get("requests", 1))
        ratio = variant["timings"][requests]["ratio"]
        unit = "x"
        value = ratio["value"]
        interval = (ratio["low"], ratio["high"])
        text = factor(value, interval)
        method = f"{ratio['rounds']} rounds of one process, batch of {requests}, 95 %"
    return Measurement(
        label=label_of(entry, entry["inference"], ""),
        value=value,
        interval=interval,
        unit=unit,
        text=text,
        method=method,
        date=date_of(entry["inference"]),
        machine=f"cpu, {result['machine']['cpu']}, {threads(result['machine']['torch_threads'])}",
        verdict=(variant["verdict"] or {}).get("verdict", ""),
        report=f"{experiment}/README.md",
    )


def read_refused(entry: Entry) -> Measurement:
    """Returns a measurement of a technique that is not offered."""
    name, _, figure = entry["refused"].partition(".")
    path = EXPERIMENTS / "refused" / "results" / f"{name}.json"
    if not path.is_file():
        raise ClaimError(f"no result of a refused technique '{name}'")
    result = load(path)
    figures = {figure["name"]: figure for figure in result["figures"]}
    if figure not in figures:
        raise ClaimError(f"{path.name} has no figure '{figure}': {', '.join(figures)}")
    chosen = figures[figure]
    interval = tuple(chosen["interval"]) if chosen["interval"] else None
    formats = {"x": factor, "%": saving}
    text = chosen["text"]
    if chosen["unit"] in formats:
        text = formats[chosen["unit"]](chosen["value"], interval)
    return Measurement(
        label=label_of(entry, chosen["label"], ""),
        value=chosen["value"],
        interval=interval,
        unit=chosen["unit"],
        text=text,
        method=chosen["method"],
        date=result["date"],
        machine=result["machine"],
        verdict="",
        report="experiments/refused/README.md",
    )


def read_learned(entry: Entry) -> Measurement:
    """Returns by how many percent of the metric trainings are better with a technique."""
    name = entry["learned"]
    results = load(EXPERIMENTS / "learned" / "results.json")
    pairs = []
    for seed in SEEDS:
        keys = [f"{name}: {entry.get(key, 'recipe')}, seed {seed}" for key in ("variant", "against")]
        if missing := [key for key in keys if key not in results]:
            raise ClaimError(f"experiments/learned has no training '{missing[0]}'")
        pairs.append([results[key]["value"] for key in keys])
    newest = results[keys[0]]
    return better(entry, name, pairs, newest, "experiments/learned/README.md")


def read_grasps(entry: Entry) -> Measurement:
    """Returns by how many percent more grasps are strict with a part of the model."""
    text = (EXPERIMENTS / "grasp_parts" / "results.jsonl").read_text(encoding="utf-8")
    results = {(result["part"], result["seed"]): result for result in map(json.loads, text.splitlines())}
    parts = [entry["grasps"], entry.get("against", "default")]
    if missing := [part for part in parts for seed in SEEDS if (part, seed) not in results]:
        raise ClaimError(f"experiments/grasp_parts has not all seeds of '{missing[0]}'")
    pairs = [[results[part, seed]["strict"] for part in parts] for seed in SEEDS]
    newest = results[parts[0], SEEDS[-1]]
    return better(entry, "strict grasps", pairs, newest, "experiments/grasp_parts/README.md")


def better(entry: Entry, label: str, pairs: Sequence[Sequence[float]], newest: Entry, report: str) -> Measurement:
    """Returns the mean gain over pairs of trainings with and without a technique.

    Args:
        entry: Of the data file; ``smaller`` tells that smaller values are better.
        label: Name of the data.
        pairs: Values with and without the technique, by seed.
        newest: A result with date and machine.
        report: Path of the report.
    """
    sign = -1 if entry.get("smaller") else 1
    gain = student([100 * sign * (value / without - 1) for value, without in pairs])
    interval = (gain.low, gain.high)
    return Measurement(
        label=label_of(entry, label, ""),
        value=gain.mean,
        interval=interval,
        unit="better",
        text=f"{gain.mean:+.1f} % [{gain.low:+.1f}, {gain.high:+.1f}]",
        method=f"{len(pairs)} paired seeds, 95 %; positive is better",
        date=newest["date"],
        machine=f"cpu, {newest['machine']}",
        verdict="",
        report=report,
    )


def read_text(entry: Entry) -> Measurement:
    """Returns figures that a report states, by a regular expression with groups."""
    path = ROOT / entry["text"]
    match = re.search(entry["pattern"], path.read_text(encoding="utf-8"), re.DOTALL)
    if match is None:
        raise ClaimError(f"{entry['text']} does not contain {entry['pattern']!r}")
    numbers = [float(group.replace(",", "")) for group in match.groups()]
    unit = entry.get("unit", "")
    interval = (numbers[1], numbers[2]) if entry.get("interval") else None
    value = numbers[0] if unit else None
    return Measurement(
        label=label_of(entry, "", ""),
        value=value,
        interval=interval,
        unit=unit,
        text=entry["format"].format(*match.groups()),
        method=entry["method"],
        date=entry["date"],
        machine=entry.get("machine", "cpu, AMD EPYC"),
        verdict=entry.get("gate", ""),
        report=entry["text"],
    )


READERS: dict[str, Callable[[Entry], Measurement]] = {
    "card": read_card,
    "ablation": read_ablation,
    "waiting": read_waiting,
    "memory": read_memory,
    "inference": read_inference,
    "refused": read_refused,
    "learned": read_learned,
    "grasps": read_grasps,
    "text": read_text,
}
"""The reader of each kind of entry, by the key that an entry of this kind has."""


@cache
def load(path: Path) -> Any:
    """Returns the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def find_variant(experiment: str, name: str, case: str) -> dict[str, Any]:
    """Returns a variant of an ablation; empty if there is none."""
    for variant in load(ROOT / experiment / "result.json")["variants"]:
        names = (variant["name"], *variant["also"])
        if variant["case"] == case and name in names:
            return dict(variant)
    return {}


def verdict_of(memory: str, stage: str) -> str:
    """Returns the gate's verdict on a stage in the ablation of the recipe whose memory was measured."""
    experiment = yaml.safe_load((EXPERIMENTS / "memory" / f"{memory}.yaml").read_text(encoding="utf-8"))
    folder = f"experiments/{Path(experiment['recipe']).stem}"
    # Sets of several stages are not the same ones there, and settings of a stage may differ.
    if stage == "all" or not (ROOT / folder / "result.json").is_file():
        return ""
    return find_variant(folder, stage, "").get("verdict") or ""


def machine_of(experiment: str, case: str) -> str:
    """Returns device, processor and threads of a case of an ablation."""
    result = load(ROOT / experiment / "result.json")
    facts = next(facts for facts in result["cases"] if facts["name"] == case)
    torch = load(ROOT / experiment / "ablation.json")["torch"]
    return f"{facts['device']}, {result['machine']['cpu']}, {threads(facts['threads'])}, torch {torch}"


def threads(count: int) -> str:
    """Returns a number of threads with its unit."""
    return "1 thread" if count == 1 else f"{count} threads"


def date_of(folder: str) -> str:
    """Returns the date of an experiment according to the index of all experiments."""
    index = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    for line in index.splitlines():
        if f"({folder}/README.md)" in line and line.startswith("|"):
            days = [int(cell) for cell in line.split("|") if re.fullmatch(r" \d+ ", cell)]
            if days:
                return f"{MONTH}-{days[0]:02}"
    raise ClaimError(f"experiments/README.md has no day of '{folder}'")


def label_of(entry: Entry, name: str, case: str) -> str:
    """Returns the label of an entry, or the name and case of its experiment."""
    return str(entry.get("label") or ", ".join(filter(None, (name, case))))


def factor(value: float, interval: tuple[float, float] | None) -> str:
    """Returns a factor of speed with its interval."""
    return f"{value:.2f}x" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def saving(value: float, interval: tuple[float, float] | None) -> str:
    """Returns a saved share in percent, with its range."""
    # Rounding makes a small negative share "-0", which is not a saving and not a loss.
    rounded = round(value) + 0
    text = f"{rounded} % less" if rounded >= 0 else f"{-rounded} % more"
    if interval is None:
        return text
    low, high = (round(end) + 0 for end in interval)
    return text if low == high else f"{text} [{low}, {high}]"
