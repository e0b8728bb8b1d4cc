"""Stages for convolutions that are wrong on purpose."""

import torch
from wrong_on_purpose import wrong

from runner.api import Close, Stage
from runner.plugins.vision.convolution.function import convolve
from runner.plugins.vision.convolution.geometry import ConvGeometry
from runner.plugins.vision.convolution.native import Native
from runner.plugins.vision.convolution.registry import NATIVE


class WithoutBorder(Native):
    """Leaves the last row of the output's gradient out."""

    name = "without_border"

    def backward(self, gradient, x, w, geometry, workspace=None):
        gradient = gradient.clone()
        gradient[:, :, -1] = 0
        return super().backward(gradient, x, w, geometry)


@wrong("border_left_out", ["conv"], Close)
class BorderLeftOut(Stage):
    """Computes right outputs and wrong gradients."""

    def attach(self, pipeline):
        wrong_backend = WithoutBorder()
        backends = {"forward": NATIVE, "backward_data": wrong_backend, "backward_weight": wrong_backend}

        def conv(x, w, *geometry, bias=None):
            return convolve(x, w, ConvGeometry(*geometry[:6]), lambda key: backends[key.direction], bias)

        pipeline.slots.wrap("conv", lambda step: conv)


@wrong("input_kept_by_shape", ["conv"])
class InputKeptByShape(Stage):
    """Returns in evaluations the first output of each shape again."""

    def attach(self, pipeline):
        kept = {}

        def remembering(step):
            def conv(x, w, *rest):
                if torch.is_grad_enabled():
                    return step(x, w, *rest)
                return kept.setdefault((x.shape, w.shape), step(x, w, *rest))

            return conv

        pipeline.slots.wrap("conv", remembering)
