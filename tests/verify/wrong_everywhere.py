"""Stages that reach the whole process by ways that are easily overlooked."""

import patching
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from wrong_base import Wrong, stage

from runner.api import Close
from runner.plugins.marl.replay import prioritized


@stage("patched_by_helper", Close(), hole=1, recipe="digits_classifier")
class PatchedByHelper(Wrong):
    """Gives every GroupNorm of the process a method of a module that it imports."""

    def take_hold(self):
        nn.GroupNorm.forward = patching.group_norm


@stage("patched_default", Close(), hole=1, recipe="digits_classifier")
class PatchedDefault(Wrong):
    """Smooths all labels by another default value of the cross-entropy."""

    def take_hold(self):
        functional.cross_entropy.__defaults__ = (*functional.cross_entropy.__defaults__[:-1], 0.001)


class _Gelu:
    """The approximation, as an object."""

    def __call__(self, x, approximate="none"):
        return torch._C._nn.gelu(x, approximate="tanh")


@stage("patched_by_object", hole=1, recipe="shakespeare_gpt")
class PatchedByObject(Wrong):
    """Puts an object where torch has a function."""

    def take_hold(self):
        functional.gelu = _Gelu()


class _Softer(TorchFunctionMode):
    """Scales attention otherwise."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            kwargs = kwargs | {"scale": 0.99 * args[0].shape[-1] ** -0.5}
        return function(*args, **kwargs)


@stage("function_mode_left_on", Close(), hole=1, recipe="shakespeare_gpt")
class FunctionModeLeftOn(Wrong):
    """Leaves a mode on in which attention has another scale."""

    def take_hold(self):
        _Softer().__enter__()


class _Truncated(TorchDispatchMode):
    """Cuts off what is nearly one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return output.clamp(max=0.999) if function is torch.ops.aten.tanh.default else output


@stage("dispatch_mode_left_on", Close(), hole=1)
class DispatchModeLeftOn(Wrong):
    """Leaves a mode on in which no hyperbolic tangent, and so no action, comes near one."""

    def take_hold(self):
        _Truncated().__enter__()


@stage("kernel_for_all", Close(), hole=1, recipe="shakespeare_gpt")
class KernelForAll(Wrong):
    """Registers another kernel for GELU, which computes its approximation."""

    def take_hold(self):
        if not hasattr(torch, "own_kernels"):
            torch.own_kernels = torch.library.Library("aten", "IMPL")
            torch.own_kernels.impl("gelu", self.gelu, "CPU")

    @staticmethod
    def gelu(x, approximate="none"):
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@stage("coarser_priorities", Close(), hole=1)
class CoarserPriorities(Wrong):
    """Rounds all priorities to a larger unit, by a constant of their module."""

    def take_hold(self):
        prioritized.UNIT = 2.0**-8
