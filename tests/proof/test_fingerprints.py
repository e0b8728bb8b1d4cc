"""What a change does beside the numbers that are compared: to the baseline, to what it returned, to its state."""

import copy
import itertools

import pytest
import torch
from loops import Loop, Net, batches
from torch import nn

from runner.proof import Close, Exact, Outcome, Subject, verify

BATCHES = batches(4)
PROMISES = [Exact(), Close()]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What a change patches here is as before in the next test."""
    for owner, name in (
        (nn.functional, "mse_loss"),
        (torch.optim.Adam, "step"),
        (nn.LayerNorm, "forward"),
        (Net, "forward"),
        (torch.Tensor, "relu"),
        (torch.Tensor, "backward"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def patches_a_loss():
    mse_loss = nn.functional.mse_loss
    nn.functional.mse_loss = lambda *args: 1.01 * mse_loss(*args)


def patches_an_optimizer():
    step = torch.optim.Adam.step

    def twice(self, closure=None):
        step(self)
        return step(self)

    torch.optim.Adam.step = twice


def patches_a_module():
    nn.LayerNorm.forward = lambda self, x: nn.functional.layer_norm(x, self.normalized_shape, None, None, self.eps)


def patches_the_model():
    forward = Net.forward
    Net.forward = lambda self, x: forward(self, x) + 1e-3


def patches_a_function_of_tensors():
    torch.Tensor.relu = lambda self: nn.functional.leaky_relu(self, 0.05)


def patches_backward():
    backward = torch.Tensor.backward
    torch.Tensor.backward = lambda self: backward(1.001 * self)


PATCHES = [
    patches_a_loss,
    patches_an_optimizer,
    patches_a_module,
    patches_the_model,
    patches_a_function_of_tensors,
    patches_backward,
]


@pytest.mark.parametrize(("patch", "promise"), [*zip(PATCHES, itertools.cycle(PROMISES))])
def test_what_is_changed_for_the_whole_process_fails(patch, promise):
    def changed():
        patch()
        return Loop()()

    verdict = verify(Loop(), changed, BATCHES, promise)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "the change reaches the baseline, too: update 1, slot 'step': '" in str(verdict)


def test_a_baseline_that_draws_from_outside_is_not_held_against_the_change():
    numbers = itertools.count()

    def baseline():
        subject = Loop()()
        return Subject(lambda batch: subject.step(batch) | {"run": next(numbers)}, subject.state)

    verdict = verify(baseline, Loop(), BATCHES, Exact())
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the same is not the same twice" in str(verdict)


class Average:
    """An exponential moving average of a model's parameters."""

    def __init__(self, model):
        self.model, self.average = model, copy.deepcopy(model)

    def update(self):
        with torch.no_grad():
            for own, other in zip(self.average.parameters(), self.model.parameters(), strict=True):
                own.lerp_(other, 0.1)

    def state_dict(self):
        return self.average.state_dict()

    def load_state_dict(self, state):
        self.average.load_state_dict(state)


def averaging(name="ema", updates=True):
    def build():
        subject = Loop()()
        average = Average(subject.state["model"])

        def step(batch):
            output = subject.step(batch)
            if updates:
                average.update()
            return output

        return Subject(step, {**subject.state, name: average})

    return build


@pytest.mark.parametrize("promise", PROMISES)
def test_a_part_of_the_state_that_goes_by_another_name_is_not_judged_and_does_not_pass(promise):
    assert verify(averaging(), averaging(), BATCHES, promise)
    for changed in (averaging("average", updates=False), Loop()):
        verdict = verify(averaging(), changed, BATCHES, promise)
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert "'ema' of the baseline's state cannot be compared" in str(verdict)
    assert verify(averaging(), averaging(updates=False), BATCHES, promise).outcome is Outcome.FAIL
    assert verify(Loop(), averaging(), BATCHES, promise)  # a part more than the baseline has is its own affair


def returning(change):
    def build():
        subject, kept = Loop()(), {}

        def step(batch):
            output = subject.step(batch)
            return change(output["loss"], kept, subject.state["model"])

        return Subject(step, subject.state)

    return build


def into_one_buffer(loss, kept, model):
    return {"loss": kept.setdefault("loss", torch.empty_like(loss)).copy_(loss)}


def into_two_buffers(loss, kept, model):
    buffers = kept.setdefault("two", itertools.cycle([torch.empty_like(loss), torch.empty_like(loss)]))
    return {"loss": next(buffers).copy_(loss)}


def into_one_view(loss, kept, model):
    history = kept.setdefault("history", loss.new_zeros(2, 1))
    history[0, 0] = loss
    return {"loss": history[0].view(())}


def out_of_an_array(loss, kept, model):
    array = kept.setdefault("array", loss.new_zeros(()).numpy())
    array[...] = loss.item()
    return {"loss": torch.from_numpy(array)}


@pytest.mark.parametrize(
    ("change", "promise"),
    [*zip([into_one_buffer, into_two_buffers, into_one_view, out_of_an_array], itertools.cycle(PROMISES))],
)
def test_what_a_later_step_overwrites_fails(change, promise):
    baseline = returning(lambda loss, kept, model: {"loss": loss})
    verdict = verify(baseline, returning(change), BATCHES, promise)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "update 1, slot 'step': 'loss' is overwritten by a later update; return a copy" in str(verdict)
    assert verify(returning(change), returning(change), BATCHES, promise)  # as it was before


@pytest.mark.parametrize("promise", PROMISES)
def test_a_sparse_tensor_may_be_returned(promise):
    sparse = returning(lambda loss, kept, model: {"loss": loss, "weight": model.head.weight.detach().to_sparse()})
    assert verify(sparse, sparse, BATCHES, promise)


def every_third(change):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls = Net(), itertools.count(1)

        def forward(self, x):
            return change(self.net, x) if next(self.calls) % 3 == 0 else self.net(x)

    return Sometimes


def rounded(net, x):
    output = net(x)
    return output if x.dtype is torch.float64 else output.bfloat16().to(x.dtype)


def with_half_the_digits(net, x):
    return net(x) if x.dtype is torch.float64 else net(x.half().to(x.dtype))


@pytest.mark.parametrize("change", [rounded, with_half_the_digits])
def test_what_rounds_more_in_every_third_update_alone_is_not_close(change):
    def wrapped(inner):
        return lambda: Loop(net=every_third(inner))()

    verdict = verify(wrapped(lambda net, x: net(x)), wrapped(change), BATCHES, Close())
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "single updates" in str(verdict)


def test_the_settings_that_a_change_makes_are_part_of_the_evidence():
    def changed():
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
        torch.set_flush_denormal(True)
        return Loop()()

    evidence = verify(Loop(), changed, BATCHES, Exact()).evidence["contract"]
    assert evidence["settings"] == {
        "fp32_precision of mkldnn, conv": ["'none'", "'bf16'"],
        "torch.set_flush_denormal": ["False", "True"],
    }
    assert torch.backends.mkldnn.conv.fp32_precision == "none"
