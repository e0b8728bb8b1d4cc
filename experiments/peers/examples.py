"""Lines of the examples of the documentation and of equivalent scripts for PyTorch Lightning.

``python experiments/peers/examples.py --python OTHER/bin/python`` counts the lines of both and
runs both for a moment. ``OTHER`` is an environment with Lightning, torch and scikit-learn.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SCRIPTS = Path(__file__).with_name("examples")
RESULT = Path(__file__).with_name("examples.json")
RECIPES = {
    "vae": ["vae.yaml"],
    "ppo": ["ppo.yaml"],
    "bert": ["bert.yaml"],
    "table": ["table.yaml"],
    "two_tasks": ["two_tasks.yaml"],
    "contrastive": ["contrastive.yaml", "probe.yaml"],
}
"""Recipes of every example."""
SMALL = {"ppo": ["--updates", "2"], "contrastive": ["--epochs", "1", "--probe-epochs", "1"]}
"""Options that make a script short, by example; others have an option for epochs only."""
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def lines_of_python(text: str) -> int:
    """Returns the number of lines that are neither blank nor only a comment."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    # A docstring of several lines may contain blank ones.
    rows = text.splitlines()
    return sum(bool(rows[number - 1].strip()) for number in lines)


def lines_of_yaml(text: str) -> int:
    """Returns the number of lines that are neither blank nor only a comment."""
    rows = (row.strip() for row in text.splitlines())
    return sum(bool(row) and not row.startswith("#") for row in rows)


def lines_of_example(name: str) -> int:
    """Returns the number of lines of a plugin and its recipes."""
    recipes = sum(lines_of_yaml((EXAMPLES / recipe).read_text()) for recipe in RECIPES[name])
    return lines_of_python((EXAMPLES / f"{name}.py").read_text()) + recipes


def lines_of_script(name: str) -> int:
    """Returns the number of lines of the script for Lightning."""
    return lines_of_python((SCRIPTS / f"{name}.py").read_text())


def ran(command: list[str], folder: str) -> dict[str, object]:
    """Runs a command; returns its exit code, its seconds and the last line of its output."""
    started = time.perf_counter()
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = process.stdout.strip().splitlines() or [""]
    seconds = round(time.perf_counter() - started, 1)
    return {"exit_code": process.returncode, "seconds": seconds, "last_line": lines[-1][:200]}


def main() -> None:
    """Counts, runs, prints a table and writes ``examples.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="an interpreter with Lightning")
    options = parser.parse_args()
    # Scripts run in another folder; a link to the interpreter belongs to its environment.
    python = options.python.absolute()
    version = "import lightning; print(lightning.__version__)"
    lightning = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True)
    rows = {}
    for name in RECIPES:
        short = SMALL.get(name, ["--epochs", "1"])
        with tempfile.TemporaryDirectory() as folder:
            script = ran([str(python), str(SCRIPTS / f"{name}.py"), *short], folder)
        rows[name] = {
            "runner": lines_of_example(name),
            "lightning": lines_of_script(name),
            "lightning_run": {"options": short, **script},
        }
        print(name, json.dumps(rows[name]), flush=True)
    data = {"lightning": lightning.stdout.strip(), "examples": rows}
    RESULT.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
