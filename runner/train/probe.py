"""A child process that trains a few real steps with one batch size and prints how fast they were.

Run as ``python -m runner.train.probe RECIPE BATCH_SIZE [PLUGIN ...]``; a process of its own, because memory that was
once too little stays fragmented, and a crash must not take the training with it.
"""

import dataclasses
import json
import resource
import sys
import time
from pathlib import Path

import torch

from runner.api import Probe, RunnerError, available_memory
from runner.plugin.registry import Registry
from runner.recipe import load
from runner.train.assemble import OUT_OF_MEMORY, Pipeline, assemble
from runner.train.step import Step

WARM_UP = 3
SECONDS = 0.5


def measure(pipeline: Pipeline) -> Probe:
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


def main() -> int:
    """Prints a ``Probe`` as JSON."""
    path, batch_size, *plugins = sys.argv[1:]
    files = [Path(plugin) for plugin in plugins]
    try:
        recipe = load(path, ["optimization.batch_autotune=off"], Registry(files))
        probe = measure(assemble(recipe, files, batch_size=int(batch_size)))
    except (torch.OutOfMemoryError, MemoryError):
        return OUT_OF_MEMORY
    except RunnerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(dataclasses.asdict(probe)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
