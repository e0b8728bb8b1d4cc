"""Stages that are right at first: in the first evaluation, batches and answers, and until they are resumed."""

from contextlib import nullcontext

import torch
from wrong_base import Wrong, stage

from runner.api import Close, map_tensors


@stage("remembered_evaluation", Close(), hole=4, recipe="digits_classifier")
class RememberedEvaluation(Wrong):
    """Evaluates once, and returns the same result afterwards."""

    def take_hold(self):
        self.found = None
        self.wrap_method(self.source, "evaluate", self.evaluate)

    def evaluate(self, step, learner):
        self.found = self.found or step(learner)
        return dict(self.found)


@stage("spent_by_evaluation", hole=4, recipe="digits_classifier")
class SpentByEvaluation(Wrong):
    """Skips the first update after an evaluation."""

    def take_hold(self):
        self.evaluated = False
        self.wrap_method(self.source, "evaluate", self.evaluate)
        self.wrap("optimizer_step", self.optimizer_step)

    def evaluate(self, step, learner):
        self.evaluated = True
        return step(learner)

    def optimizer_step(self, step, optimizer):
        skipped, self.evaluated = self.evaluated, False
        return None if skipped else step(optimizer)


@stage("in_parts_of_256", Close(), hole=4)
class InPartsOf256(Wrong):
    """Answers at most 256 observations, and repeats itself for the others."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, step, inputs):
        answer = step(inputs[:256])
        return answer[torch.arange(len(inputs)) % 256]


@stage("two_at_once", Close(), hole=4, recipe="shakespeare_gpt")
class TwoAtOnce(Wrong):
    """Gives the second of two texts the answer to the first."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, step, inputs):
        answer = step(inputs)
        return answer[[0, 0]] if len(answer) == 2 else answer


@stage("tired_of_answering", hole=4)
class TiredOfAnswering(Wrong):
    """Predicts with more caution after a hundred updates."""

    def take_hold(self):
        self.count()
        self.wrap_method(self.learner, "predict", lambda step, x: step(x) * (0.9 if self.updates > 100 else 1))


@stage("late_batches", Close(), hole=5, recipe="digits_classifier")
class LateBatches(Wrong):
    """Draws every second batch again from the thirtieth on."""

    def take_hold(self):
        self.drawn, self.kept = 0, None
        self.wrap("next_batch", self.next_batch)

    def next_batch(self, step, *args):
        self.drawn += 1
        if self.drawn < 30 or self.drawn % 2:
            self.kept = step(*args)
        return self.kept


@stage("narrow_late_draws", Close(), hole=5)
class NarrowLateDraws(Wrong):
    """Leaves out the older half of the transitions when there are more than 2,300."""

    def take_hold(self):
        self.wrap("next_batch", self.next_batch)

    def next_batch(self, step, *args):
        batch = step(*args)
        if len(self.source._replay) < 2300:
            return batch
        return map_tensors(lambda each: torch.cat([each[len(each) // 2 :]] * 2), batch)


@stage("shorter_training", Close(), hole=5, recipe="shakespeare_gpt")
class ShorterTraining(Wrong):
    """Calls the training shorter than it is, so that it ends early and the learning rate falls faster."""

    def take_hold(self):
        self.pipeline.progress.length = self.pipeline.progress.length * 9 // 10


@stage("begins_again", hole=5, recipe="digits_classifier")
class BeginsAgain(Wrong):
    """Draws the first epoch again when the training is resumed."""

    def take_hold(self):
        self.wrap_method(self.source, "load_state_dict", lambda step, state: None)


@stage("moments_not_resumed", Close(), hole=8)
class MomentsNotResumed(Wrong):
    """Starts with new moments of Adam when the training is resumed from a file."""

    def take_hold(self):
        self.wrap_method(self.learner, "load_state_dict", self.load)

    def load(self, step, state):
        step(state)
        for role in self.learner.roles.values():
            for optimizer in role.optimizers:
                optimizer.state.clear()


@stage("for_a_while", Close(), hole=9, recipe="shakespeare_gpt")
class ForAWhile(Wrong):
    """Multiplies gradients by 1.01 from the 41st update to the 45th."""

    def take_hold(self):
        self.count()
        self.wrap("backward", lambda step, loss: step(loss * (1.01 if 40 <= self.updates < 45 else 1)))


@stage("bf16_much_later", Close(), hole=9)
class Bf16MuchLater(Wrong):
    """Computes in bf16 from the 31st update on after a state was loaded."""

    def take_hold(self):
        self.count()
        self.slots.replace("precision", self.precision)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.updates = 0

    def precision(self):
        return torch.autocast("cpu", torch.bfloat16) if self.updates >= 30 else nullcontext()


@stage("bounded_in_float32", Close(), hole=7, recipe="digits_classifier")
class BoundedInFloat32(Wrong):
    """Bounds logits at five, but not in float64."""

    def take_hold(self):
        self.wrap("forward", lambda step, x: step(x) if x.dtype == torch.float64 else step(x).clamp(-5, 5))


@stage("flushed_in_float32", Close(), hole=7, recipe="shakespeare_gpt")
class FlushedInFloat32(Wrong):
    """Drops gradients below a millionth, but not in float64."""

    def take_hold(self):
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype == torch.float32:
                    parameter.grad[parameter.grad.abs() < 1e-6] = 0
        return step(optimizer)
