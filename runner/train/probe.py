"""A child process that trains a few real steps with one batch size and says how fast they were.

A process of its own, because memory that was once too little stays fragmented, and a crash must not take the training
with it.
"""

import dataclasses
import resource
import time

import torch

from runner.child.protocol import Parent
from runner.plugin.stage import Probe
from runner.system.hardware import available_memory
from runner.train.assemble import Assembly, assemble
from runner.train.step import Step

WARM_UP = 3
SECONDS = 0.5


def measure(pipeline: Assembly) -> Probe:
    """Trains until the clock can be trusted.

    Raises:
        torch.OutOfMemoryError: the device's memory does not suffice.
    """
    cuda = pipeline.device.type == "cuda"
    limit = torch.cuda.mem_get_info(pipeline.device)[0] if cuda else available_memory()
    whole_step = Step(pipeline)

    def step() -> None:
        while whole_step() is None:  # the source has nothing to learn from yet
            pass

    for _ in range(WARM_UP):
        step()
    if cuda:
        torch.cuda.synchronize(pipeline.device)
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        step()
        steps += 1
        if cuda:
            torch.cuda.synchronize(pipeline.device)
    seconds = time.perf_counter() - started
    peak = (
        torch.cuda.max_memory_reserved(pipeline.device)
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return Probe(steps * pipeline.batch_size / seconds, peak, limit)


def main(parent: Parent) -> None:
    """Tells a ``Probe``."""
    recipe, registry = parent.load()
    probe = measure(assemble(recipe, registry.files, batch_size=parent.options["batch_size"]))
    parent.tell(**dataclasses.asdict(probe))
