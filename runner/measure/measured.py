"""The child process in which one variant lives while it is measured; between commands it computes
nothing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import torch

from runner.child.protocol import Parent
from runner.compare.warm_up import warm_up
from runner.measure import compared
from runner.system import generators
from runner.system.contention import ContentionMeter
from runner.system.hardware import available_memory, peak_host_memory
from runner.system.openmp import WaitControl
from runner.system.processor import set_threads
from runner.system.stopwatch import Stopwatch
from runner.system.tree import map_tensors, nbytes
from runner.train.assemble import Assembly, assemble, resolve_device
from runner.train.metrics import Activities
from runner.train.roofline import count_work
from runner.train.step import Drawn, Step
from runner.train.tuning import fresh_tuning

# Approximate duration of a block of updates.
BLOCK_SECONDS = 0.25
TRAIN_SECONDS = 0.5
# Approximate GPU memory of every process in addition to torch's.
CONTEXT_BYTES = 2**29
# Drawing the batches of a block takes about no longer.
DRAW_SECONDS = 1.0
# And they take about no more memory.
BLOCK_BYTES = 2**30
# Of a block, however long it takes to draw them, if it has as many updates.
FEWEST_BATCHES = 8
# Updates in a block if they are slow.
FEW = 4


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
        for name in ("draw", "next_batch", *pipeline.source.activities):
            self.activities.time(pipeline.slots, name)
        # Updates in a block.
        self.count = 1

    def prepare(self) -> dict[str, Any]:
        """Counts, compiles and warms up; the first update, the warm-up and the steady state are
        three figures.
        """
        drawn: list[Drawn] = []

        def draw() -> None:
            drawn[:] = self.draws(1)

        warmth = warm_up(lambda: self.advance(drawn[0]), self.stopwatch, prepare=draw)
        self.count = max(1, round(BLOCK_SECONDS / warmth.steady_s))
        # The first time is slower here too.
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
        (drawn,) = self.draws(1)
        return count_work(self.step, drawn)

    def update(self) -> dict[str, Any]:
        """Seconds of one update in the mean over a block, scaled to the recipe's batch size.

        Every update has a new batch; sampling is not timed. The answer contains the load of other
        programs that this process measured meanwhile.
        """
        batches = self.draws(self.count)

        def block() -> None:
            for drawn in batches:
                self.advance(drawn)

        scale = self.pipeline.recipe.train.batch_size / self.pipeline.batch_size
        self.meter.read()
        seconds = self.stopwatch.seconds(block) / len(batches) * scale
        return {"seconds": seconds, **self.meter.read()._asdict()}

    def sleep(self) -> dict[str, Any]:
        """Makes threads sleep while they wait for each other, from the next command on."""
        self.waiting.sleep()
        return {}

    def spin(self) -> dict[str, Any]:
        """Makes threads spin while they wait for each other."""
        self.waiting.spin()
        return {}

    def advance(self, drawn: Drawn) -> None:
        """Makes an update as a training does: with its seed, and counted."""
        progress = self.pipeline.progress
        self.step.seed(progress.updates)
        self.step.update(drawn)
        progress.updates += 1

    def record(self) -> dict[str, Any]:
        """Batches with which all variants make the updates that are compared."""
        return {"batches": compared.record(self.step, few=self.count < FEW)}

    def make(self, recorded: bytes) -> dict[str, Any]:
        """Returns the results of updates with these batches, after everything that is timed."""
        return {"windows": compared.make(self.step, recorded)}

    def judge(self, made: bytes) -> dict[str, Any]:
        """Returns how a variant's updates differ from this baseline's."""
        return compared.judge(self.step, made, statistical=False)

    def judge_number(self, made: bytes) -> dict[str, Any]:
        """Compares only the number of updates, for a variant that promises neither bits nor
        algebra.
        """
        return compared.judge(self.step, made, statistical=True)

    def train(self) -> dict[str, Any]:
        """Trains with the training loop's step, and returns the time by activity;
        waits for a GPU at the end.

        ``draw`` is the time in the source without its separate activities
        (``collect``), ``transfer`` the remaining time to get a batch onto the
        device, ``update`` the remainder of a step.
        """
        progress = self.pipeline.progress
        begun = progress.position
        updates = progress.updates
        self.activities.read()
        started = time.perf_counter()
        while (
            time.perf_counter() - started < TRAIN_SECONDS or progress.updates == updates
        ):
            position = progress.position
            while progress.position == position:
                self.step()
        elapsed, seconds = self.activities.read()
        apart = {name: seconds[name] for name in self.pipeline.source.activities}
        draw = seconds["draw"]
        batch = seconds["next_batch"]
        done = progress.position - begun
        spent = {
            **apart,
            "draw": draw - sum(apart.values()),
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
        own = host
        free = available_memory()
        on_device = None
        if device.type == "cuda":
            on_device = torch.cuda.max_memory_allocated(device)
            own = torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES
            free = torch.cuda.mem_get_info(device)[0]
        return {
            "host_bytes": host,
            "device_bytes": on_device,
            "own_bytes": own,
            "free_bytes": free,
        }

    def draws(self, most: int) -> list[Drawn]:
        """Fresh batches and noise, as many as there are time and memory for.

        They are copies, because a stage may write the next batch in the place of the last.
        """
        found: list[Drawn] = []
        held = 0
        started = time.perf_counter()
        while len(found) < most:
            is_enough = len(found) >= FEWEST_BATCHES or held > BLOCK_BYTES
            if (
                found
                and is_enough
                and (time.perf_counter() - started > DRAW_SECONDS or held > BLOCK_BYTES)
            ):
                break
            drawn = self.step.next()
            found.append(map_tensors(lambda tensor: tensor.clone(), drawn))
            held += nbytes(found[-1])
            self.step.count(drawn.batch)
        self.activities.wait()
        return found


def main(parent: Parent) -> None:
    """Answers commands until the parent sends no more."""
    # Compiled code is stored per variant, or compilation would be measured only once per machine.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = parent.options["compiled"]
    recipe, registry = parent.load()
    generators.seed(recipe.seed)
    set_threads(recipe.system.threads)
    begun = time.perf_counter()
    # Processes that search may select different implementations, which the interval must include.
    tuning = fresh_tuning(resolve_device(recipe.device))
    pipeline = assemble(recipe, registry.files, tuning=tuning)
    measured = Measured(pipeline, time.perf_counter() - begun)
    # The parent alone decides how threads wait, for all variants together.
    if parent.options["wait"] == "passive":
        measured.sleep()
    for command in parent.commands():
        name, arguments = (
            (command, ()) if isinstance(command, str) else (command[0], command[1:])
        )
        parent.tell(**getattr(measured, name)(*arguments))
