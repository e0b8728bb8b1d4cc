"""Times a training on the CPU with torch.cuda.empty_cache in every step.

python experiments/refused/empty_cache.py
"""

from collections.abc import Callable

import torch
from recording import Figure, record, speed
from torch import nn
from torch.nn import functional


def training_step(empties: bool) -> Callable[[], None]:
    """Returns a function that makes one step of a small network."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    x = torch.randn(128, 64)
    label = torch.randint(10, (128,))

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(network(x), label).backward()
        optimizer.step()
        if empties:
            torch.cuda.empty_cache()

    return step


def main() -> None:
    """Measures and records."""
    torch.set_num_threads(1)
    figures = [speed("every_step", "a CPU", training_step(False), training_step(True))]
    is_initialized = torch.cuda.is_initialized()
    text = "CUDA was not even initialized" if not is_initialized else "CUDA was initialized"
    method = "torch.cuda.is_initialized() after the steps"
    figures.append(Figure("initialized", "a CPU", is_initialized, "state", None, text, method))
    conclusion = (
        "Without CUDA the call returns immediately and frees nothing. On a GPU it returns cached memory to the driver "
        "and the next step requests it again; that was not measured here."
    )
    record("empty_cache", "empty_cache in every step", conclusion, figures)


if __name__ == "__main__":
    main()
