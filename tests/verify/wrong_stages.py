"""Stages of multi-agent SAC that are wrong in ways that are easy to overlook, for the gate to find out.

Every one still trains: nothing but the numbers shows what is wrong. The two named ``Honest...`` are not wrong.
"""

import copy

import torch
from wrong_base import Wrong, stage

from runner.api import Close
from runner.plugins.marl.stages.forward_cache import ForwardCache
from runner.plugins.marl.stages.merged_critic_loss import MergedCriticLoss

# --- caches -----------------------------------------------------------------------------------------------------------


@stage("stale_cache")
class StaleCache(ForwardCache):
    """Never forgets the next actions: those of the first update serve for all."""

    def _forget(self):
        self.current.clear()


@stage("cache_by_batch")
class CacheByBatch(Wrong):
    """Remembers next actions for as long as the batch is the same, whatever becomes of the policies."""

    def take_hold(self):
        self.seen = self.kept = None
        self.wrap("next_actions", self.next_actions)

    def next_actions(self, step, batch, noise):
        if self.seen is not batch["next_observation"]:
            self.seen, self.kept = batch["next_observation"], step(batch, noise)
        return self.kept


@stage("private_copy")
class PrivateCopy(Wrong):
    """Keeps a copy of the target critics that it refreshes when it updates them, but not when a state is loaded."""

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


@stage("delayed_targets")
class DelayedTargets(Wrong):
    """Hands out the targets of the update before."""

    def take_hold(self):
        self.last = None
        self.wrap("targets", self.targets)

    def targets(self, step, batch, noise):
        y = step(batch, noise)
        last, self.last = self.last, y
        return y if last is None else last


# --- loss scaling -----------------------------------------------------------------------------------------------------


@stage("honest_scaler")
class HonestScaler(Wrong):
    """Scales the loss by a power of two, unscales before clipping and updates the scale once: the same bits."""

    growth_interval = 2000

    def take_hold(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=self.growth_interval)
        self.wrap("backward", lambda step, loss: step(self.scaler.scale(loss)))
        self.slots.replace("optimizer_step", self.scaler.step)
        self.wrap("update", self.update)
        self.replace_unscale()

    def replace_unscale(self):
        self.slots.replace("unscale", self.scaler.unscale_)

    def update(self, step, *args):
        output = step(*args)
        self.scaler.update()
        return output


@stage("clip_before_unscale")
class ClipBeforeUnscale(HonestScaler):
    """Leaves unscaling to the optimizer step, after gradients have been clipped at their scaled size."""

    def replace_unscale(self):
        pass


@stage("scaler_updated_between")
class ScalerUpdatedBetween(HonestScaler):
    """Updates the scale once more, between a loss that it has scaled and the step that unscales its gradient."""

    growth_interval = 1

    def take_hold(self):
        super().take_hold()
        self.wrap("temperature_gradients", self.temperature_gradients)

    def temperature_gradients(self, step, *args):
        step(*args)
        self.scaler.update()


@stage("scaler_updated_twice")
class ScalerUpdatedTwice(HonestScaler):
    """Updates the scale twice at the end."""

    def update(self, step, *args):
        output = super().update(step, *args)
        self.scaler.update()
        return output


# --- gradients --------------------------------------------------------------------------------------------------------


@stage("leaky_actor_loss")
class LeakyActorLoss(Wrong):
    """Lets the gradient of the actor loss flow into the critics' parameters."""

    def take_hold(self):
        self.wrap("actor_gradients", self.actor_gradients)

    def actor_gradients(self, step, *args):
        for parameter in self.learner.roles["critic"].leaves():
            parameter.requires_grad_(True)
        return step(*args)


@stage("scaled_loss")
class ScaledLoss(Wrong):
    """Multiplies the critic loss by 1.001."""

    def take_hold(self):
        self.wrap("critic_loss", self.critic_loss)

    def critic_loss(self, step, *args):
        loss, td_error = step(*args)
        return 1.001 * loss, td_error


@stage("scaled_backward", Close())
class ScaledBackward(Wrong):
    """Multiplies every loss by 1.001 on its way to the gradients, where clipping and Adam hide most of it."""

    def take_hold(self):
        self.wrap("backward", lambda step, loss: step(1.001 * loss))


