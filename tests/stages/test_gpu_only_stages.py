"""What needs a GPU says so without one, and works with one."""

import types

import pytest
import torch
from builders import Holder, build_masac, random_batch

from runner.plugins.stages.amp import AmpConfig
from runner.plugins.stages.async_transfer import AsyncTransferConfig
from runner.plugins.stages.cuda_graph import CudaGraphConfig
from runner.system.errors import UsageError

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def setting(device, replay="same", kind="uniform", **stages):
    data = types.SimpleNamespace(replay=types.SimpleNamespace(device=replay, kind=kind))
    return types.SimpleNamespace(device=torch.device(device), data=data, stages=stages)


def transfer():
    return AsyncTransferConfig()


def test_async_transfer_says_when_there_is_nothing_to_transfer():
    assert "nothing to do on a CPU" in transfer().inactive(setting("cpu"))
    assert "on the GPU already" in transfer().inactive(setting("cuda"))
    assert transfer().inactive(setting("cuda", replay="cpu")) is None


def test_cuda_graph_needs_a_gpu_and_refuses_loss_scaling():
    assert "CUDA device" in CudaGraphConfig().inactive(setting("cpu"))
    assert CudaGraphConfig().inactive(setting("cuda")) is None
    with pytest.raises(UsageError, match="bf16"):
        CudaGraphConfig().inactive(setting("cuda", amp=AmpConfig(dtype="fp16")))


@CUDA
def test_batches_that_were_sampled_ahead_are_the_same_ones_in_the_same_order():
    learner = build_masac(device="cuda")
    drawn = iter(range(100))
    learner.slots.define(sample=lambda size, progress: random_batch(next(drawn), size=size), next_batch=lambda: None)
    stage = transfer()
    stage.inactive(setting("cuda", replay="cpu"))
    stage.attach(Holder(learner, 32))
    for burst in range(3):
        for remaining in (2, 1, 0):
            batch = learner.slots.next_batch(32, 0.0, remaining)
            expected = random_batch(3 * burst + 2 - remaining)
            assert all(torch.equal(batch[name].cpu(), expected[name]) for name in expected)
    assert next(drawn) == 9  # nothing was sampled beyond a burst
