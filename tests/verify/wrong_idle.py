"""Stages whose wrong part is never called where they are judged: they should be called inactive."""

import torch
from torch import nn
from wrong_base import Wrong, stage

from runner.api import Close

UNCLIPPED = ("optimizer.max_grad_norm=null",)


@stage("uncalled_zero_grad", hole=11)
class UncalledZeroGrad(Wrong):
    """Forgets to zero gradients by a slot that these roles never call."""

    def take_hold(self):
        self.slots.replace("zero_grad", lambda optimizer: None)


@stage("uncalled_clip", Close(), hole=11, recipe="shakespeare_gpt", sets=UNCLIPPED)
class UncalledClip(Wrong):
    """Clips to half the norm where nothing is clipped."""

    def take_hold(self):
        self.wrap("clip", lambda step, parameters, max_norm: step(parameters, max_norm / 2))


@stage("uncalled_unscale", hole=11, recipe="digits_classifier", sets=UNCLIPPED)
class UncalledUnscale(Wrong):
    """Unscales by two in a slot that is never called."""

    def take_hold(self):
        self.slots.replace("unscale", lambda optimizer: None)


@stage("uncalled_target_step", hole=11, sets=("model.update_order=sequential",))
class UncalledTargetStep(Wrong):
    """Never moves the target critics by a slot that the sequential order does not call."""

    def take_hold(self):
        self.slots.replace("target_step", lambda: None)


@stage("takes_nothing", hole=11, recipe="digits_classifier", wraps=frozenset({"forward"}))
class TakesNothing(Wrong):
    """Declares that it wraps the forward, and finds no batch normalisation to fold into it."""

    def take_hold(self):
        if any(isinstance(part, nn.BatchNorm2d) for part in self.learner.module.modules()):
            self.wrap("forward", lambda step, image: step(image) * 2)


@stage("unused_method", Close(), hole=11, recipe="shakespeare_gpt")
class UnusedMethod(Wrong):
    """Replaces a method that is never called."""

    def take_hold(self):
        self.learner.generate = lambda prompt: prompt


@stage("always_falls_back", hole=11, recipe="shakespeare_gpt")
class AlwaysFallsBack(Wrong):
    """Has a fast forward for windows of a multiple of 64 characters, and falls back to the plain one for all others."""

    def take_hold(self):
        self.wrap("forward", lambda step, tokens: step(tokens) if tokens.shape[1] % 64 else self.fast(step, tokens))

    def fast(self, step, tokens):
        return step(torch.zeros_like(tokens))


@stage("after_the_fact", hole=11, recipe="digits_classifier")
class AfterTheFact(Wrong):
    """Wraps the making of optimizers in the first update, when they are made already."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, *args):
        if self.updates == 0:
            self.wrap("make_optimizer", lambda make, optimizer, parameters, **more: make(optimizer, parameters, lr=1))
        self.updates += 1
        return step(*args)


@stage("uncalled_stack", Close(), hole=11, recipe="digits_classifier", claims=frozenset({"precision"}))
class UncalledStack(Wrong):
    """Claims the precision and never replaces it, because it looks for a device that is not there."""

    def take_hold(self):
        if self.pipeline.device.type == "xpu":
            self.slots.replace("precision", lambda: torch.autocast("xpu", torch.bfloat16))
