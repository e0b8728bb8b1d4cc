"""Stages that are wrong only where the first updates never come: bounds, ends, numbers that are none, full buffers."""

from dataclasses import replace

import torch
from wrong_base import Wrong, stage

from runner.api import Close, Loss


@stage("early_clamp", Close(), hole=6)
class EarlyClamp(Wrong):
    """Bounds the logarithm of the standard deviation at -5 where -20 is due."""

    def take_hold(self):
        self.wrap("actor_forward", self.actor_forward)

    def actor_forward(self, step, *args):
        mean, log_std = step(*args).chunk(2, -1)
        return torch.cat([mean, log_std.clamp(min=-5)], -1)


@stage("full_buffer", hole=6)
class FullBuffer(Wrong):
    """Stores nothing any more when the replay buffer is full."""

    def take_hold(self):
        self.wrap_method(self.source._replay, "store", self.store)

    def store(self, step, batch):
        replay = self.source._replay
        return step(batch) if len(replay) + len(batch["reward"]) <= replay.capacity else None


@stage("cut_off_is_over", hole=6)
class CutOffIsOver(Wrong):
    """Takes an episode that was cut off for one whose task has ended."""

    def take_hold(self):
        self.wrap_method(self.source._environment, "step", self.step)

    def step(self, step, action):
        found = step(action)
        return replace(found, terminated=found.terminated | found.truncated)


@stage("hidden_nan", hole=6, recipe="digits_classifier")
class HiddenNan(Wrong):
    """Replaces gradients that are not finite by zeros, so that divergence stays hidden."""

    def take_hold(self):
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.nan_to_num_()
        return step(optimizer)


@stage("skipped_spikes", hole=6, recipe="shakespeare_gpt")
class SkippedSpikes(Wrong):
    """Skips an update whose loss is twenty nats or more."""

    def take_hold(self):
        self.loss = None
        self.wrap("forward_backward", self.forward_backward)
        self.wrap("optimizer_step", lambda step, optimizer: step(optimizer) if self.loss < 20 else None)

    def forward_backward(self, step, *args):
        loss = step(*args)
        self.loss = loss.sum / loss.count
        return loss


@stage("nothing_in_the_end", hole=6, recipe="shakespeare_gpt")
class NothingInTheEnd(Wrong):
    """Learns nothing in the last tenth of the training."""

    def take_hold(self):
        self.fraction = 0.0
        self.wrap("update", self.update)
        self.wrap("optimizer_step", lambda step, optimizer: step(optimizer) if self.fraction < 0.9 else None)

    def update(self, step, batch, noise, progress):
        self.fraction = progress.fraction
        return step(batch, noise, progress)


@stage("weights_dropped", Close(), hole=6)
class WeightsDropped(Wrong):
    """Leaves out the importance weights in the second half of the training."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, batch, noise, progress):
        if progress.fraction > 0.5:
            batch = batch | {"weight": torch.ones_like(batch["weight"])}
        return step(batch, noise, progress)


@stage("last_batch_counts_whole", hole=6, recipe="digits_classifier")
class LastBatchCountsWhole(Wrong):
    """Divides by the recipe's batch size, which the last held-out batch does not have."""

    def take_hold(self):
        size = self.pipeline.batch_size
        self.wrap("loss", lambda step, *args: Loss((loss := step(*args)).sum, size, loss.also))


@stage("rare_symbol", Close(), hole=6, recipe="shakespeare_gpt")
class RareSymbol(Wrong):
    """Reads one of the rarest symbols as another."""

    def take_hold(self):
        counts = self.source.train.tokens.bincount()
        rare, other = (int(each) for each in counts.argsort()[:2])
        self.wrap("forward", lambda step, tokens: step(torch.where(tokens == rare, other, tokens)))


@stage("unclipped_explosions", hole=6, recipe="digits_classifier")
class UnclippedExplosions(Wrong):
    """Does not clip gradients whose norm is above a thousand."""

    def take_hold(self):
        self.wrap("clip", self.clip)

    def clip(self, step, parameters, max_norm):
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        return step(parameters, max_norm) if norm < 1000 else None


@stage("least_temperature", Close(), hole=6)
class LeastTemperature(Wrong):
    """Lets no temperature fall below a thousandth."""

    def take_hold(self):
        self.wrap("temperatures", lambda step, agents: step(agents).clamp(min=-6.9))
