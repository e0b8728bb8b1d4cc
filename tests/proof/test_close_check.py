"""The contract Close, judged on loops in plain PyTorch."""

import itertools
import json
import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import Counter, Loop, Net, batches
from torch import nn

from runner.proof import Close, Exact, Outcome, Subject, close, verify
from runner.proof.isolation import StepError

BATCHES = batches(6)


def judge(changed, baseline=None, **options):
    verdict = close(baseline or Loop(), changed, BATCHES, **options)
    json.dumps(verdict.evidence, allow_nan=False)
    return verdict


class Normed(nn.Sequential):
    """The bias before batch normalisation has a gradient of zero, of which only rounding is left."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class Plain(nn.Sequential):
    """Counts nothing."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


class Pixels(nn.Sequential):
    """Normalises many numbers at once, which a CPU adds up with more digits in one memory format than in the other."""

    def __init__(self, memory=torch.contiguous_format):
        parts = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
        self.memory = memory

    def forward(self, x):
        image = (x[:, :, None] * torch.linspace(-3, 3, 256, dtype=x.dtype)).reshape(-1, 4, 16, 16).cos()
        return super().forward(image.contiguous(memory_format=self.memory))


def split(model, x):
    return torch.cat([model(half) for half in x.chunk(2)])


HONEST = {
    "fused": (Loop(options={"lr": 1e-2, "fused": True}), Loop()),
    "fused, forgotten gradients, schedule": (
        Loop(options={"lr": 1e-2, "fused": True}, forgets=True, schedule=True),
        Loop(forgets=True, schedule=True),
    ),
    "momentum": (
        Loop(optimizer=torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9, "fused": True}),
        Loop(optimizer=torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9}),
    ),
    "no optimizer state": (
        Loop(optimizer=torch.optim.SGD, options={"lr": 0.1, "fused": True}),
        Loop(optimizer=torch.optim.SGD, options={"lr": 0.1}),
    ),
    "half batches": (Loop(net=Plain, forward=split), Loop(net=Plain)),
    "other sums": (Loop(backward=lambda loss: (loss / 3 + loss * (2 / 3)).backward()), Loop()),
    "Nesterov for each, which writes over gradients": (
        Loop(optimizer=torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
        Loop(optimizer=torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ),
    "another name": (Loop(net=lambda: torch.compile(Net(), backend="eager")), Loop()),
    "sums with fewer digits": (Loop(net=partial(Pixels, torch.channels_last)), Loop(net=Pixels)),
    "a gradient of rounding alone": (
        Loop(net=Normed, backward=lambda loss: (loss / 3 + loss * (2 / 3)).backward()),
        Loop(net=Normed),
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_the_same_algebra_passes(name):
    changed, baseline = HONEST[name]
    verdict = judge(changed, baseline)
    assert verdict.outcome is Outcome.PASS, verdict
    assert verdict.evidence["states"] == len(BATCHES)
    assert max(verdict.evidence["rounding"].values()) <= 2


@given(st.floats(1e-7, 1e-2), st.sampled_from([-1, 1]))
def test_a_loss_that_is_a_little_off_fails_in_its_gradient(amount, sign):
    factor = 1 + sign * amount
    verdict = judge(Loop(backward=lambda loss: (loss * factor).backward(), named=True), Loop(named=True))
    assert verdict.outcome is Outcome.FAIL
    assert "in float64, update 1, slot 'backward': 'model.hidden.weight.grad' differs" in str(verdict)
    assert verdict.evidence["difference"]["relative"] == pytest.approx(amount, rel=1e-3)


def test_a_factor_that_all_gradients_have_in_float32_alone_is_no_rounding_of_sums():
    scaled = Loop(
        net=Pixels, backward=lambda loss: (loss if loss.dtype == torch.float64 else loss * 1.00001).backward()
    )
    verdict = judge(scaled, Loop(net=Pixels))
    assert verdict.outcome is Outcome.FAIL
    assert "all gradients are off by the factor 1e-05 in the median of" in verdict.summary
    assert ".weight.grad' differs by" in verdict.summary


def test_less_precision_is_not_only_other_rounding():
    def bf16(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).to(x.dtype)

    verdict = judge(Loop(forward=bf16, named=True), Loop(named=True))
    assert verdict.outcome is Outcome.FAIL
    assert "slot 'forward': 'output' differs" in str(verdict)
    assert verdict.evidence["rounding"]["outputs"] > 100
    assert judge(Loop(forward=bf16), Loop(forward=bf16)), "it is the baseline that is the measure"


def test_an_optimizer_that_rounds_its_moments_is_found():
    class Rough(torch.optim.Adam):
        def step(self, closure=None):
            super().step(closure)
            for entry in self.state.values():
                if entry["exp_avg"].dtype == torch.float32:
                    entry["exp_avg"] = entry["exp_avg"].bfloat16().float()

    verdict = judge(Loop(optimizer=Rough))
    assert verdict.outcome is Outcome.FAIL
    assert "'exp_avg' of the state" in str(verdict)
    assert "exp_avg' differs by" in str(verdict)


def test_kernels_stay_with_the_optimizer_that_has_them_when_a_state_moves():
    subjects = []

    def fused():
        subjects.append(Loop(options={"lr": 1e-2, "fused": True})())
        return subjects[-1]

    assert judge(fused)
    assert all(subject.state["optimizer"].param_groups[0]["fused"] for subject in subjects)
    assert len(subjects) == 2, "one in float64, and one for single updates"


def test_a_number_that_is_none_is_never_close():
    def broken(model, x):
        return model(x) * (float("nan") if x.dtype == torch.float32 else 1.0)

    verdict = judge(Loop(forward=broken))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.evidence["rounding"]["outputs"] == "Infinity"


def test_a_baseline_of_another_kind_in_float64_is_no_measure():
    def noisy(model, x):
        return model(x) + torch.randn_like(x)[:, :1]

    verdict = judge(Loop(forward=noisy), Loop(forward=noisy))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "draw them before and hand them in with the batch" in str(verdict)

    def moody(model, x):
        return model(x) * (1 if x.dtype == torch.float64 else -1)

    verdict = judge(Loop(forward=moody), Loop(forward=moody))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "computes something else there" in str(verdict)


def test_what_cannot_be_had_in_float64_is_inconclusive():
    def half(model, x):
        return model(x.bfloat16()).to(x.dtype)

    def build():
        return Net().bfloat16()

    verdict = judge(Loop(net=build, forward=half), Loop(net=build, forward=half))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "in float64 the baseline raises RuntimeError" in str(verdict)

    def stubborn():
        subject = Loop()()
        frozen = nn.Parameter(torch.zeros(1, dtype=torch.float32))
        return Subject(subject.step, subject.state, parameters=lambda: [("w", frozen)])

    def unknown():
        if torch.get_default_dtype() == torch.float64:
            raise TypeError("no float64 here")
        return Loop()()

    assert "in float64 the baseline raises TypeError: no float64 here" in str(judge(unknown, unknown))
    verdict = judge(stubborn, stubborn)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "'w' is still torch.float32; build it in the default type" in str(verdict)


def test_a_step_that_fails_in_float64_alone_is_inconclusive_and_one_that_always_fails_a_failure():
    def narrow(model, x):
        if x.dtype == torch.float64:
            raise TypeError("float32 only")
        return model(x)

    def broken(model, x):
        raise TypeError("never")

    verdict = judge(Loop(forward=narrow))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "in float64 the changed step raises TypeError: float32 only" in str(verdict)
    verdict = judge(Loop(forward=broken))
    assert verdict.outcome is Outcome.FAIL
    assert "the changed step raises TypeError: never" in str(verdict)
    with pytest.raises(StepError):
        judge(Loop(), Loop(forward=broken))


def test_a_baseline_that_does_not_repeat_itself_is_no_measure():
    counter = iter(range(1000))

    def drifting(model, x):
        return model(x) + next(counter)

    verdict = judge(Loop(), Loop(forward=drifting))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "make it deterministic" in str(verdict)


def test_the_default_type_and_the_batches_are_left_alone():
    own = batches(2)
    close(Loop(), Loop(options={"lr": 1e-2, "fused": True}), own)
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(own, batches(2), strict=True))


@pytest.mark.parametrize(("states", "expected"), [(1, 1), (3, 3), (12, 6)])
def test_states_are_spread_over_the_way(states, expected):
    assert judge(Loop(), states=states).evidence["states"] == expected


def test_no_batch_is_no_comparison():
    with pytest.raises(ValueError, match="nothing to compare: no batch"):
        close(Loop(), Loop(), [])


def test_a_baseline_that_rounds_in_float64_is_no_measure_of_rounding_but_still_one_of_what_is_wrong():
    def rounded(model, x):
        return model(x).float()

    def in_thirds(model, x):
        prediction = model(x).float()
        return prediction / 3 + prediction * (2 / 3)

    def wrong(model, x):
        return 1.001 * model(x).float()

    baseline = Loop(forward=rounded, named=True)
    assert judge(baseline, baseline)
    verdict = judge(Loop(forward=in_thirds, named=True), baseline)
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict
    assert re.search(
        r"itself rounds to torch.float32 \(test_close_check.py:\d+, in rounded\); cast to the w", str(verdict)
    )
    assert judge(Loop(forward=wrong, named=True), baseline).outcome is Outcome.FAIL
    assert judge(baseline, Loop(named=True)).outcome is Outcome.FAIL, "this baseline does not round"


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
@pytest.mark.parametrize("contract", [Exact(), Close()])
def test_sparse_gradients_are_compared(optimizer, contract):
    class Embedded(nn.Embedding):
        def __init__(self):
            super().__init__(10, 1, sparse=True)

        def forward(self, x):
            return super().forward((4 * x[:, 0]).long() % 10)

    options = {"net": Embedded, "optimizer": optimizer, "options": {"lr": 0.1}, "named": True}
    baseline, wrong = Loop(**options), Loop(**options, backward=lambda loss: (1.001 * loss).backward())
    assert verify(baseline, baseline, BATCHES, contract)
    assert "slot 'backward': 'model.weight.grad' differs" in str(verify(baseline, wrong, BATCHES, contract))


def test_fused_sgd_on_16_bits_is_right_where_its_kernel_is():
    """The vectorised kernel of some versions of torch loses the momentum of bf16 parameters."""
    options = {"lr": 0.1, "momentum": 0.9}

    def moved(**how):
        parameter = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], **options, **how)
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach()

    def in_its_type(model, x):
        return model(x.to(model.head.weight.dtype)).to(x.dtype)

    def loop(**how):
        return Loop(lambda: Net().bfloat16(), torch.optim.SGD, options | how, forward=in_its_type)

    is_right = torch.allclose(moved(), moved(fused=True), rtol=0.02)
    assert bool(judge(loop(fused=True), loop())) is is_right


