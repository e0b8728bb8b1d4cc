"""The checks of schedules and of complete epochs."""

from dataclasses import replace
from pathlib import Path

import pytest
import wrong_base
from hypothesis import given
from hypothesis import strategies as st
from running import RECIPES, tiny

from runner.plugin.contract import Exact
from runner.plugin.lr_scheduler import CosineConfig, LinearConfig, OneCycleConfig, StepConfig
from runner.plugin.progress import Progress
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.verify import epoch
from runner.verify.checks.epoch import EpochCheck
from runner.verify.checks.schedules import POINTS, SchedulesCheck, counts_at, find_kinks, spread_points
from runner.verify.gate import Gate
from runner.verify.options import Options

pytestmark = pytest.mark.usefixtures("short_texts")
REGISTRY = Registry([Path(__file__).with_name("wrong_progress.py")])
SYNTHETIC = {"shakespeare_gpt": ("data.synthetic=true",)}
OPTIONS = Options(updates=3, horizon=60, horizon_seconds=60.0, budget=0.0, names_operators=False)
CORRECT = [
    ("digits_classifier", "fused_optimizer"),
    ("digits_classifier", "preprocess_once"),
    ("shakespeare_gpt", "activation_checkpointing"),
    ("marl_baseline", "forward_cache"),
    ("graf", "lazy_r1"),
]


def pair_and_budget(recipe, kind, registry=REGISTRY, options=OPTIONS):
    gate = Gate(recipe, registry, replace(options, stages=(kind,)), lambda _: None)
    return gate.pair((kind,)), gate.coverage


def wrong(kind):
    case = wrong_base.CASES[kind]
    sets = [
        *wrong_base.SETTINGS[case.recipe],
        *case.sets,
        *SYNTHETIC.get(case.recipe, ()),
        "device=cpu",
        f"optimization.{kind}=on",
    ]
    return load(RECIPES / f"{case.recipe}.yaml", sets, REGISTRY)


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [("slow_tenth", 30, 40), ("without_decay_soon", 10, 20), ("louder_quarter", 60, 70)],
)
def test_what_is_wrong_for_a_part_of_the_training_fails_with_the_part(kind, first, last):
    verdict = SchedulesCheck().run(*pair_and_budget(wrong(kind), kind))
    assert verdict.outcome is Outcome.FAIL
    assert first <= float(verdict.summary.partition("%")[0].removeprefix("at ")) <= last


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("short_last_batch", "is another one"),
        ("same_second_epoch", "is another one"),
        ("brightened_before", "a batch is modified after it was returned"),
    ],
)
def test_what_is_wrong_with_some_batches_of_an_epoch_fails(kind, message):
    verdict = EpochCheck().run(*pair_and_budget(wrong(kind), kind))
    assert verdict.outcome is Outcome.FAIL
    assert message in verdict.summary


@pytest.mark.parametrize(("name", "kind"), CORRECT)
def test_correct_stages_pass_both(name, kind):
    registry = Registry()
    recipe = tiny(name, f"optimization.{kind}=on", registry=registry)
    pair, budget = pair_and_budget(recipe, kind, registry, replace(OPTIONS, horizon_seconds=1.0))
    for check in (SchedulesCheck(), EpochCheck()):
        if check.applies(pair):
            verdict = check.run(pair, budget)
            assert verdict, (check.name, verdict.summary)


def test_an_epoch_is_compared_to_its_last_batch():
    verdict = EpochCheck().run(
        *pair_and_budget(tiny("digits_classifier", "optimization.fused_optimizer=on"), "fused_optimizer")
    )
    assert verdict.evidence["epochs"] >= 1
    assert "to its last batch" in verdict.summary


def test_a_simulator_has_no_epoch():
    pair, _ = pair_and_budget(tiny("marl_baseline", "optimization.forward_cache=on"), "forward_cache")
    assert not EpochCheck().applies(pair)


@given(st.integers(8, 900))
def test_points_are_all_there_and_beginnings_are_spread(count):
    points = spread_points(count)
    assert sorted(points) == [number / (count - 1) for number in range(count)]
    few = sorted(points[: count // 2])
    assert max(b - a for a, b in zip([0.0, *few], [*few, 1.0], strict=True)) <= 0.67


@given(st.floats(0, 1), st.integers(1, 10_000), st.integers(1, 500))
def test_counts_belong_to_the_fraction(fraction, length, batch):
    progress = Progress("samples", length * batch, None, updates=3, samples=3 * batch)
    counts = counts_at(progress.state_dict(), progress, fraction)
    assert abs(counts["samples"] - fraction * progress.whole) <= 1
    assert abs(counts["updates"] - fraction * length) <= 1


@pytest.mark.parametrize(
    ("schedule", "kinks"),
    [
        (LinearConfig(), []),
        (CosineConfig(), []),
        (LinearConfig(warmup=0.1), [0.1]),
        (CosineConfig(warmup=0.05), [0.05]),
        (OneCycleConfig(peak=0.3), None),
        (StepConfig(), None),
    ],
)
def test_kinks_of_learning_rates_are_found(schedule, kinks):
    found = find_kinks(schedule)
    if kinks is None:
        assert len(found) < POINTS
    else:
        assert len({round(kink, 2) for kink in found}) == len(kinks)
        assert all(min(abs(kink - expected) for expected in kinks) < 0.002 for kink in found)


def test_a_source_may_reuse_the_memory_of_its_batches(monkeypatch):
    monkeypatch.setattr(epoch, "_same", lambda batch, copy: False)  # as if each batch were overwritten
    build = epoch.samples(tiny("digits_classifier", "device=cpu"), REGISTRY, ())
    verdict = epoch.same_epoch(build, build, Exact(), 12, 60.0)
    assert verdict.outcome is Outcome.PASS, verdict
