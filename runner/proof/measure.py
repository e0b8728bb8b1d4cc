"""The child process in which one variant lives while it is measured.

Run as ``python -m runner.proof.measure RECIPE [PLUGIN ...]``. For each command, a word on a line of stdin, it answers
one JSON line on stdout. It ends with its stdin; between commands it waits there and computes nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from runner import generators
from runner.api import Batch, RunnerError, available_memory
from runner.pipeline import OUT_OF_MEMORY, Pipeline, assemble
from runner.proof.clock import Stopwatch, warm_up
from runner.recipe import load
from runner.registry import Registry

BLOCK_SECONDS = 0.25
"""A block of updates takes about so long."""
TRAIN_SECONDS = 0.5
CONTEXT_BYTES = 2**29
"""About what every process takes on a GPU beside torch's own memory."""
POOL = 8
"""Different batches in a block."""


class Measured:
    """One variant, assembled."""

    def __init__(self, pipeline: Pipeline, building_s: float = 0.0) -> None:
        self.pipeline, self.slots = pipeline, pipeline.slots
        self.building_s = building_s
        self.stopwatch = Stopwatch(pipeline.device)
        self.noise = pipeline.context.generator("noise")
        self.exploration = pipeline.context.generator("policy")
        self.per_update = pipeline.recipe.train.batch_size / pipeline.batch_size
        """Scales the time of an update to the recipe's batch size, where a stage has chosen another one."""
        self.count = 1
        self.sampling = 0.0
        self.slots.wrap("sample", self._timed_sample)
        warmup = pipeline.recipe.train.warmup_steps if pipeline.recipe.data.simulates else 0
        steps = 0
        while not pipeline.source.ready(pipeline.batch_size) or steps < min(warmup, 20 * pipeline.batch_size):
            taken = pipeline.source.collect(None)
            if not taken:
                break
            steps += taken

    def prepare(self) -> dict[str, Any]:
        """Counts, compiles and warms up; the first update, the warm-up and the steady state are three figures."""
        pairs = itertools.cycle(self.pool())
        warmth = warm_up(lambda: self.slots.update(*next(pairs)), self.stopwatch)
        self.count = max(1, round(BLOCK_SECONDS / warmth.steady_s))
        self.train()  # the first time is slower here too
        reports = self.pipeline.reports.values()
        return {
            **dataclasses.asdict(warmth),
            "overhead_s": self.building_s + warmth.overhead_s,
            "updates": self.count,
            "batch_size": self.pipeline.batch_size,
            "threads": torch.get_num_threads(),
            "device": str(self.pipeline.device),
            "notes": {report.kind: report.notes for report in reports if report.notes},
        }

    def work(self) -> dict[str, Any]:
        """FLOP of one update as torch counts them, and what else the limit needs to know."""
        batch, noise = self.pool()[0]
        with FlopCounterMode(display=False) as counter:
            self.slots.update(batch, noise)
        return {
            "flop": counter.get_total_flops(),
            "parameters": sum(parameter.numel() for _, parameter in self.pipeline.learner.named_parameters()),
            "least": self.pipeline.learner.least_work(self.pipeline.batch_size),
        }

    def update(self) -> dict[str, Any]:
        """Seconds of one update in the mean over a block; drawing its batches and noise is not timed."""
        pairs = list(itertools.islice(itertools.cycle(self.pool()), self.count))

        def block() -> None:
            for batch, noise in pairs:
                self.slots.update(batch, noise)

        return {"seconds": self.stopwatch.seconds(block) / self.count * self.per_update}

    def train(self) -> dict[str, Any]:
        """Trains as the engine does, and says where the time went.

        ``sample`` is the time in the source, ``transfer`` what else it takes to get a batch onto the device, ``update``
        the rest of an update with its noise and feedback. A GPU is waited for where collecting and updates end.
        """
        pipeline = self.pipeline
        spent = dict.fromkeys(("collect", "sample", "transfer", "update"), 0.0)
        env_steps = updates = 0
        credit, started = 0.0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < TRAIN_SECONDS or not updates:
            if pipeline.recipe.data.simulates:
                steps = self._collect(spent)
                env_steps += steps
                credit += steps * pipeline.updates_per_step
            else:
                credit += 1
            due, credit = int(credit), credit - int(credit)
            self._updates(due, spent)
            updates += due
        return {"seconds": elapsed, "env_steps": env_steps, "updates": updates, **spent}

    def memory(self) -> dict[str, Any]:
        """Most bytes that this process, and on a GPU torch, ever held; and what is free where memory is scarcest."""
        device, host = self.pipeline.device, _peak_host_bytes()
        if device.type != "cuda":
            return {"host_bytes": host, "device_bytes": None, "own_bytes": host, "free_bytes": available_memory()}
        return {
            "host_bytes": host,
            "device_bytes": torch.cuda.max_memory_allocated(device),
            "own_bytes": torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES,
            "free_bytes": torch.cuda.mem_get_info(device)[0],
        }

    def _collect(self, spent: dict[str, float]) -> int:
        begun = time.perf_counter()
        learner = self.pipeline.learner
        steps = self.pipeline.source.collect(lambda seen: learner.act(seen, self.exploration))
        self._wait()
        spent["collect"] += time.perf_counter() - begun
        return steps

    def _updates(self, due: int, spent: dict[str, float]) -> None:
        pipeline, begun = self.pipeline, time.perf_counter()
        getting = 0.0
        self.sampling = 0.0
        for remaining in reversed(range(due)):
            before = time.perf_counter()
            batch = self.slots.next_batch(pipeline.batch_size, 0.5, remaining)
            getting += time.perf_counter() - before
            output = self.slots.update(batch, pipeline.learner.noise(pipeline.batch_size, self.noise))
            pipeline.source.feedback(batch, output)
        self._wait()
        spent["sample"] += self.sampling
        spent["transfer"] += getting - self.sampling
        spent["update"] += time.perf_counter() - begun - getting

    def _timed_sample(self, step: Callable[..., Batch]) -> Callable[..., Batch]:
        def sample(*arguments: Any) -> Batch:
            begun = time.perf_counter()
            try:
                return step(*arguments)
            finally:
                self.sampling += time.perf_counter() - begun

        return sample

    def pool(self) -> list[tuple[Batch, Batch]]:
        """Fresh batches and noise; copies, because a stage may write the next batch in the place of the last."""
        size, pool = self.pipeline.batch_size, []
        for _ in range(min(POOL, self.count) if self.count > 1 else POOL):
            batch = {name: tensor.clone() for name, tensor in self.slots.next_batch(size, 0.5, 0).items()}
            pool.append((batch, self.pipeline.learner.noise(size, self.noise)))
        self._wait()
        return pool

    def _wait(self) -> None:
        if self.pipeline.device.type == "cuda":
            torch.cuda.synchronize(self.pipeline.device)


def _peak_host_bytes() -> int:
    """Of this program alone: what ``getrusage`` says on Linux includes the process that it was started from."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> int:
    """Answers commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    path, *plugins = sys.argv[1:]
    files = [Path(plugin) for plugin in plugins]
    try:
        recipe = load(path, (), Registry(files))
        Path(path).unlink()  # it may hold secrets, and nobody tidies up after a kill
        generators.seed(recipe.seed)
        begun = time.perf_counter()
        pipeline = assemble(recipe, files)
        measured = Measured(pipeline, time.perf_counter() - begun)
        for line in sys.stdin:
            answer = getattr(measured, line.strip())()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    except (torch.OutOfMemoryError, MemoryError):
        return OUT_OF_MEMORY
    except RunnerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except BrokenPipeError:  # the parent is gone
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
