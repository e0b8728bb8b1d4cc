"""What updates of a measured variant did is compared with the baseline's from the same states."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.ablation import compared_trainings
from runner.ablation.variant_process import Measured
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble

ROOT = Path(__file__).parents[2]
REGISTRY = Registry([Path(__file__).with_name("fakes.py")])
SETS = ("device=cpu", "model.widths=[8]", "optimization.fused_optimizer=off", "optimization.heap_retention=off")
FAKES = {
    "skips_every_second": "'modules model.weight' did not change in 6 of 13 updates",
    "replays": "'modules model.weight' did not change in 13 of 13 updates",
    "old_gradients": "of the baseline's way and differed from it by",
}
HONEST = ("remembers_eight", "fused_optimizer", "amp", "channels_last", "gradient_accumulation={micro_batch: 32}")


def measured(*sets):
    recipe = load(ROOT / "recipes" / "digits_classifier.yaml", [*SETS, *sets], REGISTRY)
    found = Measured(assemble(recipe, REGISTRY.files))
    for drawn in found.draws(12):  # as if they were timed
        found.advance(drawn)
    found.count = compared_trainings.UPDATES
    return found


@pytest.fixture(scope="module")
def baseline():
    found = measured()
    return found, found.record()["batches"]


def judged(baseline, stage, judge="judge"):
    found, recorded = baseline
    kind, _, setting = stage.partition("=")
    made = measured(f"optimization.{kind}={setting or 'on'}").make(recorded)["windows"]
    return getattr(found, judge)(made)


@pytest.mark.parametrize("stage", FAKES)
def test_a_fake_is_caught(stage, baseline):
    told = judged(baseline, stage)
    assert FAKES[stage] in told["caught"]
    assert told["updates"] == 13


@pytest.mark.parametrize("stage", ["skips_every_second", "replays"])
def test_a_fake_that_promises_other_updates_has_to_make_as_many(stage, baseline):
    assert FAKES[stage] in judged(baseline, stage, "judge_number")["caught"]


@pytest.mark.parametrize("stage", HONEST)
def test_an_honest_stage_does_the_work(stage, baseline):
    assert judged(baseline, stage) == {"updates": 13, "caught": "", "reason": ""}


def test_what_the_baseline_cannot_do_is_a_reason_and_no_fault(baseline):
    found, _ = baseline
    told = found.judge(b"no windows")
    assert (told["updates"], told["caught"]) == (0, "")
    assert told["reason"].startswith("the baseline cannot make the same updates: ")


def test_work_that_waits_for_a_reader_is_timed():
    found = measured("optimization.postpones=on")
    found.count = 8
    stage = found.pipeline.stages["postpones"]
    stage.is_open = True
    waiting = []
    readings = iter([0.001, 0.5, 0.1])  # of a block, and of two readings of the results

    def seconds(work):
        work()
        waiting.append(len(stage.waiting))
        return next(readings)

    found.stopwatch = SimpleNamespace(seconds=seconds)
    assert found.update()["seconds"] == pytest.approx((0.001 + 0.5 - 0.1) / 8)
    assert waiting == [8, 0, 0]


def test_every_timed_update_has_a_batch_of_its_own():
    found = measured("optimization.remembers_eight=on")
    found.pipeline.stages["remembers_eight"].hits = 0
    found.count = 40
    for _ in range(3):
        assert found.update()["seconds"] > 0
    assert found.pipeline.stages["remembers_eight"].hits == 0
