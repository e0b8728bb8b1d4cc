"""The contract Exact, judged on loops in plain PyTorch."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import Counter, Loop, Net, batches
from torch import nn

from runner.proof import Outcome, Subject, exact
from runner.proof.isolation import StepError

BATCHES = batches(4)


def nudged(number, change):
    """A loop that does something of its own after one of its updates; ``change`` gets model and optimizer."""

    def build():
        subject = Loop(named=True)()
        done = iter(range(1, 1000))

        def step(batch):
            output = subject.step(batch)
            if next(done) == number:
                with torch.no_grad():
                    change(subject.state["model"], subject.state["optimizer"])
            return output

        return Subject(step, subject.state, watch=subject.watch)

    return build


def judge(changed, baseline=None):
    verdict = exact(baseline or Loop(), changed, BATCHES)
    json.dumps(verdict.evidence, allow_nan=False)
    return verdict


def test_the_same_loop_has_the_same_bits():
    verdict = judge(Loop())
    assert verdict.outcome is Outcome.PASS, verdict
    parameters, buffers, moments_and_step, outputs = 6, 1, 6 * 3, 2
    assert verdict.evidence["tensors"] >= 2 * parameters + buffers + moments_and_step + outputs
    assert verdict.evidence["updates"] == len(BATCHES)


@pytest.mark.parametrize(
    "changed",
    [
        Loop(options={"lr": 1e-2, "foreach": True}),
        Loop(forgets=True),
        Loop(net=lambda: torch.compile(Net(), backend="eager")),
        Loop(backward=lambda loss: (loss * 2).div(2).backward()),
    ],
    ids=["another loop over parameters", "gradients forgotten", "another name for a module", "scaled and back"],
)
def test_what_changes_no_bit_passes(changed):
    verdict = judge(changed)
    assert verdict.outcome is Outcome.PASS, verdict


@given(
    name=st.sampled_from(["hidden.weight", "norm.bias", "head.weight"]),
    update=st.integers(1, len(BATCHES)),
    place=st.integers(0, 3),
    exponent=st.integers(-12, 4),
)
def test_one_element_of_one_parameter_is_found(name, update, place, exponent):
    def change(model, optimizer):
        parameter = model.get_parameter(name).view(-1)
        parameter[place] += 2.0**exponent

    verdict = judge(nudged(update, change), Loop(named=True))
    difference = verdict.evidence["difference"]
    assert verdict.outcome is Outcome.FAIL
    assert (difference["update"], difference["tensor"], difference["elements"]) == (update, f"model.{name}", 1)
    assert difference["absolute"] == pytest.approx(2.0**exponent, rel=1e-2, abs=1e-6)


def test_the_slot_is_named_where_slots_tell():
    def to_float64(model, x):
        return model(x) * (1 + 1e-6)

    assert "update 1, slot 'forward': 'output' differs" in str(
        judge(Loop(forward=to_float64, named=True), Loop(named=True))
    )
    assert "update 1, slot 'step': 'loss' differs" in str(judge(Loop(forward=to_float64)))


def test_gradients_are_compared_also_where_they_are_forgotten_and_change_nothing():
    still = {"lr": 0.0}
    wrong = Loop(options=still, optimizer=torch.optim.SGD, forgets=True, backward=lambda loss: (loss * 3).backward())
    verdict = judge(wrong, Loop(options=still, optimizer=torch.optim.SGD, forgets=True))
    assert "update 1, slot 'step': 'model.hidden.weight.grad' differs" in str(verdict)
    assert verdict.evidence["difference"]["relative"] == pytest.approx(2, rel=0.1)


def test_zero_and_minus_zero_are_not_the_same_bits_and_a_nan_is_its_own():
    def minus(model, optimizer):
        model.norm.bias.zero_().neg_()

    def zero(model, optimizer):
        model.norm.bias.zero_()

    def nan(model, optimizer):
        model.norm.bias.fill_(float("nan"))

    verdict = judge(nudged(4, minus), nudged(4, zero))
    assert verdict.evidence["difference"]["absolute"] == 0
    assert verdict.evidence["difference"]["elements"] == 8
    assert judge(nudged(2, nan), nudged(2, nan))
    assert judge(nudged(4, nan), nudged(4, zero)).evidence["difference"]["absolute"] == "Infinity"


def test_numbers_texts_and_whole_tensors_of_the_state_count():
    def counting(**values):
        def build():
            subject = Loop()()
            return Subject(subject.step, {**subject.state, "counter": Counter(**values)})

        return build

    assert judge(counting(count=3, note="a"), counting(count=3, note="a"))
    for changed, found in (
        (counting(count=4, note="a"), "'counter.count' differs by 1 "),
        (counting(count=3, note="b"), "'counter.note' is 'b' instead of 'a'"),
        (counting(count=3, note=None), "'counter.note' is missing"),
        (counting(count=torch.tensor(3), note="a"), "'counter.count'"),
        (counting(note="a"), "'counter.count' is missing"),
    ):
        verdict = judge(changed, counting(count=3, note="a"))
        assert verdict.outcome is Outcome.FAIL
        assert f"before the first update: {found}" in str(verdict)
    wide = counting(count=torch.zeros(2, dtype=torch.float64))
    assert "is of type torch.float64 instead of torch.float32" in str(judge(wide, counting(count=torch.zeros(2))))
    longer = counting(count=torch.zeros(3))
    assert "is a tensor of shape (3,) instead of a tensor of shape (2,)" in str(
        judge(longer, counting(count=torch.zeros(2)))
    )


def test_a_part_that_only_one_has_is_not_compared_and_said():
    def build():
        subject = Loop()()
        return Subject(subject.step, {**subject.state, "counter": Counter(count=1)})

    assert judge(build).evidence["not_compared"] == ["counter"]
    assert judge(Loop(), build).evidence["not_compared"] == ["counter"]
    with pytest.raises(ValueError, match="nothing to compare: the baseline's state has the parts"):
        judge(lambda: Subject(print, {"counter": Counter(count=1)}))


def test_a_scheduler_that_lags_is_found():
    def lagging():
        subject = Loop(schedule=True)()
        subject.state["scheduler"].step = lambda: None
        return subject

    verdict = judge(lagging, Loop(schedule=True))
    assert verdict.evidence["difference"]["update"] == 1
    assert verdict.evidence["difference"]["tensor"] == "rate"


def test_parameters_of_16_bits_are_compared_by_bits():
    def half(model, x):
        return model(x.bfloat16()).float()

    def build():
        return Net().bfloat16()

    assert judge(Loop(net=build, forward=half), Loop(net=build, forward=half))
    verdict = judge(Loop(net=build, forward=half, options={"lr": 1.1e-2}), Loop(net=build, forward=half))
    assert verdict.outcome is Outcome.FAIL


def test_an_optimizer_without_state_is_compared():
    sgd = {"optimizer": torch.optim.SGD, "options": {"lr": 0.1}}
    assert judge(Loop(**sgd), Loop(**sgd))
    assert "before the first update: 'optimizer.param_groups.0.momentum' differs by 0.9" in str(
        judge(Loop(optimizer=torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9}), Loop(**sgd))
    )


def test_another_start_is_said_to_be_one():
    class Other(Net):
        def __init__(self):
            super().__init__()
            nn.init.zeros_(self.head.bias)

    assert "before the first update: 'model.head.bias' differs" in str(judge(Loop(net=Other)))


def test_global_generators_are_seeded_alike_and_left_alone():
    def noisy(model, x):
        return model(x + torch.randn_like(x) + random.random() + np.random.rand())

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert judge(Loop(forward=noisy), Loop(forward=noisy))
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_a_setting_of_the_whole_process_reaches_neither_the_baseline_nor_anybody_else():
    def build():
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)
        seen.append(torch.get_float32_matmul_precision())
        return Loop()()

    def baseline():
        seen.append(torch.get_float32_matmul_precision())
        return Loop()()

    seen = []
    exact(baseline, build, BATCHES)
    exact(baseline, build, BATCHES)
    assert seen == ["highest", "medium", "highest"] * 2
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_step_that_changes_its_batch_changes_nobody_else_s():
    def greedy(model, x):
        output = model(x)
        x.data.zero_()
        return output

    own = batches(2)
    exact(Loop(forward=greedy), Loop(forward=greedy), own)
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(own, batches(2), strict=True))


def test_a_baseline_that_does_not_repeat_itself_is_no_measure():
    counter = iter(range(1000))

    def drifting(model, x):
        return model(x) + next(counter)

    verdict = judge(Loop(), Loop(forward=drifting))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the same is not the same twice: update 1, slot 'step': 'loss' differs" in str(verdict)


def test_a_changed_step_that_raises_fails_and_a_baseline_that_raises_is_the_user_s_to_mend():
    def broken(model, x):
        raise ZeroDivisionError("no way")

    verdict = judge(Loop(forward=broken))
    assert verdict.outcome is Outcome.FAIL
    assert "update 1: the changed step raises ZeroDivisionError: no way (test_exact_check.py:" in str(verdict)
    with pytest.raises(StepError, match="ZeroDivisionError: no way"):
        judge(Loop(), Loop(forward=broken))


def test_no_batch_is_no_comparison():
    with pytest.raises(ValueError, match="nothing to compare: no batch"):
        exact(Loop(), Loop(), [])


def test_more_outputs_than_the_baseline_s_do_no_harm_but_fewer_do():
    def told(**more):
        def build():
            subject = Loop()()
            return Subject(lambda batch: subject.step(batch) | more, subject.state)

        return build

    assert judge(told(norm=1.0))
    assert "'norm' is missing" in str(judge(Loop(), told(norm=1.0)))
