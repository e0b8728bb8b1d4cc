"""Callbacks for tests: ``--plugin`` takes this file."""

from typing import ClassVar

import torch

from runner.api import Callback, CallbackConfig, EndTraining


class CounterConfig(CallbackConfig):
    """Counts its calls, and logs the count."""

    kind: ClassVar[str] = "counter"
    implementation = "Counter"

    every: int = 2
    """Updates between two logged values."""
    ends_in: str = ""
    """The method that ends the training."""
    after: int = 0
    """Updates before which it does not end."""


class Counter(Callback):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.counts = {}
        self.calls = []

    def on_start(self, progress, metrics, learner):
        return self.count("on_start", progress, metrics, learner)

    def after_update(self, progress, metrics, learner):
        logged = self.count("after_update", progress, metrics, learner)
        return logged if progress.updates % self.config.every == 0 else None

    def after_evaluation(self, progress, metrics, learner):
        self.context.log_text("metrics", ", ".join(sorted(metrics)))
        return self.count("after_evaluation", progress, metrics, learner)

    def after_checkpoint(self, progress, metrics, learner):
        return self.count("after_checkpoint", progress, metrics, learner)

    def on_end(self, progress, metrics, learner):
        return self.count("on_end", progress, metrics, learner)

    def count(self, method, progress, metrics, learner):
        # Reading and random numbers change nothing.
        sum(parameter.detach().sum() for _, parameter in learner.named_parameters())
        torch.rand(5)
        self.calls.append((method, progress.updates, sorted(metrics)))
        self.counts[method] = self.counts.get(method, 0) + 1
        if method == self.config.ends_in and progress.updates >= self.config.after:
            raise EndTraining(f"enough in {method}")
        return {method: self.counts[method]}

    def state_dict(self):
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state):
        self.counts = dict(state["counts"])


class MeddlerConfig(CallbackConfig):
    """Changes something of the learner after an update."""

    kind: ClassVar[str] = "meddler"
    implementation = "Meddler"

    what: str = "in_place"
    """What it changes."""
    at: int = 1
    """The update after which it does."""


class Meddler(Callback):
    def after_update(self, progress, metrics, learner):
        if progress.updates == self.config.at:
            with torch.no_grad():
                getattr(self, self.config.what)(learner)

    def in_place(self, learner):
        self.weight(learner).add_(0.5)

    def data(self, learner):
        self.weight(learner).data.mul_(1.5)

    def other_data(self, learner):
        weight = self.weight(learner)
        weight.data = weight.data + 1

    def state(self, learner):
        next(iter(learner.model.optimizer.state.values()))["exp_avg"].data.zero_()

    def rate(self, learner):
        learner.model.optimizer.param_groups[0]["lr"] *= 0.5

    def mode(self, learner):
        learner.module.eval()

    def switch(self, learner):
        self.weight(learner).requires_grad_(False)

    def average(self, learner):
        next(iter(learner.averages.values.values())).zero_()

    def predicting(self, learner):
        with learner.evaluating():
            learner.module(torch.zeros(1, 2, dtype=torch.long))

    def nothing(self, learner):
        pass

    @staticmethod
    def weight(learner):
        return learner.module[3].weight


class OddConfig(CallbackConfig):
    """Is written wrongly."""

    kind: ClassVar[str] = "odd"
    implementation = "Odd"

    returns: str = "list"
    """What its method returns."""


class Odd(Callback):
    def after_update(self, progress, metrics, learner):
        values = {"list": [1], "text": {"a": "b"}, "flag": {"a": True}, "name": {"": 1.0}}
        return values[self.config.returns]


class MisspeltConfig(CallbackConfig):
    """Has a method of a wrong name."""

    kind: ClassVar[str] = "misspelt"
    implementation = "Misspelt"


class Misspelt(Callback):
    def after_updates(self, progress, metrics, learner):
        pass


class NarrowConfig(CallbackConfig):
    """Has a method that takes too little."""

    kind: ClassVar[str] = "narrow"
    implementation = "Narrow"


class Narrow(Callback):
    def on_end(self, learner):
        pass


class IdleConfig(CallbackConfig):
    """Has no method."""

    kind: ClassVar[str] = "idle"
    implementation = "Idle"


class Idle(Callback):
    pass


class FailingConfig(CallbackConfig):
    """Raises an exception."""

    kind: ClassVar[str] = "failing"
    implementation = "Failing"


class Failing(Callback):
    def after_evaluation(self, progress, metrics, learner):
        return metrics["no such metric"]
