"""Stages of multi-agent SAC that are wrong in ways that are easy to overlook, for the gate to find out.

Every one still trains: nothing but the numbers shows what is wrong. The two named ``Honest...`` are not wrong.
"""

import copy

import torch

from runner.api import Close, Exact, Stage
from runner.plugins.stages.forward_cache import ForwardCache
from runner.plugins.stages.merged_critic_loss import MergedCriticLoss


class Wrong(Stage):
    """Promises the same bits."""

    phase = 1
    contract = Exact()

    def attach(self, pipeline):
        self.pipeline, self.slots, self.learner = pipeline, pipeline.slots, pipeline.learner
        self.take_hold()

    def wrap(self, name, changed):
        """Replaces a slot by ``changed(step, *args)``."""
        self.slots.wrap(name, lambda step: lambda *args: changed(step, *args))


# --- caches -----------------------------------------------------------------------------------------------------------


class StaleCache(ForwardCache):
    """Never forgets the next actions: those of the first update serve for all."""

    kind = "stale_cache"

    def _forget(self):
        self.current.clear()


class CacheByBatch(Wrong):
    """Remembers next actions for as long as the batch is the same, whatever becomes of the policies."""

    kind = "cache_by_batch"

    def take_hold(self):
        self.seen = self.kept = None
        self.wrap("next_actions", self.next_actions)

    def next_actions(self, step, batch, noise):
        if self.seen is not batch["next_observation"]:
            self.seen, self.kept = batch["next_observation"], step(batch, noise)
        return self.kept


class PrivateCopy(Wrong):
    """Keeps a copy of the target critics that it refreshes when it updates them, but not when a state is loaded."""

    kind = "private_copy"

    def take_hold(self):
        self.critics = copy.deepcopy(self.learner.critics["target"])
        self.wrap("critic_forward", self.critic_forward)
        self.wrap("target_step", self.target_step)

    def critic_forward(self, step, which, *rest):
        own = self.learner.critics["target"]
        self.learner.critics["target"] = self.critics
        try:
            return step(which, *rest)
        finally:
            self.learner.critics["target"] = own

    def target_step(self, step):
        step()
        self.critics = copy.deepcopy(self.learner.critics["target"])


class DelayedTargets(Wrong):
    """Hands out the targets of the update before."""

    kind = "delayed_targets"

    def take_hold(self):
        self.last = None
        self.wrap("targets", self.targets)

    def targets(self, step, batch, noise):
        y = step(batch, noise)
        last, self.last = self.last, y
        return y if last is None else last


# --- loss scaling -----------------------------------------------------------------------------------------------------


class HonestScaler(Wrong):
    """Scales the loss by a power of two, unscales before clipping and updates the scale once: the same bits."""

    kind = "honest_scaler"
    growth_interval = 2000

    def take_hold(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=self.growth_interval)
        self.wrap("backward", lambda step, loss: step(self.scaler.scale(loss)))
        self.slots.replace("optimizer_step", self.scaler.step)
        self.wrap("update", self.update)
        self.replace_unscale()

    def replace_unscale(self):
        self.slots.replace("unscale", self.scaler.unscale_)

    def update(self, step, batch, noise):
        output = step(batch, noise)
        self.scaler.update()
        return output


class ClipBeforeUnscale(HonestScaler):
    """Leaves unscaling to the optimizer step, after gradients have been clipped at their scaled size."""

    kind = "clip_before_unscale"

    def replace_unscale(self):
        pass


class ScalerUpdatedBetween(HonestScaler):
    """Updates the scale once more, between a loss that it has scaled and the step that unscales its gradient."""

    kind = "scaler_updated_between"
    growth_interval = 1

    def take_hold(self):
        super().take_hold()
        self.wrap("temperature_gradients", self.temperature_gradients)

    def temperature_gradients(self, step, *args):
        step(*args)
        self.scaler.update()


class ScalerUpdatedTwice(HonestScaler):
    """Updates the scale twice at the end."""

    kind = "scaler_updated_twice"

    def update(self, step, batch, noise):
        output = super().update(step, batch, noise)
        self.scaler.update()
        return output


# --- gradients --------------------------------------------------------------------------------------------------------


class LeakyActorLoss(Wrong):
    """Lets the gradient of the actor loss flow into the critics' parameters."""

    kind = "leaky_actor_loss"

    def take_hold(self):
        self.wrap("actor_gradients", self.actor_gradients)

    def actor_gradients(self, step, *args):
        for parameter in self.learner.roles["critic"].leaves():
            parameter.requires_grad_(True)
        return step(*args)


class ScaledLoss(Wrong):
    """Multiplies the critic loss by 1.001."""

    kind = "scaled_loss"

    def take_hold(self):
        self.wrap("critic_loss", self.critic_loss)

    def critic_loss(self, step, *args):
        loss, td_error = step(*args)
        return 1.001 * loss, td_error


class ScaledBackward(Wrong):
    """Multiplies every loss by 1.001 on its way to the gradients, where clipping and Adam hide most of it."""

    kind = "scaled_backward"
    contract = Close()

    def take_hold(self):
        self.wrap("backward", lambda step, loss: step(1.001 * loss))


