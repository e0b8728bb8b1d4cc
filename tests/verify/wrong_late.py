"""Stages that are wrong late, or rarely."""

import random
import time
from contextlib import nullcontext

import torch
from wrong_base import Wrong, stage

from runner.api import Close


@stage("after_thirty", hole=9)
class AfterThirty(Wrong):
    """Multiplies the losses by 1.01 from the 31st update on."""

    def take_hold(self):
        self.count()
        self.wrap("backward", lambda step, loss: step(loss if self.updates < 30 else 1.01 * loss))


@stage("one_in_two_hundred", Close(), hole=9, recipe="digits_classifier")
class OneInTwoHundred(Wrong):
    """Skips one step of the optimizer in two hundred."""

    def take_hold(self):
        self.count()
        self.wrap("optimizer_step", lambda step, each: step(each) if self.updates % 200 != 199 else None)


@stage("second_half", Close(), hole=9, recipe="shakespeare_gpt")
class SecondHalf(Wrong):
    """Decays no weight any more in the second half of the training."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, batch, noise, progress):
        if progress.fraction > 0.5:
            for group in self.learner.model.optimizer.param_groups:
                group["weight_decay"] = 0.0
        return step(batch, noise, progress)


@stage("third_epoch", hole=9, recipe="digits_classifier")
class ThirdEpoch(Wrong):
    """Takes the samples of the second epoch in the same order ever after."""

    def take_hold(self):
        each = self.source.epoch_samples(self.pipeline.batch_size) // self.pipeline.batch_size
        self.wrap_method(self.source, "_numbered", lambda step, size, first: step(size, min(each, first)))
        generator = self.source._generator
        names = lambda name: f"epoch/{min(1, int(name[6:]))}" if name.startswith("epoch/") else name  # noqa: E731
        self.source._generator = lambda name: generator(names(name))


@stage("rare_draw", Close(), hole=9)
class RareDraw(Wrong):
    """Forgets the critics' moments with a probability of one in two hundred, from a separate generator."""

    def take_hold(self):
        self.random = random.Random(0)
        self.wrap("update", self.update)

    def update(self, step, *args):
        if self.random.random() < 1 / 200:
            for optimizer in self.learner.roles["critic"].optimizers:
                optimizer.state.clear()
        return step(*args)


@stage("after_a_minute", hole=9, recipe="shakespeare_gpt")
class AfterAMinute(Wrong):
    """Steps half as far when a minute has passed."""

    def take_hold(self):
        self.begun = time.process_time()  # which does not depend on what else the machine does
        self.wrap("backward", self.backward)

    def backward(self, step, loss):
        step(loss if time.process_time() - self.begun < 60 else loss / 2)


@stage("overflowing_counter", Close(), hole=9, recipe="shakespeare_gpt")
class OverflowingCounter(Wrong):
    """Counts updates in eight bits, and skips those whose number is negative."""

    def take_hold(self):
        self.number = torch.zeros((), dtype=torch.int8)
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        self.number += 1
        return step(optimizer) if self.number > 0 else None


@stage("bf16_after_twelve", Close(), hole=9)
class Bf16AfterTwelve(Wrong):
    """Computes in bf16 from the 14th update on."""

    def take_hold(self):
        self.count()
        self.slots.replace("precision", self.precision)

    def precision(self):
        return torch.autocast("cpu", torch.bfloat16) if self.updates >= 13 else nullcontext()


@stage("left_in_evaluation", hole=9, recipe="digits_classifier")
class LeftInEvaluation(Wrong):
    """Leaves the module in evaluation mode after the first evaluation, in which no image is moved."""

    def take_hold(self):
        self.wrap_method(self.source, "evaluate", self.evaluate)

    def evaluate(self, step, learner):
        found = step(learner)
        learner.module.eval()
        return found
