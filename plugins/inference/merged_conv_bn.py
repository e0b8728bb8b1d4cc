"""Batch norm that is merged into the convolution before it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import Close, Pipeline, Setting, Stage, StageConfig, UsageError, nbytes

if TYPE_CHECKING:
    from torch import Tensor, nn


class MergedConvBnConfig(StageConfig):
    """Merges batch norm into the weights and the bias of the convolution before it.

    A trained batch norm multiplies every channel by a number and adds another one. Both are
    constants, so the convolution can contain them. Group norm and layer norm cannot be merged:
    their mean and variance are those of the image that is being answered. Convolutions and norms
    are found by tracing the network (``torch.fx``); a convolution whose output is also read by
    another layer stays as it is.

    The network keeps its parameters. Merged weights are computed from them once, and again when
    other parameters are loaded; a training uses the network as it is.

    When it helps: networks with batch norm, whose norms read and write every activation once more.
    When it hurts: weights of convolutions are in memory twice.
    """

    kind: ClassVar[str] = "merged_conv_bn"
    implementation = "MergedConvBn"
    phase: ClassVar[int] = 1

    def contract(self, setting: Setting) -> Close:
        """Returns that the algebra is the same, and rounding differs."""
        return Close()


class MergedConvBn(Stage):
    """Replaces the computation of convolutions and of their norms."""

    def attach(self, pipeline: Pipeline) -> None:
        """Merges every pair of a convolution and a batch norm.

        Raises:
            UsageError: No pair exists, or the network cannot be traced.
        """
        from torch import nn

        from .network import settled

        learner = settled(pipeline, self.config.kind)
        network = learner.module
        if not any(isinstance(layer, nn.BatchNorm2d) for layer in network.modules()):
            raise UsageError(
                f"merged_conv_bn: learner '{learner.config.kind}' has no batch "
                f"norm{_other_norm(network)}"
            )
        names = list(_pairs(network))
        if not names:
            raise UsageError(
                "merged_conv_bn: no batch norm is the only reader of a convolution"
            )
        pairs = [
            _MergedPair(network.get_submodule(conv), network.get_submodule(norm))
            for conv, norm in names
        ]
        self.program_bytes = nbytes([dict(pair.merged.state_dict()) for pair in pairs])
        pipeline.note(f"{len(pairs)} batch norms are merged into convolutions")


class _MergedPair:
    """A convolution that computes what the norm behind it would return, and the norm that returns
    its input.
    """

    def __init__(self, conv: Any, norm: Any) -> None:
        self.conv = conv
        self.norm = norm
        self.merged = copy.deepcopy(conv)
        self._sources: list[tuple[Tensor, int]] = []
        self._plain_conv = conv.forward
        self._plain_norm = norm.forward
        self._refresh()
        conv.forward = self._convolve
        norm.forward = self._normalise

    def _convolve(self, x: Tensor) -> Tensor:
        # In training, the norm needs the statistics of the convolution's real output.
        if self.norm.training:
            return self._plain_conv(x)  # type: ignore[no-any-return]
        if not self._is_fresh():
            self._refresh()
        y: Tensor = self.merged(x)
        return y

    def _normalise(self, x: Tensor) -> Tensor:
        return self._plain_norm(x) if self.norm.training else x

    def _tensors(self) -> list[Tensor]:
        norm = self.norm
        tensors = (
            self.conv.weight,
            self.conv.bias,
            norm.weight,
            norm.bias,
            norm.running_mean,
            norm.running_var,
        )
        return [tensor for tensor in tensors if tensor is not None]

    def _is_fresh(self) -> bool:
        """Returns whether the merged weights are those of the current parameters."""
        tensors = self._tensors()
        if len(tensors) != len(self._sources):
            return False
        pairs = zip(tensors, self._sources, strict=True)
        return all(
            tensor is source and tensor._version == version
            for tensor, (source, version) in pairs
        )

    def _refresh(self) -> None:
        from torch.nn.utils.fusion import fuse_conv_bn_weights

        norm = self.norm
        self._sources = [(tensor, tensor._version) for tensor in self._tensors()]
        self.merged.weight, self.merged.bias = fuse_conv_bn_weights(
            self.conv.weight,
            self.conv.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
            self.conv.transposed,
        )


def _other_norm(network: nn.Module) -> str:
    from torch import nn

    if not any(isinstance(layer, nn.GroupNorm) for layer in network.modules()):
        return ""
    return (
        ", and its group norm depends on each image, so it cannot be merged; train it with "
        "batch norm"
    )


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
        raise UsageError(
            f"merged_conv_bn: the network cannot be traced: {reason}"
        ) from error
    layers = {
        node: network.get_submodule(str(node.target))
        for node in graph.nodes
        if node.op == "call_module"
    }
    calls = Counter(layers.values())
    for node, norm in layers.items():
        if not isinstance(norm, nn.BatchNorm2d) or norm.running_mean is None:
            continue
        producer: Any = node.args[0]
        conv = layers.get(producer)
        if not isinstance(conv, convolutions):
            continue
        # Another reader of the convolution's output would get the normalised values, and a
        # layer that is called twice has two outputs.
        if len(producer.users) > 1 or calls[conv] + calls[norm] > 2:
            continue
        # Torch's function for merging has no groups of transposed convolutions.
        if conv.transposed and conv.groups > 1:
            continue
        yield str(producer.target), str(node.target)
