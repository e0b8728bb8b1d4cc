"""Times updates whose convolutions search for their algorithm in every call, or keep what was found.

python experiments/refused/search_every_call.py
"""

import torch
from recording import Figure, record

from runner.plugin.registry import Registry
from runner.proof import ratio
from runner.recipe.loader import load
from runner.system.stopwatch import Stopwatch
from runner.training.pipeline import assemble
from runner.training.step import Step

ROUNDS = 5
UPDATES = 20
"""Updates of a round with a cache."""


def step_of(search_every_call: bool) -> Step:
    """Returns the updates of the classifier with a search."""
    settings = f"{{seconds: 600, search_every_call: {str(search_every_call).lower()}}}"
    sets = ("device=cpu", "optimization.heap_retention=off", f"optimization.algorithm_search={settings}")
    registry = Registry()
    step = Step(assemble(load("conv_classifier", sets, registry), registry.files))
    step()
    return step


def seconds_of(step: Step, updates: int) -> float:
    """Returns the duration of one of these updates."""

    def work() -> None:
        for _ in range(updates):
            step()

    return Stopwatch(torch.device("cpu")).seconds(work) / updates


def main() -> None:
    """Measures and records."""
    torch.set_num_threads(1)
    every_call = step_of(search_every_call=True)
    cached = step_of(search_every_call=False)
    searching_seconds = []
    cached_seconds = []
    for _ in range(ROUNDS):
        searching_seconds.append(seconds_of(every_call, 1))
        cached_seconds.append(seconds_of(cached, UPDATES))
    result = ratio(searching_seconds, cached_seconds)
    method = f"{ROUNDS} rounds of one process, 95 %; an update of `conv_classifier`"
    label = "searched once instead of in every call"
    figures = [Figure("cached", label, result.value, "x", (result.low, result.high), "", method)]
    conclusion = (
        "A search times several algorithms and takes far longer than the convolution. The cache that the report "
        "praises removes a search in each call, which torch never made; `algorithm_search` searches once."
    )
    record("search_every_call", "A search in every call", conclusion, figures)


if __name__ == "__main__":
    main()
