"""Updates that are verified while a training goes on."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interrupted import flat
from running import tiny, train_here

from runner.api import Close, Exact, Statistical
from runner.plugin.registry import Registry
from runner.recipe.safeguards import SentinelConfig
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import ExitCode, SentinelError
from runner.training.deviation import find_deviations
from runner.training.pipeline import assemble
from runner.training.sentinel import Sentinel, checksum
from runner.training.step import Step

REGISTRY = Registry([Path(__file__).with_name("late_faults.py")])
OFTEN = "train.sentinel={share: 0.5}"
WITHOUT_STAGES = {
    "digits_classifier": ("optimization.fused_optimizer=off", "optimization.heap_retention=off"),
    "shakespeare_gpt": ("optimization.fused_optimizer=off", "optimization.heap_retention=off", "optimization.amp=off"),
    "marl_baseline": (),
    "graf": ("optimization.heap_retention=off",),
}
STAGED = {
    "digits_classifier": ("fused_optimizer", "heap_retention"),
    "shakespeare_gpt": ("activation_checkpointing", "gradient_accumulation={micro_batch: 2}"),
    "marl_phase2": ("stacked_agents", "merged_critic_loss"),
    "graf": ("activation_checkpointing", "lazy_r1"),
}


class Clock:
    """Time that passes by a second whenever somebody asks."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def sentinel_of(name, *sets, share=0.5, on_alarm="stop", clock=None):
    pipeline = assemble(tiny(name, *sets, registry=REGISTRY), REGISTRY.files)
    config = SentinelConfig(share=share, on_alarm=on_alarm)
    return Sentinel(Step(pipeline), pipeline, config, clock or Clock())


def make_steps(sentinel, count):
    for _ in range(count):
        sentinel()


def always(sentinel, monkeypatch):
    """Repeats every update."""
    monkeypatch.setattr(sentinel, "_is_due", lambda: True)
    return sentinel


every_fault = pytest.mark.parametrize("fault", ["scale", "decay", "moment", "sign"])


@every_fault
def test_a_stage_that_goes_wrong_late_is_detected(fault, monkeypatch):
    assert_detected("digits_classifier", fault, monkeypatch)


@pytest.mark.sampled(3)
@every_fault
@pytest.mark.parametrize("name", [name for name in WITHOUT_STAGES if name != "digits_classifier"])
def test_a_late_fault_is_detected_with_other_learners(name, fault, monkeypatch):
    assert_detected(name, fault, monkeypatch)


def assert_detected(name, fault, monkeypatch):
    """Trains with a stage that changes results from the fifth update on, and expects the alarm."""
    promise = "exact" if fault == "scale" else "close"
    stage = f"optimization.late={{first: 4, fault: {fault}, promise: {promise}}}"
    sentinel = always(sentinel_of(name, *WITHOUT_STAGES[name], stage), monkeypatch)
    message = r"update [56] deviates from the baseline: '.*' differs by .*: late\); first diverging operator: (\S+) "
    with pytest.raises(SentinelError, match=message) as error:
        make_steps(sentinel, 40)
    operators = {"scale": ("mul",), "decay": ("mul_",), "moment": ("mul_",), "sign": ("neg_",)}
    name = re.search(message, str(error.value))[1]
    assert name.removeprefix("aten.") in operators[fault], error.value


@pytest.mark.parametrize(("name", "stages"), STAGED.items())
def test_correct_stages_raise_no_alarm(name, stages, monkeypatch):
    sets = [f"optimization.{stage if '=' in stage else f'{stage}=on'}" for stage in stages]
    sentinel = always(sentinel_of(name, *sets, "train.ema=0.9"), monkeypatch)
    while sentinel.updates < 12:
        sentinel()
    assert not sentinel.alarms
    assert sentinel.checked >= 11


