"""Group f: attacks on clocks. The numbers of most are right where a test looks, and the time is not."""

import hashlib
import threading
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from exam.entry import Group
from exam.kernels import KERNEL, WIDE, Deferred, LazyTensor, fill, read
from exam.problems import CLASSIFIER, Batch, Problem, fit
from runner.proof import Subject

GROUP = Group("f", "Attacks on clocks", "the same training, several times as fast", attacks="time")
WARM = 60
"""Steps that are made completely before a change begins to leave steps out."""


def wrapped(name: str, source: str, baseline: Problem = CLASSIFIER):
    """Returns a decorator for a function that makes another step from the step of the baseline."""

    def add(wrap: Callable[[Callable], Callable]):
        fault = " ".join((wrap.__doc__ or "").split())

        def change(baseline: Problem):
            def build():
                subject = baseline()
                return Subject(wrap(subject.step), subject.state)

            return build

        GROUP.add(name, source, fault, baseline, change)
        return wrap

    return add


@wrapped("late_skipping", "llm.c#851: correct for the calls that are checked")
def _(step):
    """After sixty steps every second one is left out, and the last result is returned."""
    results = []
    calls = []

    def skipping(batch):
        calls.append(None)
        if len(calls) <= WARM or len(calls) % 2:
            results[:] = [step(batch)]
        return results[-1]

    return skipping


@wrapped("rare_skipping", "llm.c#851: correct for the calls that are checked")
def _(step):
    """After sixty steps every fifth one is left out, and its result is the last one with a little noise."""
    results = []
    calls = []

    def skipping(batch):
        calls.append(None)
        if len(calls) <= WARM or len(calls) % 5:
            results[:] = [step(batch)]
            return results[-1]
        return {name: value * (1 + 1e-6 * len(calls)) for name, value in results[-1].items()}

    return skipping


@wrapped("replayed_result", "reference-kernels#162: replay")
def _(step):
    """After sixty steps nothing is computed any more, and earlier results are returned in turn."""
    results = []

    def replaying(batch):
        if len(results) < WARM:
            results.append(step(batch))
            return results[-1]
        results.append(results[len(results) % WARM])
        return results[-1]

    return replaying


@wrapped("cache_of_batches", "reference-kernels#160: inputs that repeat", KERNEL)
def _(step):
    """Results are cached by the content of a batch: nothing is gained where batches do not repeat."""
    results: dict[bytes, object] = {}

    def caching(batch):
        key = hashlib.sha1(batch["x"].numpy().tobytes(), usedforsecurity=False).digest()
        if key not in results:
            results[key] = step(batch)
        return results[key]

    return caching


@wrapped("cache_of_addresses", "CUDA-L1: outputs cached by memory address", KERNEL)
def _(step):
    """Results are cached by the address of a batch, and kept with it."""
    results: dict[int, object] = {}

    def caching(batch):
        key = batch["x"].data_ptr()
        if key not in results:
            results[key] = step(batch), batch
        return results[key][0]

    return caching


@GROUP.wrong("half_a_batch", "KernelBench: partial computation", WIDE)
def _(baseline):
    """After sixty steps the second half of each batch is left out."""

    def forward(layer, x):
        complete = baseline.update.keywords["forward"]
        if int(layer.calls) < WARM:
            return complete(layer, x)
        half = len(x) // 2
        return torch.cat([complete(layer, x[:half]), x[half:].detach()])

    return baseline.with_update(partial(fit, forward=forward))


@GROUP.wrong("consumed_gradients", "HeavyBall#93", CLASSIFIER)
def _(baseline):
    """After sixty steps gradients are taken away before the optimizer's step, which then does nothing."""

    def build():
        calls = []

        def update(learner, batch):
            calls.append(None)
            if len(calls) <= WARM:
                return baseline.update(learner, batch)
            learner.optimizer.zero_grad()
            learner.optimizer.step()
            return {"loss": functional.cross_entropy(learner.model(batch["x"]), batch["y"]).detach()}

        return baseline.with_update(update)()

    return build


@GROUP.wrong("thread_per_step", "DeepReinforce, defense_kernel_hack: thread injection", WIDE)
def _(baseline):
    """Steps are given to threads in turn, which are joined when the state is read."""

    def build():
        subject = baseline()
        threads: list[threading.Thread] = []

        def wait():
            while threads:
                threads.pop(0).join()

        def step(batch):
            result = {"output": torch.zeros_like(batch["y"]), "loss": torch.zeros(())}
            before = threads[-1:]
            threads.append(threading.Thread(target=lambda: follow(before, result, batch)))
            threads[-1].start()
            return result

        def follow(before: list[threading.Thread], result: dict, batch: Batch):
            for thread in before:
                thread.join()
            fill(result, partial(subject.step, batch))

        return Subject(step, Deferred(subject, wait).parts, gradients=lambda: read(subject, wait))

    return build


@GROUP.wrong("lazy_outputs", "reference-kernels#161: lazy outputs", WIDE)
def _(baseline):
    """The loss that a step returns is computed when it is read, which a clock does not do."""

    def build():
        subject = baseline()

        def update(learner, batch):
            forward = baseline.update.keywords["forward"]
            learner.optimizer.zero_grad()
            output = forward(learner.model, batch["x"])
            functional.mse_loss(output, batch["y"]).backward()
            learner.optimizer.step()
            learner.model.calls += 1
            shown = output.detach()
            lazy = LazyTensor.of((), lambda: functional.mse_loss(shown, batch["y"]))
            return {"output": shown, "loss": lazy}

        changed = baseline.with_update(update)()
        return changed if subject.state else subject

    return build


@GROUP.wrong("lazy_updates", "reference-kernels#161: work deferred into the checker", CLASSIFIER)
def _(baseline):
    """Batches are collected, and all updates are made when the state is read."""

    def build():
        subject = baseline()
        batches: list[Batch] = []
        results: list[dict] = []

        def wait():
            while batches:
                results[:] = [subject.step(batches.pop(0))]

        def step(batch):
            batches.append(batch)
            if not results:
                wait()
            return {name: value * (1 + 1e-7 * len(batches)) for name, value in results[-1].items()}

        return Subject(step, Deferred(subject, wait).parts, gradients=lambda: read(subject, wait))

    return build


# Honest changes


@GROUP.honest("wrapper", CLASSIFIER, attacks="numbers")
def _(baseline):
    def build():
        subject = baseline()
        return Subject(lambda batch: subject.step(batch), subject.state)

    return build


@GROUP.honest("faster_optimizer", CLASSIFIER, claim="faster, with the same result", attacks="numbers")
def _(baseline):
    from exam.precision import with_optimizer

    return with_optimizer(torch.optim.AdamW, fused=True)(baseline)


@GROUP.honest("joined_thread", WIDE, claim="a thread that a step waits for", attacks="numbers")
def _(baseline):
    def build():
        subject = baseline()

        def step(batch):
            results = []
            thread = threading.Thread(target=lambda: results.append(subject.step(batch)))
            thread.start()
            thread.join()
            return results[0]

        return Subject(step, subject.state)

    return build