@stage("detached_trunk")
class DetachedTrunk(Wrong):
    """Detaches the actors' hidden layers, so that only their heads learn."""

    def take_hold(self):
        for actor in self.learner.actors:
            actor.trunk.register_forward_hook(lambda module, inputs, output: output.detach())


@stage("accumulated_gradients")
class AccumulatedGradients(Wrong):
    """Forgets to zero the critics' gradients."""

    def take_hold(self):
        self.learner.roles["critic"].zero_grad = lambda agents=None: None


@stage("mean_over_agents")
class MeanOverAgents(MergedCriticLoss):
    """Takes the mean of the agents' critic losses where their sum is due."""

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


@stage("forgetful_optimizer")
class ForgetfulOptimizer(Wrong):
    """Loses the optimizers' moments after every update."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, *args):
        output = step(*args)
        for optimizer in self.learner.roles["actor"].optimizers:
            optimizer.state.clear()
        return output


# --- the algorithm ----------------------------------------------------------------------------------------------------


@stage("noise_drawn_twice")
class NoiseDrawnTwice(Wrong):
    """Draws the noise of the update itself, although it is handed in."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, batch, noise, progress):
        return step(batch, self.learner.noise(batch, self.learner.context.generator("noise")), progress)


@stage("early_target_step")
class EarlyTargetStep(Wrong):
    """Moves the target critics before the critics' step, not after it."""

    def take_hold(self):
        move = self.slots.target_step
        self.slots.replace("target_step", lambda: None)
        self.wrap("critic_step", lambda step, *args: (move(), step(*args))[1])


@stage("swapped_polyak")
class SwappedPolyak(Wrong):
    """Takes tau of the target critics and the rest of the critics."""

    def take_hold(self):
        self.wrap("target_step", self.target_step)

    def target_step(self, step):
        tau, self.learner.tau = self.learner.tau, 1 - self.learner.tau
        step()
        self.learner.tau = tau


@stage("ignored_weight")
class IgnoredWeight(Wrong):
    """Leaves out the importance weights of prioritized replay."""

    def take_hold(self):
        self.wrap("critic_loss", self.critic_loss)

    def critic_loss(self, step, batch, *rest):
        return step(batch | {"weight": torch.ones_like(batch["weight"])}, *rest)


@stage("ignored_end")
class IgnoredEnd(Wrong):
    """Bootstraps also where an episode has ended."""

    def take_hold(self):
        self.wrap("target", self.target)

    def target(self, step, batch, *rest):
        return step(batch | {"terminated": torch.zeros_like(batch["terminated"])}, *rest)


@stage("lost_priorities")
class LostPriorities(Wrong):
    """Returns no TD errors to the replay buffer."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, *args):
        output = step(*args)
        return output | {"td_error": torch.zeros_like(output["td_error"])}


@stage("mixed_up_agents", Close())
class MixedUpAgents(Wrong):
    """Uses other agents' policies whenever it acts, and the right ones when it learns."""

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


@stage("repeated_batch")
class RepeatedBatch(Wrong):
    """Prefetches, and hands every batch out twice."""

    def take_hold(self):
        self.batches = []
        self.wrap("next_batch", self.next_batch)

    def next_batch(self, step, *args):
        if not self.batches:
            self.batches = [step(*args)] * 2
        return self.batches.pop()


# --- precision --------------------------------------------------------------------------------------------------------


@stage("narrowed", Close())
class Narrowed(Wrong):
    """Casts Q values to float32: harmless in float32, but not the same algebra."""

    def take_hold(self):
        self.wrap("critic_forward", lambda step, *args: step(*args).float())


@stage("secret_bf16", Close())
class SecretBf16(Wrong):
    """Computes hidden layers in bf16 and promises the same algebra."""

    def take_hold(self):
        self.slots.replace("precision", lambda: torch.autocast("cpu", torch.bfloat16))


@stage("honest_reorder", Close())
class HonestReorder(Wrong):
    """Adds a large number and takes it away again where that costs nothing: rounds otherwise, but no worse."""

    def take_hold(self):
        self.wrap("critic_loss", self.critic_loss)

    def critic_loss(self, step, *args):
        loss, td_error = step(*args)
        return loss / 3 + loss * (2 / 3), td_error
