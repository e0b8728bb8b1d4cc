"""The child process in which one variant lives while it is measured; between commands it computes
nothing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from functools import partial
from typing import Any

import torch

from runner.ablation import compared_trainings
from runner.child.protocol import Parent
from runner.proof.subject import Subject
from runner.proof.timekeeping import LEAST_DEFERRED, deferred_seconds
from runner.proof.warm_up import warm_up
from runner.system import generators
from runner.system.contention import ContentionMeter
from runner.system.hardware import available_memory, peak_host_memory
from runner.system.openmp import WaitControl
from runner.system.processor import set_threads
from runner.system.stopwatch import Stopwatch
from runner.system.tensor_trees import map_tensors, nbytes
from runner.training.metrics import Activities
from runner.training.pipeline import Assembly, assemble, resolve_device
from runner.training.roofline import count_work
from runner.training.step import Drawn, Step
from runner.training.tuning import fresh_tuning

BLOCK_SECONDS = 0.25
"""Approximate duration of a block of updates."""
TRAIN_SECONDS = 0.5
CONTEXT_BYTES = 2**29
"""Approximate GPU memory of every process in addition to torch's."""
DRAW_SECONDS = 1.0
"""Approximate limit on the time to sample the batches of a block."""
BLOCK_BYTES = 2**30
"""Approximate limit on the memory of these batches."""
FEWEST_BATCHES = 8
"""Batches of a block that are sampled even if it takes longer."""
FEW = 4
"""Updates of a block below which updates count as slow."""


