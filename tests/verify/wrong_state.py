"""Stages that keep a part of the state elsewhere, under another name, or lose it."""

import copy

import torch
from wrong_base import Wrong, stage

from runner.api import Close


@stage("average_every_tenth", hole=8, recipe="digits_classifier", sets=("train.ema=0.9",))
class AverageEveryTenth(Wrong):
    """Moves the averaged parameters in every tenth update only, ten times as far."""

    def take_hold(self):
        self.often = self.learner.context.ema
        self.wrap("update", self.update)

    def update(self, step, *args):
        self.updates += 1
        self.learner.averages.decay = self.often**10 if self.updates % 10 == 0 else 1.0
        return step(*args)


@stage("renamed_average", Close(), hole=8, recipe="digits_classifier", sets=("train.ema=0.9",))
class RenamedAverage(Wrong):
    """Never moves the averaged parameters, and calls them otherwise."""

    def take_hold(self):
        self.wrap_method(self.learner, "start_averages", lambda step: None)
        shadow = {name: parameter.detach().clone() for name, parameter in self.learner.module.named_parameters()}
        self.wrap_method(self.learner, "complete_state", lambda step: {**step(), "shadow": shadow})


@stage("second_targets", Close(), hole=8)
class SecondTargets(Wrong):
    """Uses separate target critics, which it never moves, and moves the unused ones."""

    def take_hold(self):
        self.frozen = copy.deepcopy(self.learner.critics["target"])
        self.learner.critics["asked"] = self.frozen
        self.wrap("critic_forward", lambda step, which, *rest: step("asked" if which == "target" else which, *rest))


@stage("moments_left_out", hole=8, recipe="shakespeare_gpt")
class MomentsLeftOut(Wrong):
    """Leaves the optimizer's moments out of the state."""

    def take_hold(self):
        self.wrap_method(self.learner, "state_dict", self.state_of)

    def state_of(self, step):
        state = step()
        return state | {"optimizers": {name: each | {"state": {}} for name, each in state["optimizers"].items()}}


@stage("loads_parameters_alone", Close(), hole=8, recipe="digits_classifier")
class LoadsParametersAlone(Wrong):
    """Restores parameters and leaves the optimizer as it is."""

    def take_hold(self):
        self.wrap_method(self.learner, "load_state_dict", self.load)

    def load(self, step, state):
        for name, module in self.learner.modules().items():
            module.load_state_dict(state["modules"][name])


@stage("average_of_its_own", Close(), hole=8, recipe="shakespeare_gpt")
class AverageOfItsOwn(Wrong):
    """Measures held-out batches with separate averaged parameters that never move."""

    def take_hold(self):
        self.average = copy.deepcopy(self.learner.module)
        self.wrap_method(self.learner, "metrics", self.metrics)

    def metrics(self, step, batch):
        own, self.learner.module = self.learner.module, self.average
        try:
            return step(batch)
        finally:
            self.learner.module = own


@stage("moments_of_its_own", Close(), hole=8)
class MomentsOfItsOwn(Wrong):
    """Steps with a separate optimizer, whose second moments decay otherwise, and shows the unused one."""

    def take_hold(self):
        self.own = {}
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        if optimizer not in self.own:
            groups = [{"params": group["params"], "lr": group["lr"]} for group in optimizer.param_groups]
            self.own[optimizer] = torch.optim.Adam(groups, betas=(0.9, 0.99))
        self.own[optimizer].step()


@stage("warm_up_again", hole=8, recipe="shakespeare_gpt")
class WarmUpAgain(Wrong):
    """Halves the gradient after a state was loaded, because it has lost how far it was."""

    def take_hold(self):
        self.factor = 1.0
        self.wrap("backward", self.backward)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.factor = 0.5

    def backward(self, step, loss):
        step(loss * self.factor)
        self.factor = 1.0


@stage("residual_lost", Close(), hole=8, recipe="shakespeare_gpt")
class ResidualLost(Wrong):
    """Carries a hundredth of the gradient over to the next update, in a place that no state shows."""

    def take_hold(self):
        self.kept = {}
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                whole = parameter.grad + self.kept.get(parameter, 0)
                parameter.grad = whole * 0.99
                self.kept[parameter] = whole * 0.01
        return step(optimizer)
