"""Counts the bytes that are allocated at once while grasps are sampled with 100 and with 20 steps.

python experiments/refused/ddim_memory.py
"""

import torch
from allocations import largest_allocation
from recording import Figure, record

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble

CLOUDS = (1, 16)
SAMPLERS = {
    "ddpm": [],
    "ddim": ["model.sampler=ddim", "model.sampling_steps=20"],
}


def sampling_bytes(sets: list[str], clouds: int) -> int:
    """Returns the largest number of bytes that a sampling holds in addition to its network and its clouds."""
    pipeline = assemble(load("grasp_diffusion", ["device=cpu", *sets], Registry()))
    batch = next(iter(pipeline.source.held_out_batches()))
    inputs = pipeline.learner.inputs({name: tensor[:clouds] for name, tensor in batch.items()})
    with pipeline.learner.evaluating(), torch.inference_mode():
        return largest_allocation(lambda: pipeline.learner.predict(inputs))


def main() -> None:
    """Measures and records."""
    torch.set_num_threads(1)
    method = "largest sum of allocated bytes in one sampling of 16 grasps for each cloud, exact"
    figures = []
    for clouds in CLOUDS:
        sizes = {name: sampling_bytes(sets, clouds) for name, sets in SAMPLERS.items()}
        saved = 100 * (1 - sizes["ddim"] / sizes["ddpm"])
        label = f"20 steps of DDIM, {clouds} cloud{'s' * (clouds > 1)}"
        text = f"{sizes['ddim'] / 2**20:.2f} MiB, {sizes['ddpm'] / 2**20:.2f} MiB with 100 steps of DDPM"
        figures.append(Figure(f"saved_{clouds}", label, saved, "%", None, "", method))
        figures.append(Figure(f"bytes_{clouds}", label, sizes["ddim"], "bytes", None, text, method))
    conclusion = "Steps follow one another, and each frees what the step before has allocated: fewer of them save time."
    record("ddim_memory", "DDIM as a saving of memory", conclusion, figures)


if __name__ == "__main__":
    main()