@pytest.mark.parametrize("value", [0.1, 0.3 + 0.1j])
def test_a_number_of_python_has_all_its_digits(value):
    def counting(number):
        def build():
            subject = Loop()()
            return Subject(subject.step, {**subject.state, "counter": Counter(number=number)})

        return build

    dtype = torch.complex128 if isinstance(value, complex) else torch.float64
    assert judge(counting(torch.tensor(value, dtype=dtype)), counting(value))
    assert "'counter.number' differs by" in str(judge(counting(value * (1 + 1e-8)), counting(value)))


class Spectral(nn.Module):
    """Complex weights on the Fourier transform of a row, the first two frequencies by default."""

    product = staticmethod(partial(torch.einsum, "bi,io->bo"))

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = torch.fft.rfft(x)[:, :2]
        return torch.fft.irfft(self.product(spectrum, self.weight), n=4)[:, :1]


class Multiplied(Spectral):
    product = staticmethod(torch.matmul)


class LittleOff(Spectral):
    product = staticmethod(lambda x, weight: x @ weight.mul(1 + 1e-8))


class Narrow(Spectral):
    def forward(self, x):
        return torch.fft.irfft(self.rounded(torch.fft.rfft(x)[:, :2] @ self.weight), n=4)[:, :1]

    def rounded(self, x):
        return torch.zeros_like(x, dtype=torch.cfloat).copy_(x)


