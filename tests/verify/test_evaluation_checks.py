"""What surrounds an update is compared whatever a stage promises: what is drawn, what is answered, the evaluation."""

import os
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from judging import pair_of
from running import tiny

from runner.plugin.contract import Close
from runner.plugin.implementation import implementation_of
from runner.plugin.registry import Registry
from runner.plugins.marl.uav.rewards import PRESETS, Coefficients
from runner.proof import Outcome, clock
from runner.proof.warm_up import warm_up
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.checks.declared_slots import DeclaredSlotsCheck
from runner.verify.checks.evaluations import EvaluationsCheck
from runner.verify.checks.long_run import LongRunCheck
from runner.verify.checks.predictions import PredictionsCheck
from runner.verify.checks.resumed_training import ResumedTrainingCheck
from runner.verify.checks.sampled_batches import SampledBatchesCheck
from runner.verify.checks.updates import UpdatesCheck
from runner.verify.evaluation_checks import Query, answers, prediction_sizes, questions, same_evaluations
from runner.verify.gate import Gate
from runner.verify.global_patches import changed_values, global_values, patches
from runner.verify.options import Options

HERE = Path(__file__).parent
REGISTRY = Registry([HERE / "supervised.py", HERE / "around.py"])
WHERE = {
    "alone": (PredictionsCheck, "'predict' differs"),
    "when_evaluated": (PredictionsCheck, "'predict' differs"),
    "evaluation": (EvaluationsCheck, "'evaluate.loss' differs"),
    "third_evaluation": (EvaluationsCheck, "'evaluate.loss' differs"),
    "single_left_out": (
        EvaluationsCheck,
        "an evaluation raises an error, which the baseline's does not: data: there is no held-out",
    ),
    "padded": (EvaluationsCheck, "'evaluate.loss' differs"),
    "held_out_changed": (EvaluationsCheck, "'evaluate.loss' differs"),
    "unevaluable": (EvaluationsCheck, "the changed step raises KeyError: 'nothing' (around.py:"),
    "statistics": (SampledBatchesCheck, "'statistics.seen' is there, which it is not in the baseline"),
    "fewer": (SampledBatchesCheck, "'batch.word' is a tensor of shape"),
    "noise": (SampledBatchesCheck, "'noise.more' is there, which it is not in the baseline"),
    "counts": (SampledBatchesCheck, "'progress.samples' differs"),
    "draws_more": (SampledBatchesCheck, "'generators.noise' differs"),
    "moved": (SampledBatchesCheck, "'batch.word' differs"),
    "remembered": (EvaluationsCheck, "'evaluate.loss' differs"),
    "shorter": (SampledBatchesCheck, "'progress.length' differs"),
    "late": (SampledBatchesCheck, "the sample is not the same: update 13, slot 'next_batch': 'batch.word' differs"),
    "from_start": (
        ResumedTrainingCheck,
        "a resumed training is another one: update 1, slot 'step': 'batch.word' differs",
    ),
    "unkept": (ResumedTrainingCheck, "a checkpoint cannot hold a slice"),
    "notes": (ResumedTrainingCheck, "or its end reported: ZeroDivisionError"),
    "stuck": (
        ResumedTrainingCheck,
        "after 30 more updates, the progress of the training has not changed",
    ),
}
"""The check that fails, and its message."""
QUICK = Options(updates=3, horizon=0, budget=0.0, names_operators=False)


def recipe_of(*sets):
    return load(HERE / "supervised.yaml", ["device=cpu", "optimization.around=on", *sets], REGISTRY)


def judged(*sets, options=QUICK, checks=()):
    """Returns the verdict by these checks, or by all."""
    gate = Gate(recipe_of(*sets), REGISTRY, options, lambda _: None)
    gate.checks = [check for check in gate.checks if not checks or isinstance(check, checks)]
    return gate(("around",))


def checked(check, harm, promise="close", *sets, options=QUICK):
    """Returns the verdict by one check."""
    recipe = recipe_of(f"optimization.around={{harm: '{harm}', promise: {promise}}}", *sets)
    return check().run(*pair_of(recipe, "around", REGISTRY, options))


