"""Batch normalisation over the samples of all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from runner.api import Pipeline, Stage


class SynchronizedBatchNorm(Stage):
    """Replaces the computation of layers of a learner's modules."""

    def attach(self, pipeline: Pipeline) -> None:
        """Changes the class of every layer, which keeps its parameters, buffers and hooks."""
        learner = pipeline.learner
        processes = learner.context.processes
        assert processes is not None
        layers = [layer for module in learner.modules().values() for layer in module.modules()]
        replaced: list[Any] = [
            layer for layer in layers if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        ]
        for layer in replaced:
            layer.__class__ = SynchronizedLayer
            layer.process_group = None
            layer.add_up = processes.sum_in_place
        if replaced:
            pipeline.note(f"layers: {len(replaced)}")
        else:
            pipeline.deactivate("the model has no batch normalisation")


class SynchronizedLayer(nn.SyncBatchNorm):
    """Batch normalisation of a batch in several processes (Ioffe and Szegedy 2015, arXiv:1502.03167)."""

    add_up: Callable[[Tensor], None]
    """Replaces a tensor by its sum over all processes."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Returns the normalised input.

        Args:
            input: Samples and channels first, [B, C, ...].
        """
        if not self.training:
            # A process evaluates entire batches, whose statistics replace missing averages.
            has_averages = self.running_mean is not None
            return functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=not has_averages,
                eps=self.eps,
            )
        apply: Any = Sum.apply

        def add_up(summands: Tensor) -> Tensor:
            total: Tensor = apply(summands, self.add_up)
            return total

        dimensions = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        # Sums of numbers of 16 bits would be rounded.
        values = input.float() if input.dtype.itemsize < 4 else input
        count = values.new_tensor([values.numel() / values.shape[1]])
        sums = add_up(torch.cat([values.sum(dimensions), count]))
        size = sums[-1].detach()
        mean = sums[:-1] / size
        # The squares of deviations lose no digits, unlike the difference of two sums.
        centred = values - mean.view(shape)
        squares = add_up(centred.square().sum(dimensions))
        variance = squares / size
        if self.running_mean is not None:
            self._follow(mean.detach(), variance.detach() * size / (size - 1))
        normalised = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        output: Tensor = normalised.to(input.dtype)
        return output

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Moves the averages that evaluation uses."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class Sum(torch.autograd.Function):
    """A sum over all processes.

    All processes together have one loss, a sum, so the gradient of a summand is the sum of their
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, add_up: Callable[[Tensor], None]) -> Tensor:
        """Returns the sum."""
        ctx.add_up = add_up
        total = values.clone()
        add_up(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of the gradients."""
        total = gradients[0].clone()
        ctx.add_up(total)
        return total, None