class NarrowInThirds(Narrow):
    def rounded(self, x):
        return super().rounded(x) / 3 + super().rounded(x) * (2 / 3)


def test_complex_numbers_are_compared_with_twice_the_digits():
    baseline = Loop(net=Spectral)
    assert judge(Loop(net=Multiplied), baseline)
    assert "not the same algebra" in str(judge(Loop(net=LittleOff), baseline))
    verdict = judge(Loop(net=NarrowInThirds), Loop(net=Narrow))
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict
    assert "itself rounds to torch.complex64" in str(verdict)


class Dropped(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 32), nn.Dropout(0.25), nn.Linear(32, 1))


def in_bfloat16(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        x = model(x)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def test_numbers_that_float64_draws_alike_leave_the_rounding_to_be_compared_also_of_16_bits():
    def noisy(model, x):
        return in_bfloat16(model, x) + 1e-2 * torch.randn_like(x)[:, :1]

    baseline = Loop(net=Dropped, forward=in_bfloat16)
    assert judge(Loop(net=Dropped, forward=in_bfloat16, options={"lr": 1e-2, "foreach": True}), baseline)
    verdict = judge(Loop(forward=noisy), Loop(forward=noisy))
    assert "draws random numbers inside the step" in str(verdict)


def rounded_by(error):
    """A loop whose loss is off by a share that depends on the number of the update and on its batch."""

    def build():
        subject, calls = Loop()(), itertools.count(1)

        def step(batch):
            loss = subject.step(batch)["loss"]
            number = next(calls)
            return loss if loss.dtype is torch.float64 else loss * (1 + error(number, bool(batch["x"][0, 0] == RARE)))

        return Subject(step, subject.state)

    return build


RARE = BATCHES[3]["x"][0, 0]  # of the fourth


def test_that_the_baseline_has_luck_once_or_the_change_has_none_is_no_failure_but_what_comes_again_is():
    baseline = rounded_by(lambda number, rare: 1e-6 if number == 4 else 1e-3)
    assert judge(rounded_by(lambda number, rare: 1e-3), baseline)
    assert judge(rounded_by(lambda number, rare: 1e-2 if rare and number == 4 else 1e-3), baseline)
    for again in (lambda number, rare: 1e-2 if rare else 1e-3, lambda number, rare: 1e-2 if number == 4 else 1e-3):
        (factor,) = re.findall(
            r"rounds (\S+) times as much as the baseline \(outputs, one", str(judge(rounded_by(again), baseline))
        )
        assert 5 < float(factor) <= 10.1
    assert "rounds 3 times as much" in str(judge(rounded_by(lambda number, rare: 3e-3), baseline))


def crossing(error):
    """A loop whose loss comes close to zero with one batch, as a difference of what is large does."""

    def build():
        subject = Loop()()

        def step(batch):
            rare = bool(batch["x"][0, 0] == RARE)
            loss = subject.step(batch)["loss"] * (1e-6 if rare else 1)
            return loss if loss.dtype is torch.float64 else loss + error(rare)

        return Subject(step, subject.state)

    return build


def test_an_output_that_passes_zero_is_judged_by_its_usual_size():
    baseline = crossing(lambda rare: 0.0 if rare else 1e-4)  # lucky where it hardly has a size
    assert judge(crossing(lambda rare: 1e-4), baseline)
    verdict = judge(crossing(lambda rare: 1e-2 if rare else 1e-4), baseline)
    assert "times as much as the baseline (outputs, one of" in str(verdict)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("times", [1, 3])
def test_an_output_that_is_no_number_now_and_then_says_nothing_of_its_size(value, times):
    def with_it(error):
        def build():
            subject = Loop()()

            def step(batch):
                loss = subject.step(batch)["loss"]
                missing = any(bool(batch["x"][0, 0] == each["x"][0, 0]) for each in BATCHES[2 : 2 + times])
                wrong = 1 + (0.0 if loss.dtype is torch.float64 else error)
                return {"loss": loss, "return": torch.full_like(loss, value) if missing else loss * wrong}

            return Subject(step, subject.state)

        return build

    assert judge(with_it(0.0), with_it(0.0))
    assert judge(with_it(1e-2), with_it(0.0)).outcome is Outcome.FAIL


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_gradients_that_a_fused_optimizer_unscales_are_compared_unscaled(optimizer, forgets):
    def scaled():
        subject, scaler = Loop(optimizer=optimizer, options={"lr": 1e-2, "fused": True})(), torch.amp.GradScaler("cpu")
        model, fused = subject.state.values()

        def step(batch):
            fused.zero_grad()
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            scaler.scale(loss).backward()
            scaler.step(fused)
            scaler.update()
            if forgets:
                fused.zero_grad()
            return {"loss": loss.detach(), "rate": 1e-2}

        return Subject(step, subject.state)

    assert judge(scaled, Loop(optimizer=optimizer, forgets=forgets))


class Keyed(nn.Module):
    """Attention over three places, whose keys' bias has a gradient of zero: only its rounding is left."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        places = torch.stack([x, x.roll(1, 1), x.roll(2, 1)], 1)
        return self.head(self.attend(self.query(places), self.key(places), places))[:, 0, :1]

    def attend(self, query, key, value):
        return nn.functional.scaled_dot_product_attention(query, key, value)


class KeyedByHand(Keyed):
    def attend(self, query, key, value):
        return (query @ key.transpose(1, 2) / 2).softmax(2) @ value


def test_the_rounding_of_a_gradient_of_zero_is_no_other_algebra_also_where_the_state_is_larger():
    options = {"lr": 1e-2, "eps": 1e-9}  # by which Adam divides it
    verdict = verify(Loop(net=Keyed, options=options), Loop(net=KeyedByHand, options=options), BATCHES, Close())
    assert verdict, verdict