@pytest.mark.parametrize("promise", ["close", "exact"])
def test_batches_that_are_drawn_ahead_pass_all_checks(promise):
    verdict = judged(f"optimization.around={{harm: ahead, promise: {promise}}}")
    assert verdict, verdict


@pytest.mark.parametrize("harm", WHERE)
def test_what_is_around_an_update_is_compared(harm, monkeypatch):
    monkeypatch.setattr("runner.verify.sampling_checks._UPDATES_TO_PROGRESS", 30)
    check, message = WHERE[harm]
    sets = ("train.updates=null", "train.samples=9000") if harm == "stuck" else ()
    options = Options(3, horizon=30 if harm == "late" else 0, horizon_seconds=300.0, budget=0.0)
    verdict = checked(check, harm, "close", *sets, options=options)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert message in verdict.summary, verdict


@pytest.mark.parametrize(
    ("harm", "check"),
    [
        ("alone", PredictionsCheck),
        ("evaluation", EvaluationsCheck),
        ("unevaluable", EvaluationsCheck),
        ("statistics", SampledBatchesCheck),
        ("draws_more", UpdatesCheck),
        ("remembered", EvaluationsCheck),
    ],
)
def test_what_is_around_an_exact_update_is_compared(harm, check):
    verdict = checked(check, harm, "exact")
    assert verdict.outcome is Outcome.FAIL, verdict


def test_a_stage_that_cannot_be_attached_fails_with_what_it_raises():
    verdict = judged("optimization.around={harm: unbuilt, promise: close}")
    assert verdict.outcome is Outcome.FAIL
    assert "the pipeline cannot be built: AttributeError: nothing there (around.py:" in verdict.summary


@pytest.mark.parametrize("promise", ["close", "exact"])
def test_what_cannot_be_evaluated_without_the_stage_either_is_not_held_against_it(promise, monkeypatch):
    monkeypatch.setattr(implementation_of(REGISTRY.get("data", "words_and_numbers")), "evaluate", lambda *_: {}["none"])
    verdict = checked(EvaluationsCheck, "", promise)
    assert verdict, verdict
    assert "nothing of it can be evaluated" in verdict.summary


def test_agents_that_are_stacked_are_evaluated_in_float64_although_they_call_no_module():
    stages = ("forward_cache", "merged_critic_loss", "stacked_agents")
    short = ("data.episode_limit=8", "data.evaluation.episodes=2")
    gate = Gate(tiny("marl_phase2", *short), Registry(), QUICK, lambda _: None)
    builds = gate.pair(stages).builds(answers)
    verdicts = [*same_evaluations(gate.baseline.evaluated, *builds, gate.baseline.evaluations, Close())]
    assert [verdict.summary for verdict in verdicts] == ["an evaluation has the same result"]


def test_a_long_run_is_made_and_what_it_excludes_is_said():
    verdict = judged(options=Options(updates=4, horizon=60, budget=0.0))
    assert verdict.evidence["horizon"] == 60
    summary = (
        "errors more frequent than 1 update in 20 are ruled out (95 %); not exercised here: the code in around.py:"
    )
    assert summary in str(verdict)
    assert all(line.startswith("around.py:") for line in verdict.evidence["never_ran"])


@pytest.mark.parametrize(("completes_horizon", "updates"), [(False, 50), (True, 60)])
def test_a_long_run_ends_after_its_time_unless_its_length_was_requested(completes_horizon, updates):
    length = Options(4, horizon=60, horizon_seconds=1e-3, completes_horizon=completes_horizon, budget=0.0)
    verdict = judged("train.updates=1000", options=length, checks=(UpdatesCheck, LongRunCheck))
    assert verdict.evidence["horizon"] == updates
    remark = "(no more fit into 0.001 s; --horizon N takes its time)"
    assert (remark in verdict.summary) is not completes_horizon


def test_batches_that_were_compared_as_often_as_updates_are_not_remarked():
    options = Options(updates=4, horizon=30, horizon_seconds=300.0, budget=0.0)
    sets = ("optimization.around.promise=close", "train.updates=1000")
    verdict = judged(*sets, options=options, checks=(UpdatesCheck, SampledBatchesCheck, LongRunCheck))
    assert verdict, verdict
    assert verdict.evidence["horizon"] == 30
    assert "(in sampled batches" not in str(verdict)


