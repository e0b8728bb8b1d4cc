"""Counts the bytes of a discriminator's step whose rendered patches have a graph, or none.

python experiments/refused/fakes_without_gradient.py
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from allocations import largest_allocation
from recording import Figure, record

from runner.plugin.registry import Registry
from runner.plugins.radiance import learner
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.training.step import Step

LABELS = {
    "none": "rendered without a graph (the baseline)",
    "detached": "rendered with a graph, then detached",
    "kept": "rendered with a graph that the loss keeps",
}


def step_bytes(graph: str) -> int:
    """Returns the largest number of bytes that a step of the discriminator allocates."""
    pipeline = assemble(load("graf", ["device=cpu", "data.synthetic=true"], Registry()))
    sizes = []

    def measured(discriminator_step: Callable[..., Any]) -> Callable[..., Any]:
        def measure(*given: Any) -> Any:
            results = []
            context = nullcontext() if graph == "none" else patch.object(learner.torch, "no_grad", nullcontext)
            with context:
                sizes.append(largest_allocation(lambda: results.append(discriminator_step(*given))))
            return results[0]

        return measure

    pipeline.slots.wrap("discriminator_step", measured)
    if graph == "detached":
        # Only steps of the discriminator are looked at, so the generator may learn nothing.
        pipeline.slots.wrap("render", lambda render: lambda *given: render(*given).detach().requires_grad_())
    step = Step(pipeline)
    # The first step allocates the moments of the optimizer.
    step()
    step()
    return sizes[-1]


def main() -> None:
    """Measures and records."""
    torch.set_num_threads(1)
    sizes = {graph: step_bytes(graph) for graph in LABELS}
    method = "largest sum of allocated bytes in a step of the discriminator of `graf`, exact"
    figures = []
    for graph, size in sizes.items():
        text = f"{size / 2**20:.1f} MiB"
        figures.append(Figure(f"bytes_{graph}", LABELS[graph], size, "bytes", None, text, method))
    for graph in ("detached", "kept"):
        saved = 100 * (1 - sizes["none"] / sizes[graph])
        label = f"without a graph, instead of {LABELS[graph]}"
        figures.append(Figure(f"saved_{graph}", label, saved, "%", None, "", method))
    conclusion = "The baseline renders fakes without a graph. The report is right that this saves memory."
    record("fakes_without_gradient", "Fakes without a graph", conclusion, figures)


if __name__ == "__main__":
    main()