def test_only_the_form_is_compared_where_a_stage_promises_no_algebra(monkeypatch):
    stage = "optimization.late={first: 4, fault: decay, promise: statistical}"
    sentinel = always(sentinel_of("digits_classifier", stage), monkeypatch)
    make_steps(sentinel, 8)
    assert not sentinel.alarms
    assert "because of late only the form of numbers is compared" in sentinel.summary()
    values = {"x": torch.ones(2)}
    assert not find_deviations({"x": 2 * torch.ones(2)}, values, [], Statistical())
    assert find_deviations({"x": torch.tensor([1.0, float("inf")])}, values, [], Statistical())[0].is_gross
    assert find_deviations({"x": torch.ones(3)}, values, [], Statistical())[0].is_gross


@pytest.mark.parametrize("part", ["parameter", "optimizer"])
@pytest.mark.parametrize("bit", [0, 12, 30])
def test_a_bit_that_flips_between_updates_is_detected(part, bit, monkeypatch):
    sentinel = always(sentinel_of("digits_classifier", "optimizer={kind: adam, lr: 1e-3}"), monkeypatch)
    for _ in range(4):
        sentinel()
    tensor = next(sentinel.step.learner.module.parameters()).data
    if part == "optimizer":
        optimizer = sentinel.step.learner.model.optimizer
        tensor = next(iter(optimizer.state.values()))["exp_avg"]
    tensor.view(torch.int32).view(-1)[3] ^= 1 << bit
    with pytest.raises(SentinelError, match=r"the state after update 4 has changed before the next one \('.*'\)"):
        sentinel()


def test_a_baseline_that_does_not_repeat_itself_blames_the_hardware(monkeypatch):
    sentinel = always(sentinel_of("digits_classifier"), monkeypatch)
    sentinel()
    sentinel()
    repeat = type(sentinel._baseline).repeat
    calls = []

    def unsteady(self, *given, **named):
        values = repeat(self, *given, **named)
        calls.append(1)
        name = next(name for name in values if name.endswith("stem.0.weight"))
        values[name].view(-1)[0] += len(calls)
        return values

    monkeypatch.setattr(type(sentinel._baseline), "repeat", unsteady)
    with pytest.raises(SentinelError, match=r"is not the same twice .* the hardware is broken"):
        sentinel()


def test_training_comes_to_the_same_bits_with_and_without(monkeypatch):
    states = []
    for watched in (True, False):
        sentinel = sentinel_of("marl_phase2", "optimization.amp=off")
        if watched:
            always(sentinel, monkeypatch)
        step = sentinel if watched else sentinel.step
        outputs = 0
        while outputs < 6:
            outputs += step() is not None
        states.append(flat(sentinel.step.pipeline.state_dict()))
    assert states[0] == states[1]


@pytest.mark.parametrize("share", [0.5, 0.1, 0.02])
def test_it_keeps_to_its_share_of_the_time(share):
    sentinel = sentinel_of("mlp", share=share)
    make_steps(sentinel, round(10 / share))
    elapsed = sentinel._clock() - sentinel._started
    assert sentinel.checked >= 1
    assert sentinel.seconds <= share * elapsed + 2 * sentinel._cost
    assert sentinel.metrics()["perf/sentinel_checked"] == sentinel.checked


@pytest.mark.usefixtures("migrated_workspace")
def test_an_alarm_stops_the_run_and_names_the_last_good_update():
    stage = "optimization.late={first: 6, fault: decay}"
    with pytest.raises(SentinelError) as error:
        train_here("mlp", stage, OFTEN, registry=REGISTRY)
    assert error.value.exit_code is ExitCode.GATE_FAILED
    good = "(was the last that was compared and good|no update was compared before)"
    assert re.search(f"{good}; (the newest checkpoint is|no checkpoint has been written yet)", str(error.value))


@pytest.mark.usefixtures("migrated_workspace")
def test_an_alarm_that_only_marks_lets_the_run_end():
    stage = "optimization.late={first: 6, fault: decay}"
    marking = "train.sentinel={share: 0.5, on_alarm: mark}"
    result = train_here("mlp", stage, marking, registry=REGISTRY)
    assert result.status == "FINISHED"
    assert " alarms; " in result.sentinel
    assert result.metrics["perf/sentinel_alarms"] >= 1