class Measured:
    """A variant after assembly."""

    def __init__(self, pipeline: Assembly, building_s: float = 0.0) -> None:
        self.waiting = WaitControl()
        self.meter = ContentionMeter()
        self.pipeline = pipeline
        self.building_s = building_s
        self.stopwatch = Stopwatch(pipeline.device)
        self.activities = Activities(pipeline.device)
        self.step = Step(pipeline)
        self.subject = Subject(self.advance, {"learner": pipeline.learner})
        for name in ("draw", "next_batch", *pipeline.source.activities):
            during = partial(self.activities.time, name)
            pipeline.slots.surround(name, during)
        self.count = 1
        """Updates in a block."""

    def prepare(self) -> dict[str, Any]:
        """Counts, compiles and warms up; the first update, the warm-up and the steady state are
        three figures.
        """
        batches: list[Drawn] = []

        def draw() -> None:
            batches[:] = self.draws(1)

        warmth = warm_up(lambda: self.advance(batches[0]), self.stopwatch, prepare=draw)
        self.count = max(1, round(BLOCK_SECONDS / warmth.steady_s))
        # The first steps of a training are slower, too, and must not count later.
        trained = self.train()
        notes = {
            report.kind: report.notes
            for report in self.pipeline.reports.values()
            if report.notes
        }
        return {
            **dataclasses.asdict(warmth),
            "overhead_s": self.building_s + warmth.overhead_s,
            "updates": self.count,
            "block_s": self.count * warmth.steady_s,
            "train_s": trained["seconds"],
            "notes": notes,
            "batch_size": self.pipeline.batch_size,
            "threads": torch.get_num_threads(),
            "device": str(self.pipeline.device),
        }

    def cost(self) -> dict[str, Any]:
        """Returns the FLOP of one update as torch counts them, and the other input of the limit."""
        (sample,) = self.draws(1)
        return count_work(self.step, sample)

    def update(self) -> dict[str, Any]:
        """Seconds of one update in the mean over a block, scaled to the recipe's batch size.

        Every update has a new batch; sampling is not timed. Work that a stage leaves until somebody
        reads the results is. The answer contains the load of other programs that this process
        measured meanwhile.
        """
        batches = self.draws(self.count)
        outputs: list[Any] = []

        def block() -> None:
            for sample in batches:
                outputs[:] = [self.advance(sample)]

        # A stage may have changed the batch size, and times of other sizes cannot be compared.
        scale = self.pipeline.recipe.train.batch_size / self.pipeline.batch_size
        self.meter.read()
        block_s = self.stopwatch.seconds(block)
        contention = self.meter.read()
        deferred_s = deferred_seconds(self.stopwatch, self.subject, outputs[0])
        if deferred_s > LEAST_DEFERRED * block_s:
            block_s += deferred_s
        seconds = block_s / len(batches) * scale
        return {"seconds": seconds, "contention": contention._asdict()}

    def sleep(self) -> dict[str, Any]:
        """Makes threads sleep while they wait for each other, from the next command on."""
        self.waiting.sleep()
        return {}

    def spin(self) -> dict[str, Any]:
        """Makes threads spin while they wait for each other."""
        self.waiting.spin()
        return {}

    def advance(self, drawn: Drawn) -> dict[str, Any]:
        """Makes an update as a training does, with its seed and counted, and returns its result."""
        progress = self.pipeline.progress
        self.step.seed(progress.updates)
        output = self.step.update(drawn)
        progress.updates += 1
        return output

    def record(self) -> dict[str, Any]:
        """Batches with which all variants make the updates that are compared."""
        return {"batches": compared_trainings.record(self.step, few=self.count < FEW)}

    def make(self, recorded: bytes) -> dict[str, Any]:
        """Returns the results of updates with these batches, after everything that is timed."""
        return {"windows": compared_trainings.make(self.step, recorded)}

    def judge(self, made: bytes) -> dict[str, Any]:
        """Returns how a variant's updates differ from this baseline's."""
        return compared_trainings.judge(self.step, made, statistical=False)

    def judge_number(self, made: bytes) -> dict[str, Any]:
        """Compares only the number of updates, for a variant that promises neither bits nor
        algebra.
        """
        return compared_trainings.judge(self.step, made, statistical=True)

    def train(self) -> dict[str, Any]:
        """Trains with the training loop's step, and returns the time by activity;
        waits for a GPU at the end.

        ``draw`` is the time in the source without its separate activities
        (``collect``), ``transfer`` the remaining time to get a batch onto the
        device, ``update`` the remainder of a step.
        """
        progress = self.pipeline.progress
        first_position = progress.position
        updates = progress.updates
        self.activities.read()
        started = time.perf_counter()
        # A slow training still needs at least one update.
        while (
            time.perf_counter() - started < TRAIN_SECONDS or progress.updates == updates
        ):
            position = progress.position
            while progress.position == position:
                self.step()
        elapsed, seconds = self.activities.read()
        activities = {name: seconds[name] for name in self.pipeline.source.activities}
        draw = seconds["draw"]
        batch = seconds["next_batch"]
        done = progress.position - first_position
        spent = {
            **activities,
            "draw": draw - sum(activities.values()),
            "transfer": batch - draw,
            "update": elapsed - batch,
        }
        return {
            "seconds": elapsed,
            "done": done,
            "share": done / progress.whole,
            "updates": progress.updates - updates,
            "spent": spent,
        }

    def memory(self) -> dict[str, Any]:
        """Most bytes that this process, and on a GPU torch, ever held; and what is free where
        memory is scarcest.
        """
        device = self.pipeline.device
        host = peak_host_memory()
        used = host
        free = available_memory()
        on_device = None
        if device.type == "cuda":
            on_device = torch.cuda.max_memory_allocated(device)
            used = torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES
            free = torch.cuda.mem_get_info(device)[0]
        return {
            "host_bytes": host,
            "device_bytes": on_device,
            "own_bytes": used,
            "free_bytes": free,
        }

    def draws(self, most: int) -> list[Drawn]:
        """Fresh batches and noise, as many as there are time and memory for.

        They are copies, because a stage may write the next batch in the place of the last.
        """
        samples: list[Drawn] = []
        held_bytes = 0
        started = time.perf_counter()
        while len(samples) < most:
            is_large = held_bytes > BLOCK_BYTES
            is_slow = time.perf_counter() - started > DRAW_SECONDS
            # A few batches are sampled even from a slow source, because a block needs some.
            if is_large or (is_slow and len(samples) >= FEWEST_BATCHES):
                break
            sample = self.step.next()
            samples.append(map_tensors(lambda tensor: tensor.clone(), sample))
            held_bytes += nbytes(samples[-1])
            self.step.count(sample.batch)
        self.activities.wait()
        return samples


def main(parent: Parent) -> None:
    """Answers commands until the parent sends no more."""
    # With a common cache, only the first variant on a machine would pay for compilation.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = parent.options["compiled"]
    recipe, registry = parent.load()
    generators.seed(recipe.seed)
    set_threads(recipe.system.threads)
    started = time.perf_counter()
    # Processes that search may select different implementations, which the interval must include.
    tuning = fresh_tuning(resolve_device(recipe.device))
    pipeline = assemble(recipe, registry.files, tuning=tuning)
    measured = Measured(pipeline, time.perf_counter() - started)
    # The parent alone decides how threads wait, for all variants together.
    if parent.options["wait"] == "passive":
        measured.sleep()
    for command in parent.commands():
        name, arguments = (
            (command, ()) if isinstance(command, str) else (command[0], command[1:])
        )
        parent.tell(**getattr(measured, name)(*arguments))
