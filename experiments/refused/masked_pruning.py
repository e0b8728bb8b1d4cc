"""Measures unstructured pruning with masks: bytes of the file and time of an answer.

python experiments/refused/masked_pruning.py
"""

import io
from typing import Any

import torch
from recording import Figure, record, speed
from torch import nn
from torch.nn.utils import prune

SHARE = 0.5


def file_bytes(state: Any) -> int:
    """Returns the size of a file with that state."""
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def build() -> nn.Module:
    """Returns a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()


@torch.no_grad()
def main() -> None:
    """Measures and records."""
    torch.set_num_threads(1)
    dense = build()
    masked = build()
    removed = build()
    for network in (masked, removed):
        for layer in (network[0], network[2]):
            prune.l1_unstructured(layer, "weight", SHARE)
    for layer in (removed[0], removed[2]):
        prune.remove(layer, "weight")
    x = torch.randn(16, 256)
    size = file_bytes(dense.state_dict())
    method = "bytes of the file of a network of two layers, exact"
    figures = []
    for name, network, label in (
        ("masked", masked, "half of the weights masked"),
        ("removed", removed, "masks multiplied into the weights"),
    ):
        saved = 100 * (1 - file_bytes(network.state_dict()) / size)
        figures.append(Figure(f"bytes_{name}", label, saved, "%", None, "", method))
    figures.append(speed("time_masked", "masked, 16 requests", lambda: dense(x), lambda: masked(x)))
    figures.append(speed("time_removed", "zeros, 16 requests", lambda: dense(x), lambda: removed(x)))
    conclusion = (
        "A mask is as large as its weight, and zeros are stored and multiplied like other numbers. The stage `prune` "
        "removes heads and units, so that layers become smaller."
    )
    record("masked_pruning", "Pruning with masks", conclusion, figures)


if __name__ == "__main__":
    main()
