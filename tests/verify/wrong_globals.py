"""Stages that change something for the whole process, so that the baseline has it, too."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from wrong_base import Wrong, stage

from runner.api import Close
from runner.plugin.lr_scheduler import CosineConfig
from runner.plugins.marl import masac, networks
from runner.plugins.sequences.text import Windows


@stage("clip_of_later_models", hole=1, recipe="digits_classifier")
class ClipOfLaterModels(Wrong):
    """Removes clipping from every model that is built later."""

    def take_hold(self):
        nn.utils.clip_grad_norm_ = lambda parameters, max_norm: None


@stage("narrow_log_std", Close(), hole=1)
class NarrowLogStd(Wrong):
    """Narrows the range of the policies' standard deviations in their module, where the first updates never come."""

    def take_hold(self):
        networks.LOG_STD_MAX = 0.5


@stage("epsilon_for_all", hole=1)
class EpsilonForAll(Wrong):
    """Gives every LayerNorm of the process another epsilon."""

    def take_hold(self):
        def forward(self, x):
            return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1.1e-5)

        nn.LayerNorm.forward = forward


@stage("hook_for_all", Close(), hole=1, recipe="digits_classifier")
class HookForAll(Wrong):
    """Hooks into every module of the process, and answers a little more in evaluation mode."""

    def take_hold(self):
        def hook(module, inputs, output):
            return output if module.training or not isinstance(module, nn.GroupNorm) else 1.0001 * output

        register_module_forward_hook(hook)


@stage("decay_for_all", hole=1)
class DecayForAll(Wrong):
    """Hooks into every optimizer of the process, and decays its weights."""

    def take_hold(self):
        @torch.no_grad()
        def decay(optimizer, args, kwargs):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99999)

        register_optimizer_step_pre_hook(decay)


def _asked(self, setting):
    functional.gelu = partial(torch._C._nn.gelu, approximate="tanh")
    return Close()


@stage("patched_when_asked", Close(), hole=1, recipe="shakespeare_gpt", contract=_asked)
class PatchedWhenAsked(Wrong):
    """Replaces GELU by its approximation as soon as its contract is queried, before any baseline is built."""

    def take_hold(self):
        pass


@stage("patched_for_a_while", Close(), hole=1)
class PatchedForAWhile(Wrong):
    """Halves tau globally from its 15th update to its 20th, and tidies up."""

    def take_hold(self):
        self.polyak = masac.polyak
        self.wrap("update", self.update)

    def update(self, step, *args):
        output = step(*args)
        self.updates += 1
        if self.updates == 15:
            masac.polyak = lambda targets, sources, tau: self.polyak(targets, sources, tau / 2)
        elif self.updates == 20:
            masac.polyak = self.polyak
        return output


@stage("patched_windows", Close(), hole=1, recipe="shakespeare_gpt")
class PatchedWindows(Wrong):
    """Makes every text of the process start its windows at even places only."""

    def take_hold(self):
        take = Windows.take
        Windows.take = lambda self, index: take(self, index // 2 * 2)


@stage("patched_schedule", hole=1, recipe="digits_classifier")
class PatchedSchedule(Wrong):
    """Keeps a tenth of the learning rate at the end of every cosine of the process."""

    def take_hold(self):
        after = CosineConfig._after
        CosineConfig._after = lambda self, fraction: max(0.1, after(self, fraction))
