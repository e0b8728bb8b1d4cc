"""The child process in which one variant lives while it is measured; between commands it computes
nothing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runner.ablation import compared_trainings
from runner.child.protocol import Parent
from runner.distributed.membership import connected
from runner.distributed.traffic import computed_traffic, received_bytes
from runner.proof.subject import Subject
from runner.proof.timekeeping import LEAST_DEFERRED, deferred_seconds
from runner.proof.warm_up import warm_up
from runner.system import generators
from runner.system.contention import ContentionMeter
from runner.system.hardware import peak_host_memory
from runner.system.openmp import WaitControl
from runner.system.processor import set_threads
from runner.system.stopwatch import Stopwatch
from runner.system.tensor_trees import map_tensors, nbytes
from runner.training.device_memory import free_memory, process_memory
from runner.training.metrics import Activities
from runner.training.pipeline import Assembly, assemble, resolve_device
from runner.training.roofline import count_work
from runner.training.step import Drawn, Step
from runner.training.tuning import fresh_tuning

if TYPE_CHECKING:
    from runner.distributed.process_group import ProcessGroup
    from runner.recipe.recipe import Recipe

BLOCK_SECONDS = 0.25
"""Approximate duration of a block of updates."""
TRAIN_SECONDS = 0.5
DRAW_SECONDS = 1.0
"""Approximate limit on the time to sample the batches of a block."""
BLOCK_BYTES = 2**30
"""Approximate limit on the memory of these batches."""
FEWEST_BATCHES = 8
"""Batches of a block that are sampled even if it takes longer."""
FEW = 4
"""Updates of a block below which updates count as slow."""
TRAFFIC_UPDATES = 4
TRAFFIC_REPETITIONS = 3
"""Times that the bytes of updates are counted; other programs can only add to them."""


class Measured:
    """A variant after assembly.

    Of several processes, all answer the same commands, and make the same number of updates: the
    first one decides it.
    """

    def __init__(
        self,
        pipeline: Assembly,
        building_s: float = 0.0,
        group: ProcessGroup | None = None,
    ) -> None:
        self.group = group
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

        warmth = warm_up(
            lambda: self.advance(batches[0]),
            self.stopwatch,
            prepare=draw,
            decide=self.decided,
        )
        self.count = self.decided(max(1, round(BLOCK_SECONDS / warmth.steady_s)))
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
        work = count_work(self.step, sample)
        if self.group is None:
            return work
        parts = self.group.gather(work)
        # One CPU does the work of all processes, and each GPU that of its own.
        if self.pipeline.device.type != "cpu":
            least = work["least"] and [value // len(parts) for value in work["least"]]
            return {**work, "least": least}
        sums = {
            name: sum(part[name] for part in parts)
            for name in ("flop", "optimizer_bytes")
        }
        return {**work, **sums}

    def traffic(self) -> dict[str, Any]:
        """Returns the bytes that all processes together send for an update: ``computed`` from its
        operations, by operation; and ``counted`` by the loopback interface, None without one.
        """
        group = self.group
        assert group is not None
        (sample,) = self.draws(1)
        # Compiled code hides its operations.
        with (
            torch.compiler.set_stance("force_eager"),
            computed_traffic(group.count) as computed,
        ):
            self.advance(sample)
        counted = []
        for _ in range(TRAFFIC_REPETITIONS):
            samples = self.draws(TRAFFIC_UPDATES)
            group.gather(None)
            before = received_bytes()
            for sample in samples:
                self.advance(sample)
            group.gather(None)
            after = received_bytes()
            if before is not None and after is not None:
                counted.append((after - before) / len(samples))
        return {
            "computed": dict(computed.sent),
            "unknown": sorted(computed.unknown),
            "counted": min(counted, default=None),
        }

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

    def decided(self, value: Any) -> Any:
        """Returns the value of the first process."""
        return value if self.group is None else self.group.broadcast(value)

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
        # Several processes decide rarely, because a decision takes time.
        stride = 1 if self.group is None else self.count
        is_over = False
        while not is_over:
            for _ in range(stride):
                position = progress.position
                while progress.position == position:
                    self.step()
            # A slow training still needs at least one update.
            has_trained = progress.updates > updates
            is_late = time.perf_counter() - started >= TRAIN_SECONDS
            is_over = self.decided(is_late and has_trained)
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
        on_device = None
        if device.type == "cuda":
            on_device = torch.cuda.max_memory_allocated(device)
        process = {
            "host_bytes": host,
            "device_bytes": on_device,
            "own_bytes": process_memory(device),
            "free_bytes": free_memory(device),
        }
        if self.group is None:
            return process
        parts = self.group.gather(process)
        own_bytes = [int(part["own_bytes"] or 0) for part in parts]
        largest = parts[own_bytes.index(max(own_bytes))]
        # Processes on GPUs have a device each.
        shared = sum(own_bytes) if on_device is None else max(own_bytes)
        return {**largest, "own_bytes": shared}

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
            is_over = is_large or (is_slow and len(samples) >= FEWEST_BATCHES)
            if self.decided(is_over):
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
    with connected(parent.options["group"], recipe.device) as group:
        _answer(parent, recipe, registry.files, group)


def _answer(
    parent: Parent,
    recipe: Recipe,
    plugin_files: Sequence[Path],
    group: ProcessGroup | None,
) -> None:
    """Assembles the variant, and answers commands about it."""
    generators.seed(recipe.seed)
    set_threads(recipe.system.threads)
    started = time.perf_counter()
    # Processes that search may select different implementations, which the interval must include.
    tuning = fresh_tuning(resolve_device(recipe.device))
    pipeline = assemble(recipe, plugin_files, tuning=tuning, processes=group)
    measured = Measured(pipeline, time.perf_counter() - started, group)
    # The parent alone decides how threads wait, for all variants together.
    if parent.options["wait"] == "passive":
        measured.sleep()
    for command in parent.commands():
        name, arguments = (
            (command, ()) if isinstance(command, str) else (command[0], command[1:])
        )
        parent.tell(**getattr(measured, name)(*arguments))
