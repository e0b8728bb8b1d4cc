"""Seconds of a complete training of GPT-2 small on a GPU, beside a script without the product.

    python experiments/gpu/start_up.py [--updates 100]

Both run at the same time, first without compiled code in torch's caches, then with it. The
product also evaluates, writes checkpoints and logs. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent / "gpt_loss"))
VOCABULARY = 65


def plain(updates: int) -> None:
    """Trains without the product."""
    import torch
    import update
    from gpt import settings

    torch.set_float32_matmul_precision("high")
    step = update.plain(settings(VOCABULARY))
    for _ in range(updates):
        step()
    torch.cuda.synchronize()


def command_of(updates: int, folder: Path) -> list[str]:
    """Returns the command of the product, whose tokens it writes to a folder."""
    import update
    from gpt import settings

    args = settings(VOCABULARY)
    tokens = updates * args.batch * args.context
    overrides = [
        f"model={{layers: {args.layers}, width: {args.width}, heads: {args.heads}}}",
        *update.data_settings(args, folder),
        f"train.batch_size={args.batch}",
        *(f"train.{name}={tokens}" for name in ("tokens", "evaluate_every", "checkpoint_every")),
    ]
    return [sys.executable, "-m", "runner", "run", "shakespeare_gpt", *overrides, "--json", "--quiet"]


def timed(commands: dict[str, list[str]], caches: Path) -> dict[str, Any]:
    """Returns the wall-clock seconds of commands that run beside each other, and the product's report."""
    started = time.perf_counter()
    children = {}
    for name, command in commands.items():
        environment = {
            **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches / name),
            "TRITON_CACHE_DIR": str(caches / name / "triton"),
            "TORCH_LOGS": "recompiles", "RUNNER_WORKSPACE": str(caches / "workspace"),
        }  # fmt: skip
        children[name] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    seconds: dict[str, float] = {}
    while len(seconds) < len(children):
        time.sleep(0.02)
        for name, child in children.items():
            if name not in seconds and child.poll() is not None:
                seconds[name] = round(time.perf_counter() - started, 1)
    outputs = {name: child.communicate() for name, child in children.items()}
    report, errors = outputs["product"]
    assert not any(child.returncode for child in children.values()), outputs
    facts = json.loads(report[report.index("{") :])
    figures = {name: value for name, value in facts["metrics"].items() if name.startswith("perf/")}
    return {
        "plain_s": seconds["plain"], "product_s": seconds["product"],
        "more_s": round(seconds["product"] - seconds["plain"], 1),
        "recompilations": errors.count("Recompiling function"), "inside_s": facts["seconds"],
        "startup_s": facts["startup_seconds"], **figures,
    }  # fmt: skip


def main() -> None:
    """Times a first and a second training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if options.plain:
        plain(options.updates)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        commands = {
            "plain": [sys.executable, __file__, "--plain", "--updates", str(options.updates)],
            "product": command_of(options.updates, place),
        }
        rows = {name: timed(commands, place / "caches") for name in ("cold", "warm")}
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
