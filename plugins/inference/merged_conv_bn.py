"""Batch norm that is merged into the convolution before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import Close, Pipeline, Setting, Stage, StageConfig, UsageError

if TYPE_CHECKING:
    from torch import nn


class MergedConvBnConfig(StageConfig):
    """Merges batch norm into the weights and the bias of the convolution before it.

    A trained batch norm multiplies every channel by a number and adds another one. Both are
    constants, so the convolution can contain them. Group norm and layer norm cannot be merged:
    their mean and variance are those of the image that is being answered. Convolutions and norms
    are found by tracing the network (``torch.fx``); a convolution whose output is also read by
    another layer stays as it is.

    When it helps: networks with batch norm, whose norms read and write every activation once more.
    When it hurts: the model cannot be trained further, because its norms are gone.
    """

    kind: ClassVar[str] = "merged_conv_bn"
    phase: ClassVar[int] = 1

    def contract(self, setting: Setting) -> Close:
        """Returns that the algebra is the same, and rounding differs."""
        return Close()

    def implementation(self) -> type[Stage]:
        """Imports and returns the stage."""
        return MergedConvBn


class MergedConvBn(Stage):
    """Changes convolutions in place, and puts identities in the place of their norms."""

    def attach(self, pipeline: Pipeline) -> None:
        """Merges every pair of a convolution and a batch norm.

        Raises:
            UsageError: There is no such pair, or the network cannot be traced.
        """
        from torch import nn

        from .network import settled

        learner = settled(pipeline, self.config.kind)
        network = learner.module
        if not any(isinstance(layer, nn.BatchNorm2d) for layer in network.modules()):
            raise UsageError(f"merged_conv_bn: learner '{learner.config.kind}' has no batch norm{_other_norm(network)}")
        pairs = list(_pairs(network))
        if not pairs:
            raise UsageError("merged_conv_bn: no batch norm is the only reader of a convolution")
        for conv, norm in pairs:
            _merge(network.get_submodule(conv), network.get_submodule(norm))
            network.set_submodule(norm, nn.Identity())
        learner.configure_optimizers()
        pipeline.note(f"{len(pairs)} batch norms are merged into convolutions")


def _other_norm(network: nn.Module) -> str:
    from torch import nn

    if not any(isinstance(layer, nn.GroupNorm) for layer in network.modules()):
        return ""
    return ", and its group norm depends on each image, so it cannot be merged; train it with batch norm"


def _pairs(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the names of convolutions and of the batch norms that alone read their outputs."""
    import torch
    from torch import fx, nn

    convolutions = (nn.Conv2d, nn.ConvTranspose2d)

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            # A convolution of ours calls a slot, which a trace must not look into.
            is_layer = isinstance(m, (*convolutions, nn.BatchNorm2d))
            return is_layer or super().is_leaf_module(m, module_qualified_name)

    try:
        graph = Tracer().trace(network)
    except (torch.fx.proxy.TraceError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"merged_conv_bn: the network cannot be traced: {reason}") from error
    layers = {node: network.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    calls = Counter(layers.values())
    for node, norm in layers.items():
        if not isinstance(norm, nn.BatchNorm2d) or norm.running_mean is None:
            continue
        before: Any = node.args[0]
        conv = layers.get(before)
        if not isinstance(conv, convolutions) or len(before.users) > 1 or calls[conv] + calls[norm] > 2:
            continue
        # Torch's function for merging has no groups of transposed convolutions.
        if conv.transposed and conv.groups > 1:
            continue
        yield str(before.target), str(node.target)


def _merge(conv: Any, norm: Any) -> None:
    """Gives a convolution the weights with which it computes what the norm returned."""
    from torch.nn.utils.fusion import fuse_conv_bn_weights

    conv.weight, conv.bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias, conv.transposed
    )
