"""Answers per second of one model and of two copies of it, which compute batches at the same time.

    python experiments/serve/parallel.py --run RUN [--run RUN] [--rounds 6]

Both servers take turns, each in a new process with one thread of torch for a copy. 16 clients
wait for answers. Writes ``parallel.json``, and continues where it was interrupted.
"""

import argparse
import json
import statistics
from pathlib import Path

from serve import HERE, loaded, numbers, questions, row

CLIENTS = 16


def measure(run: str, requests: int, rounds: int, out: Path) -> None:
    """Adds rounds of a run's model to the results."""
    model = loaded(run)
    kind = model.about["kind"]
    asking = questions(kind, requests)
    alone = [numbers(json.loads(model.answers([model.request(**each)])[0])) for each in asking]
    bodies = [json.dumps(each).encode() for each in asking]
    results = json.loads(out.read_text()) if out.exists() else {}
    measured = results.setdefault(kind, [])
    while len(measured) < rounds:
        names = ["parallel: 1", "parallel: 2"]
        if len(measured) % 2:
            names.reverse()
        measured.append({name: row(name, CLIENTS, run, bodies, alone) for name in names})
        out.write_text(json.dumps(results, indent=1) + "\n")


def report(out: Path) -> None:
    """Prints the ratio of each model with its range over rounds."""
    for kind, rounds in json.loads(out.read_text()).items():
        speeds = {name: [each[name]["per_second"] for each in rounds] for name in ("parallel: 1", "parallel: 2")}
        ratios = [two / one for one, two in zip(speeds["parallel: 1"], speeds["parallel: 2"], strict=True)]
        mixed = sum(each[name]["mixed"] + each[name]["errors"] for each in rounds for name in each)
        one, two = (statistics.median(values) for values in speeds.values())
        spread = f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"
        print(f"{kind}: {one:.0f} and {two:.0f} answers/s, {spread}, {mixed} wrong")


def main() -> None:
    """Measures the models of runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", action="append", default=[], help="a run; may be repeated")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=HERE / "parallel.json")
    options = parser.parse_args()
    for run in options.run:
        measure(run, options.requests, options.rounds, options.out)
    report(options.out)


if __name__ == "__main__":
    main()
