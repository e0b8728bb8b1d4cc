"""What only pretends to train has no ratio; what trains otherwise rounded, or with other random numbers, has one."""

import math
import sys

import pytest
import torch
from loops import Loop, Net, batches
from torch import nn

from runner.plugin.contract import Statistical
from runner.proof import Close, Subject, clock, warm_up

MODULE = sys.modules["runner.proof.interleaved_timing"]
BATCHES = batches(6)
OPTIMIZERS = [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Blocks and warm-ups are a few steps long."""
    monkeypatch.setattr(MODULE, "BLOCK_SECONDS", 1e-9)
    monkeypatch.setattr(warm_up, "WINDOW_SECONDS", 1e-9)


def timed(baseline, changed, given=BATCHES, contract=Close()):  # noqa: B008 (it is frozen)
    return clock(baseline, changed, given, rounds=5, seconds=0.0, contract=contract)


def faked(fake, optimizer=torch.optim.Adam, after=0):
    """A loop whose step is replaced by the fake after some updates."""

    def build():
        subject = Loop(optimizer=optimizer)()
        steps, last = [], []

        def step(batch):
            steps.append(None)
            if len(steps) <= after + 1 or not fake(len(steps)):
                last[:] = [subject.step(batch)]
            return last[0]

        return Subject(step, subject.state)

    return build


FAKES = {
    "skips every second update": lambda number: number % 2 == 0,
    "skips every third update": lambda number: number % 3 == 0,
    "replays a result": lambda number: True,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("after", [0, 9])
@pytest.mark.parametrize("fake", FAKES)
def test_a_fake_has_no_ratio(fake, after, optimizer):
    timing = timed(Loop(optimizer=optimizer), faked(FAKES[fake], optimizer, after))
    assert "did not change in" in timing.caught
    assert timing.effect == "invalid"
    assert math.isnan(timing.ratio.value)
    assert math.isnan(timing.total)
    assert str(timing).startswith("invalid: the change does other work than the baseline, so it has no ratio: ")
    assert "x [" not in str(timing)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fake_that_promises_other_updates_has_to_make_as_many(optimizer):
    fake = faked(FAKES["skips every second update"], optimizer)
    assert "did not change in" in timed(Loop(optimizer=optimizer), fake, contract=Statistical()).caught


class Uncounted(Net):
    """A network without a counter."""

    def __init__(self):
        super().__init__()
        del self.seen
        self.seen = 0


def test_an_old_gradient_is_no_new_one():
    def build(net=Net):
        subject = Loop(net=net)()
        steps = []

        def step(batch):
            steps.append(None)
            if len(steps) % 2:
                steps[:1] = [subject.step(batch)]
            else:
                subject.state["optimizer"].step()
            return {"loss": steps[0]["loss"] + 1e-6 * len(steps)}

        return Subject(step, subject.state)

    assert "the counter 'model.seen' advanced by 6, the baseline's by 12" in timed(Loop(), build).caught
    assert "of the baseline's way" in timed(Loop(net=Uncounted), lambda: build(Uncounted)).caught


def test_a_part_of_the_batch_is_not_the_batch():
    def halved(model, x):
        prediction = model(x)
        return torch.cat([prediction[:8], prediction[:8].detach()])

    assert "of the baseline's way" in timed(Loop(), Loop(forward=halved)).caught


def test_an_answer_that_is_returned_again_is_caught_without_any_state():
    answers = []

    def answer(batch):
        answers.append(batch["x"].sum())
        return answers[0]

    timing = timed(lambda: Subject(lambda batch: batch["x"].sum(), {}), lambda: Subject(answer, {}))
    assert "returned the result of another one" in timing.caught


KEYS = {
    "content": lambda batch: tuple(batch["x"].flatten().tolist()),
    "sum": lambda batch: float(batch["x"].sum()),
    "first number": lambda batch: float(batch["x"][0, 0]),
    "object": id,
    "address": lambda batch: batch["x"].data_ptr(),
}


@pytest.mark.parametrize("given", [BATCHES, BATCHES[:1], lambda: BATCHES[0]], ids=["six", "one", "a function"])
@pytest.mark.parametrize("key", KEYS)
def test_a_cache_of_the_last_eight_batches_is_never_hit(key, given):
    is_hit = []

    def build():
        subject = Loop()()
        kept = {}

        def step(batch):
            name = KEYS[key](batch)
            is_hit.append(name in kept)
            kept[name] = batch  # which no other object can be meanwhile
            while len(kept) > 8:
                del kept[next(iter(kept))]
            return subject.step(batch)

        return Subject(step, subject.state)

    timing = timed(Loop(), build, given)
    assert timing.caught == ""
    # A batch of 16 rows has 16 first numbers, and the last eight are kept: two of five are hits on average.
    assert sum(is_hit) <= (0 if key != "first number" else 0.75 * len(is_hit))


def dropped(share, seed_offset=0):
    """A loop with dropout, whose masks may be others than the baseline's."""

    def build():
        subject = Loop(forward=lambda model, x: nn.functional.dropout(model(x), share))()

        def step(batch):
            torch.rand(seed_offset)
            return subject.step(batch)

        return Subject(step, subject.state)

    return build


def mixed(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sixteen_bits_and_other_kernels_do_the_work(optimizer):
    options = {"lr": 1e-2, "foreach": True}
    for changed in (Loop(optimizer=optimizer, forward=mixed), Loop(optimizer=optimizer, options=options)):
        timing = timed(Loop(optimizer=optimizer), changed)
        assert timing.caught == ""
        assert timing.compared == 12
        assert timing.ratio.value > 0


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_other_random_numbers_do_the_work(share):
    assert timed(dropped(share), dropped(share, seed_offset=1)).caught == ""


def delayed(every, skips=False):
    """Steps its optimizer in every few updates only, as counted outside of the state."""

    def build():
        subject = Loop()()
        model, optimizer = subject.state.values()
        calls = []

        def step(batch):
            calls.append(None)
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"]) / every
            loss.backward()
            if len(calls) % every == 0 and not (skips and len(calls) % (2 * every) == 0):
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return Subject(step, subject.state)

    return build


@pytest.mark.parametrize("every", [2, 3, 5])
def test_what_happens_in_every_few_updates_happens_in_both(every):
    assert timed(delayed(every), delayed(every)).caught == ""


def test_an_optimizer_that_is_no_part_of_the_state_is_named_and_skips_are_still_caught():
    def build(fake=None):
        whole = (faked(fake) if fake else Loop())()
        return Subject(whole.step, {"model": whole.state["model"]})

    timing = timed(build, build)
    assert timing.not_compared == "an optimizer that steps is missing in the state"
    assert timing.caught == ""
    fake = FAKES["skips every second update"]
    assert "did not change in" in timed(build, lambda: build(fake)).caught


def test_a_state_that_the_baseline_cannot_load_is_named():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = nn.Linear(4, 9)
            self.head = nn.Linear(9, 1)

        def forward(self, x):
            return self.head(self.hidden(x))

    timing = timed(Loop(), Loop(net=Wide))
    assert timing.not_compared.startswith("the baseline cannot load the state of the change: RuntimeError")


def test_the_baseline_keeps_its_numbers_where_nothing_is_trained():
    """A model with other weights answers otherwise, and the baseline is never given them."""

    def build(scale):
        def made():
            torch.manual_seed(0)
            model = nn.Linear(4, 2)
            with torch.no_grad():
                model.weight.mul_(scale)
            return Subject(lambda batch: model(batch["x"]).detach(), {"model": model})

        return made

    assert timed(build(1.0), build(1.0)).caught == ""
    assert "output 'output' differs by" in timed(build(1.0), build(2.0)).caught
    assert timed(build(1.0), build(2.0), contract=Statistical()).caught == ""
