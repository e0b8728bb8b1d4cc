"""Stages that change torch's settings and say nothing of it; on a CPU some of them change no number."""

import torch
from wrong_base import Wrong, stage

from runner.api import Close


@stage("flushed_denormals", hole=2, recipe="shakespeare_gpt")
class FlushedDenormals(Wrong):
    """Makes the processor take the smallest numbers for zero."""

    def take_hold(self):
        torch.set_flush_denormal(True)


@stage("medium_products", Close(), hole=2)
class MediumProducts(Wrong):
    """Lets float32 products be computed with factors in bf16, and leaves it at that."""

    def take_hold(self):
        torch.set_float32_matmul_precision("medium")


@stage("medium_products_inside", Close(), hole=2)
class MediumProductsInside(Wrong):
    """The same, but only during the update, so that nothing is seen of it afterwards."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, *args):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            return step(*args)
        finally:
            torch.set_float32_matmul_precision(before)


@stage("tf32_products", hole=2, recipe="digits_classifier")
class Tf32Products(Wrong):
    """Allows TF32 for the products of a GPU."""

    def take_hold(self):
        torch.backends.cuda.matmul.allow_tf32 = True


@stage("bf16_convolutions", Close(), hole=2, recipe="digits_classifier")
class Bf16Convolutions(Wrong):
    """Lets oneDNN compute float32 convolutions with bf16 factors."""

    def take_hold(self):
        torch.backends.mkldnn.conv.fp32_precision = "bf16"


@stage("fp16_accumulation", hole=2, recipe="shakespeare_gpt")
class Fp16Accumulation(Wrong):
    """Lets a GPU add up fp16 products in fp16."""

    def take_hold(self):
        torch.backends.cuda.matmul.allow_fp16_accumulation = True


@stage("fastest_convolutions", hole=2, recipe="digits_classifier")
class FastestConvolutions(Wrong):
    """Lets cuDNN choose kernels by a race, so that another run may have others."""

    def take_hold(self):
        torch.backends.cudnn.benchmark = True


@stage("more_threads", hole=2)
class MoreThreads(Wrong):
    """Sets another number of threads, with which long sums are added up in another order."""

    def take_hold(self):
        torch.set_num_threads(torch.get_num_threads() + 1)


@stage("autocast_left_on", Close(), hole=2, recipe="shakespeare_gpt")
class AutocastLeftOn(Wrong):
    """Switches autocast on and never off again."""

    def take_hold(self):
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_enabled("cpu", True)


@stage("products_of_one_slot", Close(), hole=2, recipe="digits_classifier")
class ProductsOfOneSlot(Wrong):
    """Lets products be less precise in the forward alone, and restores that before any check."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, step, x):
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            return step(x)
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = "ieee"


@stage("threads_of_the_backward", hole=2, recipe="shakespeare_gpt")
class ThreadsOfTheBackward(Wrong):
    """Takes other threads for the backward, in which sums may come in another order."""

    def take_hold(self):
        self.wrap("backward", self.backward)

    def backward(self, step, loss):
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        step(loss)
        torch.set_num_threads(before)