def test_a_slot_that_is_not_declared_fails_by_its_name(monkeypatch):
    monkeypatch.setattr(REGISTRY.get("optimization", "around"), "wraps", frozenset({"forward", "next_batch"}))
    verdict = judged(checks=(UpdatesCheck, DeclaredSlotsCheck))
    assert verdict.outcome is Outcome.FAIL
    assert "'around' attaches to the slot 'transfer', which its config does not declare" in verdict.summary


def test_a_stage_that_takes_hold_of_nothing_that_it_declares_is_inactive(monkeypatch):
    stage = implementation_of(REGISTRY.get("optimization", "around"))
    monkeypatch.setattr(stage, "attach", lambda self, pipeline: None)
    verdict = judged()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "inactive: it changes none of the slots that it declares" in verdict.summary


def test_a_setting_of_torch_that_can_change_numbers_is_no_promise_of_bits(monkeypatch):
    stage = implementation_of(REGISTRY.get("optimization", "around"))
    attach = stage.attach

    def loud(self, pipeline):
        attach(self, pipeline)
        torch.backends.cudnn.allow_tf32 = False

    monkeypatch.setattr(stage, "attach", loud)
    verdict = judged()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "torch's torch.backends.cudnn.allow_tf32 False (True before), which can change numbers" in verdict.summary


@pytest.mark.parametrize(
    "importing", ["import mine.beside", "from mine import beside", "from . import beside", "from .beside import gelu"]
)
def test_what_a_file_puts_into_places_of_everybody_is_found(monkeypatch, tmp_path, importing):
    """It, or a module that it imports in a function, where nothing has a name for it afterwards."""
    made, beside = types.ModuleType("mine.made"), types.ModuleType("mine.beside")
    code = "import torch\ndef gelu(x): return x\nclass Mode(torch.overrides.TorchFunctionMode): pass\n"
    for module, source in ((made, f"{code}def later(): {importing}\n"), (beside, code)):
        file = tmp_path / f"{module.__name__}.py"
        file.write_text(source)
        module.__file__, module.__package__ = str(file), "mine"
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, module.__file__, "exec"), vars(module))
    assert list(patches({made.__file__})) == []
    functional = torch.nn.functional
    monkeypatch.setattr(functional, "gelu", made.gelu)
    monkeypatch.setattr(functional, "silu", beside.gelu)
    monkeypatch.setattr(functional, "relu", made.Mode())
    monkeypatch.setattr(functional, "mse_loss", partial(functional.mse_loss, reduction="sum"))
    monkeypatch.setattr(functional.cross_entropy, "__defaults__", (*functional.cross_entropy.__defaults__[:-1], 0.1))
    monkeypatch.setattr(torch.optim.SGD, "step", made.gelu)
    monkeypatch.setattr(torch.Tensor, "relu", property(made.gelu))
    monkeypatch.setattr("runner.training.step._MIX", 0)
    code = 'kernel = torch.library.Library("aten", "IMPL"); kernel.impl("hardswish", torch.relu, "AutogradCPU")'
    exec(compile(code, made.__file__, "exec"), vars(made))
    with made.Mode(), torch.nn.modules.module.register_module_forward_hook(beside.gelu):
        found = set(patches({made.__file__}))
    del made.kernel  # the finalizer of one destroyed earlier would take the name from whoever has it then
    assert {
        *(f"torch.nn.functional.{name}" for name in ("gelu", "silu", "relu", "mse_loss", "cross_entropy.__defaults__")),
        "torch.optim.sgd.SGD.step", "runner.training.step._MIX", "the stack of torch's modes (Mode)",
        "torch.nn.modules.module._global_forward_hooks", "torch.ops.aten.hardswish",
    } <= found  # fmt: skip
    assert any(name.endswith("Tensor.relu") for name in found)


def test_what_was_a_number_and_is_an_object_is_another_one(monkeypatch):
    before = global_values()
    monkeypatch.setattr("runner.training.step._MIX", object())
    now = global_values()
    assert [name for name in before if now.get(name) != before[name]] == ["runner.training.step._MIX"]


