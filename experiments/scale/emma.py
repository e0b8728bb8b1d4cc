"""Trains the parts of a graph in processes of their own, and counts the bytes that they send each other.

    python experiments/scale/emma.py

`emma_cora` computes all parts in one process, and counts the bytes that they would send. Here, each process has one
part: it sends the values of border nodes to the processes that read them (gloo), and receives their gradients. Losses,
parameters and bytes are compared with those of the one process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "tests"))

from divided_graph import trained  # noqa: E402

from runner.distributed.process_group import ProcessGroup  # noqa: E402

RESULTS, TABLE = HERE / "emma.json", HERE / "emma.md"
EXCHANGES = ("full_halo", "historical", "emma")
COUNTS = (2, 4)
UPDATES = 100


def settings(exchange: str, count: int) -> tuple[str, ...]:
    """Returns the settings of a training."""
    return f"model.exchange={exchange}", "model.chunks=4", f"data.parts={count}"


def train_part(rank: int, exchange: str, count: int, folder: str) -> None:
    """Trains one part, and writes what was measured."""
    torch.set_num_threads(1)
    group = ProcessGroup(dist.FileStore(f"{folder}/store", count), rank, count)
    group.connect("cpu", 300)
    result = trained(group, settings(exchange, count), UPDATES)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def compared(exchange: str, count: int) -> dict[str, Any]:
    """Returns one row: a training by one process and by several."""
    single = trained(None, settings(exchange, count), UPDATES)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_part, args=(exchange, count, folder), nprocs=count)
        parts = [torch.load(f"{folder}/{rank}.pt") for rank in range(count)]
    sent = [sum(part["sent"][update] for part in parts) for update in range(UPDATES)]
    pairs = zip(single["losses"], parts[0]["losses"], strict=True)
    return {
        "exchange": exchange,
        "processes": count,
        "loss": max(abs(one - other) / abs(one) for one, other in pairs),
        "parameter": max(
            float((value - parts[0]["parameters"][name]).abs().max()) for name, value in single["parameters"].items()
        ),
        "counted": sum(single["counted"]),
        "sent": sum(sent),
        "equal_updates": sum(one == other for one, other in zip(single["counted"], sent, strict=True)),
        "gradients": sum(part["backward"] for part in parts),
    }


def page(rows: list[dict[str, Any]]) -> str:
    """Returns the page."""
    lines = [
        "# Parts of a graph in processes of their own",
        "",
        f"Written by `emma.py`: the first {UPDATES} updates of `emma_cora` (Cora, parts by breadth, chunks of a "
        "quarter, dropout 0.5), computed by one process, and by as many processes as there are "
        "parts, which exchange the nodes at their borders by gloo. Bytes of all processes and updates.",
        "",
        "| exchange | processes | counted in one process | sent, values | updates with the same number | "
        "sent, gradients | largest difference of a loss | of a parameter |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            f"`{row['exchange']}`",
            row["processes"],
            f"{row['counted']:,.0f}",
            f"{row['sent']:,}",
            f"{row['equal_updates']} of {UPDATES}",
            f"{row['gradients']:,}",
            f"{row['loss']:.0e} of it",
            f"{row['parameter']:.0e}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "The recipe counts values alone. Gradients of values that were sent in an update travel back, as many bytes "
        "again; those of values from earlier updates do not exist.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compares all exchanges."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    rows = []
    for count in COUNTS:
        for exchange in EXCHANGES:
            rows.append(compared(exchange, count))
            print(rows[-1], flush=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
