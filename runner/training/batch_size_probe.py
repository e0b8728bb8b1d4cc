"""A child process that trains a few steps with one batch size and reports their speed.

Memory that was once too little stays fragmented, and a crash must not take the training with it.
"""

import resource
import time

import torch

from runner.child.protocol import Parent
from runner.plugin.registry import Registry
from runner.plugin.stage import Probe
from runner.recipe.recipe import Recipe
from runner.system.hardware import available_memory
from runner.system.processor import share_processor
from runner.training.pipeline import assemble
from runner.training.step import Step

# The first steps allocate memory, and are not timed.
WARM_UP = 3
SECONDS = 0.5


def main(parent: Parent) -> None:
    """Sends a ``Probe`` after training long enough for a reliable measurement."""
    recipe, registry = parent.load()
    with share_processor(recipe.system.threads, recipe.system.wait):
        parent.tell(**vars(_probe(recipe, registry, parent.options["batch_size"])))


def _probe(recipe: Recipe, registry: Registry, batch_size: int) -> Probe:
    pipeline = assemble(recipe, registry.files, batch_size=batch_size)
    device = pipeline.device
    is_cuda = device.type == "cuda"
    limit = torch.cuda.mem_get_info(device)[0] if is_cuda else available_memory()

    step = Step(pipeline)
    steps = -WARM_UP
    started = 0.0
    while steps < 1 or time.perf_counter() - started < SECONDS:
        # At first, the source may have nothing to learn from.
        while step() is None:
            pass
        if is_cuda:
            torch.cuda.synchronize(device)
        steps += 1
        if steps == 0:
            started = time.perf_counter()
    speed = steps * pipeline.batch_size / (time.perf_counter() - started)

    if is_cuda:
        peak = torch.cuda.max_memory_reserved(device)
    else:
        # The kernel counts in KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Probe(speed, peak, limit)