def test_a_table_in_which_something_was_changed_is_another_one(monkeypatch):
    before = global_values()
    monkeypatch.setitem(PRESETS, "seed", Coefficients())
    now = global_values()
    assert [name for name in before if now.get(name) != before[name]] == ["runner.plugins.marl.uav.rewards.PRESETS"]


@pytest.fixture(scope="module")
def recipe():
    return tiny("marl_baseline", "model.hidden=[8]")


@pytest.fixture(scope="module")
def asked(recipe):
    pipeline = assemble(recipe)
    batches = [pipeline.source.draw(32, pipeline.progress) for _ in range(80)]
    batches = [batch for batch in batches if batch is not None][:2]
    return questions(pipeline, batches, pipeline.learner.state_dict())


def test_a_model_is_asked_in_other_sizes_than_the_trainings_and_in_both_modes(asked):
    sizes = [(len(each.batch.inputs), each.batch.training) for each in asked]
    assert sizes[1:11] == [(size, mode) for size in (1, 2, 5, 200, 257) for mode in (False, True)]
    assert sizes[11:16] == [(size, False) for size in (1, 2, 5, 200, 257)]
    one, near, nearer = (each.batch.inputs for each in asked[16:19])
    assert torch.equal(one, asked[1].batch.inputs)
    torch.testing.assert_close(near, 1.01 * one)
    assert 0 < (nearer - one).abs().max() < (near - one).abs().max()
    assert len(asked) == 20
    assert asked[-1].place is asked[0].batch


@given(st.integers(1, 300), st.integers(1, 300))
def test_slow_predictions_are_compared_in_all_small_sizes_and_one_beyond_every_part(prediction_batch, rows):
    """A stage that predicts in parts of a batch, or the learner itself, has a part that is not full."""
    sizes = prediction_sizes(prediction_batch, rows)
    assert sizes == sorted(set(sizes))
    assert max(sizes) == max(prediction_batch, rows) + 1
    assert set(sizes) >= {1, min(2, max(sizes))}
    assert prediction_sizes(None, rows) == (1, 2, 5, 200, 257)


def test_repeated_samples_come_in_another_order_every_time(asked):
    """Or who answers in parts of the batch's size, and forgets all but the first, would be right."""
    inputs = next(each.batch.inputs for each in asked[1:] if len(each.batch.inputs) == 257)
    assert not torch.equal(inputs[:32], inputs[32:64])
    assert {tuple(row.flatten().tolist()) for row in inputs} == {tuple(row.flatten().tolist()) for row in inputs[:32]}


def test_slow_predictions_limit_what_is_asked_and_evaluated(monkeypatch):
    recipe = tiny("graf")
    batch = recipe.model.prediction_batch
    pipeline = assemble(recipe)
    drawn = [Step(pipeline).next().batch for _ in range(2)]
    asked = questions(pipeline, drawn, pipeline.learner.state_dict())
    assert max(len(update.batch.inputs["label"]) for update in asked) == max(batch, 4) + 1

    limits = []
    monkeypatch.setattr(type(pipeline.source), "limit_evaluation", lambda source, samples: limits.append(samples))
    answers(recipe, Registry(), ())()
    assert limits == [5 * batch + 1]


def test_latency_is_measured(recipe, asked, monkeypatch):
    monkeypatch.setattr("runner.proof.interleaved_timing.BLOCK_SECONDS", 1e-3)
    monkeypatch.setattr("runner.proof.interleaved_timing.warm_up", partial(warm_up, limit_s=0.01))
    baseline, changed = (answers(recipe, REGISTRY, each) for each in ((), ("stacked_agents",)))
    timing = clock(baseline, changed, [Query(asked[0].batch.inputs)], rounds=5, seconds=0.1)
    assert timing.baseline_ms > 0


def test_a_default_that_lives_may_change_and_one_that_is_exchanged_is_seen(monkeypatch):
    def function(environment=os.environ, names=()):
        return environment, names

    monkeypatch.setattr("runner.recipe.environment.with_environment", function)
    before = global_values()
    monkeypatch.setenv("NOBODY_READS_THIS", "1")
    assert list(changed_values(before)) == []
    function.__defaults__ = ({}, ())
    assert list(changed_values(before)) == ["runner.recipe.environment.with_environment"]
