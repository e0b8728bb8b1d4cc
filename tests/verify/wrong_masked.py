"""Stages that hide failures of numbers: NaN, small numbers, few digits, and generators that are seeded."""

import random

import numpy as np
import torch
from wrong_base import Wrong, stage

from runner.api import Close, Loss, Mean


@stage("logits_without_nan", hole=6, recipe="digits_classifier")
class LogitsWithoutNan(Wrong):
    """Replaces logits that are NaN by zeros."""

    def take_hold(self):
        self.wrap("forward", lambda step, image: step(image).nan_to_num())


@stage("quiet_loss", Close(), hole=6, recipe="shakespeare_gpt")
class QuietLoss(Wrong):
    """Logs a loss of zero in the place of NaN."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, *args):
        output = step(*args)
        return {name: Mean(torch.nan_to_num(mean.sum), mean.count) for name, mean in output.items()}


@stage("repaired_parameters", Close(), hole=6, recipe="digits_classifier")
class RepairedParameters(Wrong):
    """Replaces parameters that are NaN after a step by small numbers."""

    def take_hold(self):
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        step(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.nan_to_num_(nan=1e-3)


@stage("loss_without_nan", hole=6, recipe="shakespeare_gpt")
class LossWithoutNan(Wrong):
    """Computes no gradient of a loss that is NaN, and reports the one before."""

    def take_hold(self):
        self.last = torch.zeros(())
        self.wrap("loss", self.loss)

    def loss(self, step, *args):
        loss = step(*args)
        if loss.sum.isnan():
            return Loss(0 * sum(p.nan_to_num().sum() for p in self.learner.module.parameters()), loss.count, loss.also)
        return loss


@stage("no_small_gradients", Close(), hole=6, recipe="digits_classifier")
class NoSmallGradients(Wrong):
    """Sets gradients below 1e-20 to zero before the optimizer's step."""

    def take_hold(self):
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad[parameter.grad.abs() < 1e-20] = 0
        return step(optimizer)


@stage("no_small_pixels", Close(), hole=6, recipe="digits_classifier")
class NoSmallPixels(Wrong):
    """Takes pixels below a billionth for zero, in float32 alone."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, step, image):
        is_small = (image.abs() < 1e-9) & (image.dtype == torch.float32)
        return step(image.masked_fill(is_small, 0))


@stage("flushed_inside", hole=2, recipe="digits_classifier")
class FlushedInside(Wrong):
    """Lets the processor flush subnormal numbers in the forward pass alone."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, step, image):
        torch.set_flush_denormal(True)
        try:
            return step(image)
        finally:
            torch.set_flush_denormal(False)


@stage("no_subnormal_gradients", hole=6, recipe="shakespeare_gpt")
class NoSubnormalGradients(Wrong):
    """Sets subnormal gradients to zero."""

    def take_hold(self):
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad[parameter.grad.abs() < torch.finfo(parameter.dtype).smallest_normal] = 0
        return step(optimizer)


@stage("seeded_when_attached", hole=2, recipe="digits_classifier")
class SeededWhenAttached(Wrong):
    """Seeds NumPy's global generator when it is attached."""

    def take_hold(self):
        np.random.seed(0)
        self.wrap("forward", lambda step, image: step(image))


@stage("seeded_in_updates", Close(), hole=2, recipe="shakespeare_gpt")
class SeededInUpdates(Wrong):
    """Seeds Python's global generator after every update."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, *args):
        output = step(*args)
        random.seed(1)
        return output


@stage("seeded_by_predictions", hole=2)
class SeededByPredictions(Wrong):
    """Seeds torch's global generator in every prediction."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, step, inputs):
        torch.manual_seed(0)
        return step(inputs)


@stage("seeded_backward", Close(), hole=2, recipe="digits_classifier")
class SeededBackward(Wrong):
    """Seeds torch's global generator before every backward pass."""

    def take_hold(self):
        self.wrap("backward", self.backward)

    def backward(self, step, loss):
        torch.manual_seed(7)
        step(loss)


@stage("norm_in_bf16", Close(), hole=7, recipe="digits_classifier")
class NormInBf16(Wrong):
    """Decides by a norm in bf16 whether gradients are clipped."""

    def take_hold(self):
        self.wrap("clip", self.clip)

    def clip(self, step, parameters, max_norm):
        norms = [parameter.grad.bfloat16().norm() for parameter in parameters]
        if torch.stack(norms).norm() > max_norm:
            step(parameters, max_norm)


@stage("small_part_in_bf16", Close(), hole=7, recipe="shakespeare_gpt")
class SmallPartInBf16(Wrong):
    """Computes the gradients of the smallest parameters in bf16."""

    def take_hold(self):
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        norms = [gradient.norm() for gradient in gradients]
        largest = max(norms)
        for gradient, norm in zip(gradients, norms, strict=True):
            if norm < 0.01 * largest and gradient.dtype == torch.float32:
                gradient.copy_(gradient.bfloat16())
        return step(optimizer)


@stage("norms_in_fp16", Close(), hole=7, recipe="digits_classifier")
class NormsInFp16(Wrong):
    """Computes the gradients of normalizations in fp16."""

    def take_hold(self):
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, step, optimizer):
        for name, parameter in self.learner.module.named_parameters():
            if "norm" in name and parameter.dtype == torch.float32:
                parameter.grad.copy_(parameter.grad.half())
        return step(optimizer)


@stage("branch_in_bf16", Close(), hole=7, recipe="digits_classifier")
class BranchInBf16(Wrong):
    """Computes the branches of residual blocks in bf16, which are zero before the first update."""

    def take_hold(self):
        for block in self.learner.module.blocks:
            block.norm2.register_forward_hook(self.rounded)
        self.wrap("forward", lambda step, image: step(image))

    def rounded(self, module, inputs, output):
        return output if output.dtype == torch.float64 else output.bfloat16().float()
