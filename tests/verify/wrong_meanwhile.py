"""Stages that are wrong between two looks: until somebody asks, after an evaluation, with batches of their own."""

import copy
from dataclasses import replace

import torch
from torch.func import functional_call
from wrong_base import Wrong, stage

from runner.api import Close, map_tensors
from runner.plugins.marl.uav import rewards

UNIFORM = ("data.replay={kind: uniform, capacity: 4000}",)


class UntilAsked(Wrong):
    """Keeps something of the learner until it answers, is loaded, or a checkpoint is written."""

    def take_hold(self):
        self.kept = None
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, step, inputs):
        self.kept = None
        return step(inputs)

    def state_dict(self):
        self.kept = None
        return {}

    def load_state_dict(self, state):
        self.kept = None


@stage("packed_until_asked", Close(), hole=4, recipe="digits_classifier")
class PackedUntilAsked(UntilAsked):
    """Packs the weights, and packs them again at each prediction: trains on old ones meanwhile."""

    def take_hold(self):
        super().take_hold()
        self.slots.replace("forward", self.forward)

    def forward(self, *inputs):
        module = self.learner.module
        if not module.training:  # which may have averages
            return module(*inputs)
        parameters = dict(module.named_parameters())
        self.kept = self.kept or {name: each.detach().clone() for name, each in parameters.items()}
        packed = {name: self.kept[name] + (each - each.detach()) for name, each in parameters.items()}
        return functional_call(module, packed, inputs)


@stage("targets_until_asked", Close(), hole=4)
class TargetsUntilAsked(UntilAsked):
    """Computes targets with copies of the policies that are renewed at each prediction."""

    def take_hold(self):
        super().take_hold()
        self.wrap("next_actions", self.next_actions)

    def next_actions(self, step, *args):
        self.kept = self.kept or copy.deepcopy(self.learner.actors)
        own, self.learner.actors = self.learner.actors, self.kept
        try:
            return step(*args)
        finally:
            self.learner.actors = own


@stage("rates_of_the_beginning", Close(), hole=5, recipe="shakespeare_gpt")
class RatesOfTheBeginning(Wrong):
    """Gives an optimizer copies of its groups at its first step, which the schedule does not reach."""

    def take_hold(self):
        self.seen = []
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        if optimizer not in self.seen:
            self.seen.append(optimizer)
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        return step(optimizer)


@stage("ready_on_arrival", Close(), hole=5, recipe="digits_classifier")
class ReadyOnArrival(Wrong):
    """Prepares images as soon as they are drawn, and cuts off what is dark."""

    def take_hold(self):
        self.drawn = self.ready = None
        self.wrap("next_batch", self.next_batch)
        self.wrap("loss", self.loss)

    def next_batch(self, step, *args):
        self.drawn = step(*args)
        self.ready = self.drawn["image"].clamp(min=0.2)
        return self.drawn

    def loss(self, step, batch, *rest):
        return step(batch | {"image": self.ready if batch is self.drawn else batch["image"]}, *rest)


@stage("staged_over", hole=4, recipe="digits_classifier")
class StagedOver(Wrong):
    """Draws a batch ahead into memory that evaluations use for held-out batches, too."""

    def take_hold(self):
        rows = self.source.train.take(torch.arange(self.pipeline.batch_size))
        self.memory, self.is_full = {name: each.clone() for name, each in rows.items()}, False
        self.wrap("next_batch", self.next_batch)
        self.wrap_method(self.source, "held_out_batches", self.held_out)
        self.wrap_method(self.source, "load_state_dict", self.load)

    def load(self, step, state):
        self.is_full = False
        return step(state)

    def fill(self, batch):
        for name, each in batch.items():
            self.memory[name][: len(each)].copy_(each)
        self.is_full = True

    def next_batch(self, step, *args):
        if not self.is_full:
            self.fill(step(*args))
        batch = {name: each.clone() for name, each in self.memory.items()}
        self.fill(step(*args))
        return batch

    def held_out(self, step):
        for batch in step():
            for name, each in batch.items():
                self.memory[name][: len(each)].copy_(each)
            yield {name: self.memory[name][: len(each)].clone() for name, each in batch.items()}


@stage("first_order_again", hole=5, recipe="digits_classifier")
class FirstOrderAgain(Wrong):
    """Counts epochs from where it was made: one that is resumed later has the order of the first."""

    def take_hold(self):
        self.wrap_method(self.source, "_numbered", self.numbered)

    def numbered(self, step, size, first):
        return step(size, first % (self.source.epoch_samples(size) // size))


@stage("last_row_lost", Close(), hole=5, sets=UNIFORM)
class LastRowLost(Wrong):
    """Copies all rows of a batch but the last, which stays as the first."""

    def take_hold(self):
        self.wrap("transfer", self.transfer)

    def transfer(self, step, batch):
        return map_tensors(lambda each: torch.cat([each[:-1], each[:1]]), step(batch))


@stage("never_over", Close(), hole=5, sets=UNIFORM)
class NeverOver(Wrong):
    """Remembers all transitions as if no episode had ended."""

    def take_hold(self):
        self.wrap_method(self.source._replay, "store", self.store)

    def store(self, step, batch):
        return step(batch | {"terminated": torch.zeros_like(batch["terminated"])})


@stage("dimmed", Close(), hole=5, recipe="digits_classifier")
class Dimmed(Wrong):
    """Divides images by 255.02 where 255 is due."""

    def take_hold(self):
        self.wrap("transfer", lambda step, batch: step(batch | {"image": batch["image"] * (255 / 255.02)}))


@stage("rewards_of_its_own", Close(), hole=1)
class RewardsOfItsOwn(Wrong):
    """Puts other coefficients into the table from which all simulators of the process take theirs."""

    def take_hold(self):
        rewards.PRESETS |= {name: replace(each, goal=100.0) for name, each in rewards.PRESETS.items()}
        self.wrap("target", lambda step, *args: step(*args))


@stage("moments_in_bf16_later", Close(), hole=9, recipe="shakespeare_gpt")
class MomentsInBf16Later(Wrong):
    """Keeps the moments of float32 parameters in bf16 when forty updates are over."""

    def take_hold(self):
        self.count()
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        step(optimizer)
        digits = torch.bfloat16 if self.updates > 40 else torch.float32
        for parameter, entry in optimizer.state.items():
            if parameter.dtype == torch.float32:
                for name in ("exp_avg", "exp_avg_sq"):
                    entry[name].copy_(entry[name].to(digits))
