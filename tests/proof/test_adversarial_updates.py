"""What remembers batches by where they are, and what is wrong only where numbers are at their ends, is found out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import Loop, batches, forward
from torch import nn

from runner.proof import Close, Exact, Outcome, Subject, verify
from runner.proof.adversarial_updates import adversarial_cases, compare_extreme_cases, compare_hidden_numbers

BATCHES = batches(4)
PROMISES = [Exact(), Close()]


def remembering(key):
    """A forward that keeps a copy of its input by something that does not say what is in it."""
    kept = {}

    def remembered(model, x):
        found = kept.setdefault(key(x), x.clone())
        return model(found)

    return remembered


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(
    "key", [id, torch.Tensor.data_ptr, lambda x: (x.data_ptr(), x._version)], ids=["object", "address", "version"]
)
def test_a_cache_by_object_or_address_fails(key, promise):
    verdict = verify(Loop(), lambda: Loop(forward=remembering(key))(), BATCHES, promise)
    assert verdict.outcome is Outcome.FAIL
    assert "with another batch in the memory of the one before, " in verdict.summary
    assert "slot 'step': 'loss'" in verdict.summary


@pytest.mark.parametrize("promise", PROMISES)
def test_a_cache_of_tensors_by_the_batch_that_they_were_in_fails(promise):
    def build():
        subject, kept = Loop()(), {}
        step = subject.step
        subject.__dict__["step"] = lambda batch: step({**batch, "y": kept.setdefault(id(batch), batch["y"])})
        return subject

    verdict = verify(Loop(), build, BATCHES, promise)
    assert verdict.outcome is Outcome.FAIL
    assert "with another batch in the objects of the one before, " in verdict.summary


@pytest.mark.parametrize("promise", PROMISES)
def test_a_clamp_that_no_batch_reaches_fails(promise):
    verdict = verify(Loop(), Loop(forward=lambda model, x: model(x.clamp(-6, 6))), BATCHES, promise)
    assert verdict.outcome is Outcome.FAIL
    assert "with a batch 10 times as large, " in verdict.summary


def test_a_clamp_for_float32_alone_that_no_batch_reaches_fails():
    clamped = Loop(forward=lambda model, x: model(x.clamp(-6, 6) if x.dtype == torch.float32 else x))
    verdict = verify(Loop(), clamped, BATCHES, Close())
    assert verdict.outcome is Outcome.FAIL
    assert "with a batch 10 times as large, rounds more than the baseline: " in verdict.summary


def test_what_overflows_in_its_own_precision_alone_is_not_clear():
    largest = torch.finfo(torch.float32).max
    overflowing = Loop(forward=lambda model, x: model((x * (largest / 20)) / (largest / 20)))
    verdict = verify(Loop(), overflowing, BATCHES, Close())
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "with a batch 10 times as large, it overflows in its original precision, unlike the baseline" in str(verdict)


@pytest.mark.parametrize("promise", PROMISES)
def test_a_bound_that_no_state_reaches_fails(promise):
    def bounded(model, x):
        with torch.no_grad():
            model.hidden.weight.clamp_(-0.8, 0.8)
        return forward(model, x)

    verdict = verify(Loop(), Loop(forward=bounded), BATCHES, promise)
    assert verdict.outcome is Outcome.FAIL
    assert "with a state 10 times as large, " in verdict.summary


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(("least", "turn"), [(-4.0, "with biases 10 less, "), (None, "with biases 3 more, ")])
def test_a_bound_of_what_begins_as_zero_fails(promise, least, turn):
    def bounded(model, x):
        model.norm.bias.data.clamp_(least, None if least else 2.0)
        return model(x)

    verdict = verify(Loop(), Loop(forward=bounded), BATCHES, promise)
    assert verdict.outcome is Outcome.FAIL
    assert turn in verdict.summary


def descending(make, loss):
    """Gradient descent on a model with one loss."""

    def build():
        torch.manual_seed(3)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad()
            found = loss(model, batch)
            found.backward()
            optimizer.step()
            return found.detach()

        return Subject(step, {"model": model, "optimizer": optimizer})

    return build


def looked_up(harm):
    """A loop that reads numbers of rows, of which batches hold few."""

    def loss(model, batch):
        rows = torch.where(batch["row"] == 13, 14, batch["row"]) if harm else batch["row"]
        return (model(rows) - batch["y"]).square().sum()

    return descending(lambda: nn.EmbeddingBag(50, 1), loss)


@pytest.mark.parametrize("promise", PROMISES)
def test_whole_numbers_that_no_batch_holds_come_too(promise):
    rows = torch.tensor([7, 0, 49, 3, 20]).repeat(16, 10)
    given = [{"row": rows, "y": batch["y"]} for batch in BATCHES]
    assert verify(looked_up(False), looked_up(False), given, promise)
    verdict = verify(looked_up(False), looked_up(True), given, promise)
    assert verdict.outcome is Outcome.FAIL
    assert "with other integers in the batch, " in verdict.summary


@pytest.mark.parametrize("parts", [[0, 3, 9, 16], [7, 2, 4, 3]])
def test_whole_numbers_that_say_where_parts_begin_or_how_long_they_are_stay(parts):
    def build():
        subject = Loop()()

        def step(batch):
            assert batch["parts"].tolist() == parts
            return subject.step(batch)

        return Subject(step, subject.state)

    given = BATCHES[-1] | {"parts": torch.tensor(parts)}
    assert compare_extreme_cases(Loop(), build, given, "Exact", 0, float64=False)


@pytest.mark.parametrize("promise", PROMISES)
def test_who_hides_what_is_not_a_number_does_not_pass(promise):
    class Quiet(torch.optim.Adam):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.nan_to_num_()
            return super().step(closure)

    verdict = verify(Loop(), Loop(optimizer=Quiet), BATCHES, promise)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.summary.startswith("with NaN in the batch, update 1, slot 'step': 'state' stays finite")


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 4), data=st.data())
def test_nan_that_is_hidden_in_one_tensor_of_a_batch_is_seen(count, data):
    """A NaN in any other tensor reaches the state all the same."""
    quiet = data.draw(st.integers(0, count - 1))
    names = [f"x{number}" for number in range(count)]

    def build(hides=None):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            parts = [tensor.nan_to_num() if name == hides else tensor for name, tensor in batch.items()]
            optimizer.zero_grad()
            loss = sum(model(part).square().mean() for part in parts)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Subject(step, {"model": model, "optimizer": optimizer})

    batch = {name: torch.randn(3, 2) for name in names}
    verdict = compare_hidden_numbers(build, lambda: build(names[quiet]), batch, "Exact", 0)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    if count == 1:
        assert compare_hidden_numbers(build, build, batch, "Exact", 0)


HIDES = {
    "a limit of the loss": lambda loss: loss.clamp(max=1e6),
    "a number for infinity": lambda loss: loss.nan_to_num(nan=math.nan, posinf=1e4),
    "a skipped update": lambda loss: torch.where(loss.isinf(), 0 * loss.detach().nan_to_num(posinf=0.0), loss),
    "nothing": lambda loss: loss,
}
"""What a loss function does with infinity; none of it changes NaN or any number of the training."""


@pytest.mark.parametrize("hides", HIDES)
def test_infinity_that_is_hidden_is_seen(hides):
    def build(change):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad()
            loss = change(batch["cost"].mean() + model(batch["x"]).square().mean())
            (loss * model.bias.sum().abs()).backward()
            optimizer.step()
            return loss.detach()

        return Subject(step, {"model": model, "optimizer": optimizer})

    batch = {"cost": torch.rand(3), "x": torch.randn(3, 2)}
    verdict = compare_hidden_numbers(lambda: build(HIDES["nothing"]), lambda: build(HIDES[hides]), batch, "Exact", 0)
    if hides == "nothing":
        assert verdict
    else:
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert verdict.summary.startswith("with infinity in the batch, update 1, slot 'step': 'state' stays finite")


def masked(harm):
    """A loop whose batches say which samples count; so far all of them do."""

    def loss(model, batch):
        mask = torch.ones_like(batch["mask"]) if harm else batch["mask"]
        return ((model(batch["x"]) - batch["y"]).square() * mask).sum()

    return descending(lambda: nn.Linear(4, 1), loss)


@pytest.mark.parametrize("promise", PROMISES)
def test_a_flag_that_is_the_same_in_all_batches_is_turned(promise):
    given = [batch | {"mask": torch.ones(16, 1)} for batch in BATCHES]
    assert verify(masked(False), masked(False), given, promise)
    verdict = verify(masked(False), masked(True), given, promise)
    assert verdict.outcome is Outcome.FAIL
    assert "with every flag of the batch 0, " in verdict.summary


def dropped_mask(share):
    """A loop that leaves out a mask with more than a share of ones."""

    def loss(model, batch):
        mask = batch["mask"]
        if share < mask.mean() < 1:
            mask = torch.ones_like(mask)
        return (model(batch["x"]).square() * mask).sum()

    return descending(lambda: nn.Linear(8, 8), loss)


@settings(max_examples=50, deadline=None)
@given(share=st.floats(0.6, 0.98), rows=st.integers(8, 16))
def test_a_mask_that_is_dropped_when_it_is_nearly_full_fails(share, rows):
    generator = torch.Generator().manual_seed(rows)
    mask = (torch.rand(rows, 8, generator=generator) < 0.5).float()
    batch = {"x": torch.randn(rows, 8, generator=generator), "mask": mask}
    verdict = compare_extreme_cases(dropped_mask(1.0), dropped_mask(share), batch, "Exact", 0, float64=False)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.summary.startswith("with every flag of the batch 1 but one, ")


@pytest.mark.parametrize("float64", [False, True])
def test_where_the_baseline_is_not_finite_nothing_is_asked(float64):
    def logarithm(model, x):
        return model(x) + 0 * (10 - x.abs().max()).log()

    def unlike(model, x):
        return model(x) if x.abs().max() < 10 else 2 * model(x)

    assert compare_extreme_cases(Loop(forward=logarithm), Loop(forward=unlike), BATCHES[-1], "Close", 0, float64)
    found = compare_extreme_cases(Loop(), Loop(forward=unlike), BATCHES[-1], "Close", 0, float64)
    assert found.summary.startswith("with a batch 10 times as large, not the same ")


def test_who_raises_at_an_end_fails():
    def strict(model, x):
        assert x.abs().max() < 10
        return model(x)

    found = compare_extreme_cases(Loop(), Loop(forward=strict), BATCHES[-1], "Exact", 0, float64=False)
    assert "with a batch 10 times as large, the changed step raises AssertionError" in found.summary


def recurrent(last_step):
    """Iterates a sine, which is chaotic where weights are large: 60 times rounding is larger than the numbers."""

    def iterated(model, x):
        factor = model.hidden.weight.abs().max()
        y = model(x)
        for _ in range(60):
            y = torch.sin(factor * y)
        return last_step(y, factor)

    return iterated


@pytest.mark.parametrize("units", [1, 2, 3, 5, -2])
@pytest.mark.parametrize("batch", BATCHES)
def test_rounding_that_a_chaotic_baseline_magnifies_is_no_difference(units, batch):
    baseline = Loop(forward=recurrent(lambda y, _: y))
    rounding = Loop(forward=lambda model, x: recurrent(lambda y, _: y)(model, x * (1 + units * 2**-52)))
    assert compare_extreme_cases(baseline, rounding, batch, "Close", 0, float64=True)


def test_what_a_chaotic_baseline_does_not_explain_is_a_difference():
    baseline = Loop(forward=recurrent(lambda y, _: y))
    wrong = Loop(forward=recurrent(lambda y, factor: torch.where(factor > 20, 1e3 * y, y)))
    found = compare_extreme_cases(baseline, wrong, BATCHES[-1], "Close", 0, float64=True)
    assert found.outcome is Outcome.FAIL
    assert "with a state 100 times as large, not the same algebra" in found.summary


def test_signs_of_zeros_and_what_has_vanished_say_nothing_at_an_end():
    class Negative(torch.optim.Adam):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.grad += 0.0  # is 0 where it was -0
            return super().step(closure)

    assert compare_extreme_cases(Loop(), Loop(optimizer=Negative), BATCHES[-1], "Exact", 0, float64=False)


def test_a_single_batch_comes_again_and_in_no_other_place():
    assert len(adversarial_cases(Loop(), BATCHES[:1], 0, float64=False)) == 2
    assert len(adversarial_cases(Loop(), BATCHES, 0, float64=False)) == 4
