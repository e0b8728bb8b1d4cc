"""Records measurements of refused techniques."""

import datetime
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from refused_report import RESULTS, write_report

from runner.proof import ratio
from runner.system.hardware import cpu_model
from runner.system.stopwatch import Stopwatch

ROUNDS = 21
BLOCK_SECONDS = 0.05
"""Duration of a block of calls, long compared with the resolution of the clock."""


@dataclass(frozen=True)
class Figure:
    """A measured figure.

    Attributes:
        name: Name within the result.
        label: Circumstances in a few words.
        value: The figure.
        unit: ``x`` for a factor of speed, ``%`` for a saved share in percent, or a word.
        interval: Its ends; None for a count or another exact figure.
        text: The figure for a reader, if its unit is a word.
        method: Method, and what the interval is about.
    """

    name: str
    label: str
    value: float
    unit: str
    interval: tuple[float, float] | None
    text: str
    method: str


def record(name: str, title: str, conclusion: str, figures: Sequence[Figure], plot: str = "") -> None:
    """Prints the figures, writes them to the folder of results and renews the report.

    ``plot`` describes the picture next to the report that has the name of the result, if there is one.
    """
    threads = torch.get_num_threads()
    result = {
        "title": title,
        "conclusion": conclusion,
        "plot": plot,
        "command": f"python experiments/refused/{Path(sys.argv[0]).name}",
        "date": datetime.date.today().isoformat(),
        "machine": f"cpu, {cpu_model()}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}",
        "load": round(os.getloadavg()[0], 1),
        "figures": [asdict(figure) for figure in figures],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for figure in figures:
        ends = "[{:.4g}, {:.4g}]".format(*figure.interval) if figure.interval else ""
        print(f"{figure.name}: {figure.value:.4g} {figure.unit} {ends} {figure.text}")
    print(conclusion)
    write_report()


def speed(name: str, label: str, baseline: Callable[[], object], changed: Callable[[], object]) -> Figure:
    """Times two functions alternately and returns the factor by which the second is faster."""
    for function in (baseline, changed):
        for _ in range(5):
            function()
    calls = calls_for(BLOCK_SECONDS, baseline)
    baseline_seconds = []
    changed_seconds = []
    for number in range(ROUNDS):
        # Alternating the order cancels a drift of the machine.
        if number % 2:
            changed_seconds.append(seconds_of(calls, changed))
            baseline_seconds.append(seconds_of(calls, baseline))
        else:
            baseline_seconds.append(seconds_of(calls, baseline))
            changed_seconds.append(seconds_of(calls, changed))
    result = ratio(baseline_seconds, changed_seconds)
    method = f"{ROUNDS} rounds of one process, 95 %"
    return Figure(name, label, result.value, "x", (result.low, result.high), "", method)


def calls_for(seconds: float, function: Callable[[], object]) -> int:
    """Returns the number of calls that take that long."""
    return max(1, round(seconds * 3 / seconds_of(3, function)))


def seconds_of(calls: int, function: Callable[[], object]) -> float:
    """Returns the duration of a number of calls."""

    def work() -> None:
        for _ in range(calls):
            function()

    return Stopwatch(torch.device("cpu")).seconds(work)