@pytest.mark.usefixtures("migrated_workspace")
def test_a_run_reports_what_was_compared_and_has_the_digits_of_one_without():
    watched = train_here("mlp", OFTEN)
    alone = train_here("mlp")
    assert "no alarm; a fault in every update is detected within" in watched.sentinel
    assert alone.sentinel is None
    learned = [
        {name: value for name, value in result.metrics.items() if name.startswith(("train/", "eval/"))}
        for result in (watched, alone)
    ]
    assert learned[0] == learned[1]


@pytest.mark.parametrize("value", ["{share: 0}", "{share: 0.6}", "{on_alarm: shout}", "1", "{shares: 0.1}"])
def test_a_sentinel_that_cannot_be_is_refused(value):
    with pytest.raises(RecipeError, match=r"train\.sentinel"):
        tiny("digits_classifier", f"train.sentinel={value}")


def test_a_sentinel_changes_no_digest():
    assert tiny("digits_classifier", OFTEN).digest == tiny("digits_classifier").digest


@given(st.integers(0, 31), st.integers(0, 63), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_any_flipped_bit_changes_the_checksum(bit, place, dtype):
    tensor = torch.arange(64).to(dtype)
    before = checksum({"a": tensor, "b": [torch.ones(3)]})
    integers = {4: torch.int32, 2: torch.int16, 8: torch.int64}[tensor.element_size()]
    flipped = tensor.clone()
    flipped.view(integers)[place] ^= 1 << (bit % (8 * tensor.element_size() - 1))
    after = checksum({"a": flipped, "b": [torch.ones(3)]})
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_rounding_is_excused_by_what_the_baseline_does_to_itself():
    contract = Close()
    baseline = {"x": torch.tensor([1.0, -2.0])}
    near = {"x": torch.tensor([1.0 + 1e-4, -2.0])}
    assert find_deviations(near, baseline, [], contract)
    assert not find_deviations(near, baseline, [{"x": torch.tensor([1.0 + 1e-6, -2.0])}], contract)
    assert find_deviations(near, baseline, [{"x": torch.tensor([1.0, -2.0 + 1e-6])}], contract)
    assert find_deviations(near, baseline, [], Exact())


def test_what_cannot_be_subtracted_deviates():
    (shape,) = find_deviations({"x": torch.ones(3)}, {"x": torch.ones(2)}, [], Close())
    (missing,) = find_deviations({}, {"x": torch.ones(2)}, [], Close())
    (nan,) = find_deviations({"x": torch.tensor(float("nan"))}, {"x": torch.tensor(1.0)}, [], Close())
    assert shape.is_gross
    assert missing.is_gross
    assert nan.is_gross
    both = {"x": torch.tensor([float("nan"), float("inf")])}
    assert not find_deviations(both, {"x": both["x"].clone()}, [], Close())


def test_an_element_far_beyond_rounding_counts_if_it_deviates_again():
    baseline = {"x": torch.linspace(1, 2, 5_000), "y": torch.linspace(1, 2, 5_000)}
    yardstick = {name: value * (1 + 1e-7) for name, value in baseline.items()}

    def deviations(name, element, size=0.01):
        changed = {**baseline, name: baseline[name].clone()}
        changed[name][element] += size
        return find_deviations(changed, baseline, [yardstick], Close())

    (first,) = deviations("x", 7)
    assert not first.is_gross
    assert not first.repeats([])
    assert deviations("x", 7, -0.02)[0].repeats([first])
    assert not deviations("x", 8)[0].repeats([first])
    assert not deviations("y", 7)[0].repeats([first])
    assert not deviations("x", 7, 1e-3)


def test_a_tensor_that_deviates_twice_is_found_among_others():
    baseline = {name: torch.linspace(1, 2, 100) for name in "xyz"}

    def deviations(**shares):
        changed = {name: value * (1 + shares.get(name, 0.0)) for name, value in baseline.items()}
        return find_deviations(changed, baseline, [], Close())

    earlier = deviations(x=1e-3, y=1e-3)
    later = deviations(y=1e-3, z=1e-3)
    assert [deviation.name for deviation in later if deviation.repeats(earlier)] == ["y"]
    assert not any(deviation.repeats(earlier) for deviation in deviations(z=1e-3))
