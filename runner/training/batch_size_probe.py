"""A child process, or several, that train a few steps with one batch size and report their speed.

Memory that was once too little stays fragmented, and a crash must not take the training with it.
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import torch

from runner.child.protocol import Parent
from runner.distributed.membership import connected
from runner.plugin.registry import Registry
from runner.plugin.stage import Probe
from runner.recipe.recipe import Recipe
from runner.system.processor import share_processor
from runner.training.device_memory import free_memory
from runner.training.pipeline import assemble
from runner.training.step import Step

if TYPE_CHECKING:
    from runner.distributed.process_group import ProcessGroup

# The first steps allocate memory, and are not timed.
WARM_UP = 3
SECONDS = 0.5


def main(parent: Parent) -> None:
    """Sends a ``Probe`` after training long enough for a reliable measurement."""
    recipe, registry = parent.load()
    with (
        share_processor(recipe.system.threads, recipe.system.wait),
        connected(
            parent.options["group"], recipe.device, recipe.train.stall_s
        ) as group,
    ):
        probe = _probe(recipe, registry, parent.options["batch_size"], group)
        parent.tell(**vars(probe))


def _probe(
    recipe: Recipe, registry: Registry, batch_size: int, group: ProcessGroup | None
) -> Probe:
    pipeline = assemble(recipe, registry.files, batch_size=batch_size, processes=group)
    device = pipeline.device
    is_cuda = device.type == "cuda"
    limit = free_memory(device)

    step = Step(pipeline)
    steps = -WARM_UP
    started = 0.0
    while steps < 1 or not _is_over(steps, started, group):
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
    if group is None:
        return Probe(speed, peak, limit)
    parts = group.gather((peak, limit))
    peaks, limits = zip(*parts, strict=True)
    # Processes share the memory of the host, and have a GPU each.
    return Probe(speed, max(peaks) if is_cuda else sum(peaks), min(limits))


def _is_over(steps: int, started: float, group: ProcessGroup | None) -> bool:
    """Returns whether steps have been timed for long enough; the first process decides it."""
    is_over = time.perf_counter() - started >= SECONDS
    if group is None:
        return is_over
    # A decision takes time, so there is one after 1, 2, 4, 8, ... steps.
    return steps & (steps - 1) == 0 and bool(group.broadcast(is_over))
