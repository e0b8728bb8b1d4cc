"""Measures the memory of all experiments in this folder, and writes one table of them.

    python experiments/memory/measure.py

Every variant is written as soon as it is measured. Run it again after an interruption: finished
experiments are kept, and an unfinished one continues.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = HERE / "README.md"
MIB = 2**20
HEAD = """\
# Memory of an update, stage by stage

The memory of an update at its peak beyond parameters and optimizer (*update*), and what the process
that trains holds at most (*process*, with Python, torch and data). Made by
`python experiments/memory/measure.py`; each folder has the record of one experiment.

| recipe | stages | update MiB | remaining | process MiB | the kernel's count, MiB |
|---|---|---:|---:|---:|---:|
"""


def measure(experiment: Path) -> None:
    """Runs one ablation, unless it is finished."""
    folder = experiment.with_suffix("")
    if (folder / "result.json").exists():
        return
    # Records name files relative to the repository.
    path, out = (str(name.resolve().relative_to(ROOT.resolve())) for name in (experiment, folder))
    command = [sys.executable, "-m", "runner", "ablate", path, "--metric", "memory"]
    subprocess.run([*command, "--out", out, "--quiet"], check=True, cwd=ROOT)


def rows(experiment: Path) -> list[str]:
    """Returns the rows of one experiment in Markdown."""
    result = json.loads((experiment.with_suffix("") / "result.json").read_text(encoding="utf-8"))
    lines = []
    for variant in result["variants"]:
        memory = variant["memory"]
        stages = ", ".join(variant["stages"]) or "none"
        grown = "-" if memory["grown"] is None else f"{memory['grown'] / MIB:.1f}"
        lines.append(
            f"| {result['name'].removeprefix('memory_')} | {stages} | {memory['update'] / MIB:.1f} "
            f"| {variant['remaining']:.1%} | {variant['process'] / MIB:.0f} | {grown} |"
        )
    product = result["cases"][0]["product"]
    if product is not None:
        lines.append(f"| | *product of the stages* | | {product:.1%} | | |")
    return lines


def main() -> None:
    """Measures all experiments and writes the table after each experiment."""
    experiments = sorted(HERE.glob("*.yaml"))
    for experiment in experiments:
        measure(experiment)
        finished = [path for path in experiments if (path.with_suffix("") / "result.json").exists()]
        lines = [line for path in finished for line in rows(path)]
        TABLE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
