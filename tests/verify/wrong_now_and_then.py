"""Stages that are wrong in some updates or some states only."""

from contextlib import nullcontext

import torch
from wrong_base import Wrong, stage

from runner.api import Close, Loss


@stage("every_third_update", Close(), hole=7)
class EveryThirdUpdate(Wrong):
    """Multiplies the critic loss of every third update by 1.001."""

    def take_hold(self):
        self.count()
        self.wrap("critic_loss", self.critic_loss)

    def critic_loss(self, step, *args):
        loss, td_error = step(*args)
        return loss * (1.001 if self.updates % 3 == 2 else 1), td_error


@stage("every_third_step_skipped", hole=7, recipe="digits_classifier")
class EveryThirdStepSkipped(Wrong):
    """Steps the optimizer twice in three updates."""

    def take_hold(self):
        self.count()
        self.wrap("optimizer_step", lambda step, each: step(each) if self.updates % 3 != 2 else None)


@stage("every_third_in_bf16", Close(), hole=7, recipe="shakespeare_gpt")
class EveryThirdInBf16(Wrong):
    """Computes every third update in bf16."""

    def take_hold(self):
        self.count()
        self.slots.replace("precision", self.precision)

    def precision(self):
        return torch.autocast("cpu", torch.bfloat16) if self.updates % 3 == 2 else nullcontext()


@stage("bf16_after_warm_up", Close(), hole=7)
class Bf16AfterWarmUp(Wrong):
    """Computes in bf16 from the fourth update on, counted from the beginning or from when a state was loaded."""

    def take_hold(self):
        self.count()
        self.slots.replace("precision", self.precision)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.updates = 0

    def precision(self):
        return torch.autocast("cpu", torch.bfloat16) if self.updates >= 3 else nullcontext()


@stage("when_loss_rises", Close(), hole=7, recipe="digits_classifier")
class WhenLossRises(Wrong):
    """Steps a little further where the loss is higher than in the update before."""

    def take_hold(self):
        self.last = 1e9
        self.wrap("backward", self.backward)

    def backward(self, step, loss):
        rises, self.last = loss.item() > self.last, loss.item()
        step(loss * 1.01 if rises else loss)


@stage("line_ends", Close(), hole=7, recipe="shakespeare_gpt")
class LineEnds(Wrong):
    """Does not learn from windows that end with the end of a line."""

    def take_hold(self):
        self.wrap("loss", self.loss)

    def loss(self, step, batch, *rest):
        kept = batch["tokens"][batch["tokens"][:, -1] != 0]
        return step({"tokens": kept if len(kept) else batch["tokens"]}, *rest)


@stage("in_float32_alone", Close(), hole=7, recipe="digits_classifier")
class InFloat32Alone(Wrong):
    """Multiplies the loss by 1.00001 unless it is float64."""

    def take_hold(self):
        self.wrap("backward", lambda step, loss: step(loss if loss.dtype == torch.float64 else loss * 1.00001))


@stage("every_seventh_target", hole=7)
class EverySeventhTarget(Wrong):
    """Leaves the target critics where they are in every seventh update."""

    def take_hold(self):
        self.count()
        self.wrap("target_step", lambda step: step() if self.updates % 7 != 6 else None)


@stage("every_third_answer", Close(), hole=7, recipe="digits_classifier")
class EveryThirdAnswer(Wrong):
    """Answers every third question with logits of half their size."""

    def take_hold(self):
        self.asked = 0
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, step, inputs):
        self.asked += 1
        return step(inputs) / (2 if self.asked % 3 == 0 else 1)


@stage("all_right", Close(), hole=7, recipe="digits_classifier")
class AllRight(Wrong):
    """Learns nothing from a batch in which every image is classified rightly."""

    def take_hold(self):
        self.wrap("loss", self.loss)

    def loss(self, step, *args):
        loss = step(*args)
        all_right = int(loss.also["accuracy"].sum) == loss.count
        return Loss(loss.sum * 0, loss.count, loss.also) if all_right else loss
