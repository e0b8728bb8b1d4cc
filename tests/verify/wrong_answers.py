"""Stages whose update is right, and which act, answer, evaluate or collect otherwise."""

import copy
from contextlib import nullcontext

import torch
from wrong_base import Wrong, stage

from runner.api import Close


@stage("mean_acts", Close(), hole=4)
class MeanActs(Wrong):
    """Explores with the mean action, without any noise."""

    def take_hold(self):
        self.learner.act = lambda observation, generator: self.learner.predict(observation)


@stage("stale_acts", Close(), hole=4)
class StaleActs(Wrong):
    """Explores with policies that it copies every fifty updates only."""

    def take_hold(self):
        self.old = copy.deepcopy(self.learner.actors)
        self.count()
        self.wrap_method(self.learner, "act", self.act)

    def act(self, step, *args):
        if self.updates % 50 == 0:
            self.old = copy.deepcopy(self.learner.actors)
        own, self.learner.actors = self.learner.actors, self.old
        try:
            return step(*args)
        finally:
            self.learner.actors = own


@stage("lost_remainder", Close(), hole=4)
class LostRemainder(Wrong):
    """Answers in parts of 64 and forgets the remainder, which a batch of another size has."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, step, inputs):
        answer, whole = step(inputs), len(inputs) // 64 * 64
        return torch.cat([answer[:whole], torch.zeros_like(answer[whole:])])


@stage("alone", hole=4)
class Alone(Wrong):
    """Answers a single observation as if it were the next agent's."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", lambda step, x: step(x) if len(x) > 1 else step(x.flip(1)))


@stage("half_evaluated", hole=4, recipe="shakespeare_gpt")
class HalfEvaluated(Wrong):
    """Evaluates every second held-out batch."""

    def take_hold(self):
        self.wrap_method(self.source, "held_out_batches", lambda step: list(step())[::2])


@stage("evaluated_on_training_data", hole=4, recipe="digits_classifier")
class EvaluatedOnTrainingData(Wrong):
    """Evaluates on what was trained on."""

    def take_hold(self):
        self.source.held_out = self.source.train


@stage("evaluated_in_bf16", Close(), hole=4, recipe="digits_classifier")
class EvaluatedInBf16(Wrong):
    """Computes the loss in bf16 in evaluation mode."""

    def take_hold(self):
        self.wrap("loss", self.loss)

    def loss(self, step, *args):
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.learner.module.training):
            return step(*args)


@stage("unaveraged", hole=4, recipe="digits_classifier", sets=("train.ema=0.9",))
class Unaveraged(Wrong):
    """Evaluates the parameters themselves where their averages are due."""

    def take_hold(self):
        self.wrap_method(self.learner, "start_averages", self.started)

    def started(self, step):
        step()
        self.learner.averages.applied = lambda: nullcontext()


@stage("short_windows", Close(), hole=4, recipe="shakespeare_gpt")
class ShortWindows(Wrong):
    """Reads windows from behind that are shorter than those of the training."""

    def take_hold(self):
        self.wrap("forward", lambda step, tokens: step(tokens if tokens.shape[1] == 16 else tokens.flip(1)))


@stage("halved_rewards", Close(), hole=4)
class HalvedRewards(Wrong):
    """Stores half the reward."""

    def take_hold(self):
        store = lambda step, batch: step(batch | {"reward": batch["reward"] / 2})  # noqa: E731
        self.wrap_method(self.source._replay, "store", store)


@stage("random_steps", Close(), hole=4)
class RandomSteps(Wrong):
    """Collects every second step at random."""

    def take_hold(self):
        self.steps = 0
        self.wrap("collect", self.collect)

    def collect(self, step, act):
        self.steps += 1
        step(act if self.steps % 2 else None)


@stage("answers_in_training_mode", Close(), hole=4, recipe="shakespeare_gpt", sets=("model.dropout=0.1",))
class AnswersInTrainingMode(Wrong):
    """Leaves dropout on when it answers, and not when its loss is evaluated."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", lambda step, inputs: self.learner.forward(inputs).detach())
