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

from runner.system.hardware import cpu_model

sys.path.append(str(Path(__file__).parents[1]))

from speed import METHOD
from speed import speed as speed_ratio


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
    result = speed_ratio(baseline, changed)
    return Figure(name, label, result.value, "x", (result.low, result.high), "", METHOD)