class DetachedTrunk(Wrong):
    """Detaches the actors' hidden layers, so that only their heads learn."""

    kind = "detached_trunk"

    def take_hold(self):
        for actor in self.learner.actors:
            actor.trunk.register_forward_hook(lambda module, inputs, output: output.detach())


class AccumulatedGradients(Wrong):
    """Forgets to zero the critics' gradients."""

    kind = "accumulated_gradients"

    def take_hold(self):
        self.learner.roles["critic"].zero_grad = lambda agents=None: None


class MeanOverAgents(MergedCriticLoss):
    """Takes the mean of the agents' critic losses where their sum is due."""

    kind = "mean_over_agents"

    def attach(self, pipeline):
        super().attach(pipeline)
        agents = pipeline.learner.agents
        pipeline.slots.wrap("backward", lambda step: lambda loss: step(loss / agents if self.merged else loss))
        self.merged = False

    def critic_step(self, batch, y):
        self.merged = True
        try:
            return super().critic_step(batch, y)
        finally:
            self.merged = False


class ForgetfulOptimizer(Wrong):
    """Loses the optimizers' moments after every update."""

    kind = "forgetful_optimizer"

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, *args):
        output = step(*args)
        for optimizer in self.learner.roles["actor"].optimizers:
            optimizer.state.clear()
        return output


# --- the algorithm ----------------------------------------------------------------------------------------------------


class NoiseDrawnTwice(Wrong):
    """Draws the noise of the update itself, although it is handed in."""

    kind = "noise_drawn_twice"

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, batch, noise):
        size = len(batch["weight"])
        return step(batch, self.learner.noise(size, self.learner.context.generator("noise")))


class EarlyTargetStep(Wrong):
    """Moves the target critics before the critics have learnt, not after."""

    kind = "early_target_step"

    def take_hold(self):
        move = self.slots.target_step
        self.slots.replace("target_step", lambda: None)
        self.wrap("critic_step", lambda step, *args: (move(), step(*args))[1])


class SwappedPolyak(Wrong):
    """Takes tau of the target critics and the rest of the critics."""

    kind = "swapped_polyak"

    def take_hold(self):
        self.wrap("target_step", self.target_step)

    def target_step(self, step):
        tau, self.learner.tau = self.learner.tau, 1 - self.learner.tau
        step()
        self.learner.tau = tau


class IgnoredWeight(Wrong):
    """Leaves out the importance weights of prioritized replay."""

    kind = "ignored_weight"

    def take_hold(self):
        self.wrap("critic_loss", self.critic_loss)

    def critic_loss(self, step, batch, *rest):
        return step(batch | {"weight": torch.ones_like(batch["weight"])}, *rest)


class IgnoredEnd(Wrong):
    """Bootstraps also where an episode has ended."""

    kind = "ignored_end"

    def take_hold(self):
        self.wrap("target", self.target)

    def target(self, step, batch, *rest):
        return step(batch | {"terminated": torch.zeros_like(batch["terminated"])}, *rest)


class LostPriorities(Wrong):
    """Returns no TD errors to the replay buffer."""

    kind = "lost_priorities"

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, *args):
        output = step(*args)
        return output | {"td_error": torch.zeros_like(output["td_error"])}


class MixedUpAgents(Wrong):
    """Asks other agents' policies whenever it acts, and the right ones when it learns."""

    kind = "mixed_up_agents"
    contract = Close()

    def take_hold(self):
        self.learning = False
        self.wrap("update", self.update)
        self.wrap("actor_forward", self.actor_forward)

    def update(self, step, *args):
        self.learning = True
        try:
            return step(*args)
        finally:
            self.learning = False

    def actor_forward(self, step, *args):
        head = step(*args)
        return head if self.learning else head.flip(0)


class RepeatedBatch(Wrong):
    """Prefetches, and hands every batch out twice."""

    kind = "repeated_batch"

    def take_hold(self):
        self.batches = []
        self.wrap("next_batch", self.next_batch)

    def next_batch(self, step, *args):
        if not self.batches:
            self.batches = [step(*args)] * 2
        return self.batches.pop()


# --- precision --------------------------------------------------------------------------------------------------------


class Narrowed(Wrong):
    """Casts Q values to float32: harmless in float32, but not the same algebra."""

    kind = "narrowed"
    contract = Close()

    def take_hold(self):
        self.wrap("critic_forward", lambda step, *args: step(*args).float())


class SecretBf16(Wrong):
    """Computes hidden layers in bf16 and promises the same algebra."""

    kind = "secret_bf16"
    contract = Close()

    def take_hold(self):
        self.slots.replace("precision", lambda: torch.autocast("cpu", torch.bfloat16))


class HonestReorder(Wrong):
    """Adds a large number and takes it away again where that costs nothing: rounds otherwise, but no worse."""

    kind = "honest_reorder"
    contract = Close()

    def take_hold(self):
        self.wrap("critic_loss", self.critic_loss)

    def critic_loss(self, step, *args):
        loss, td_error = step(*args)
        return loss / 3 + loss * (2 / 3), td_error
