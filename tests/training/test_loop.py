"""What the loop looks at while it trains: what is returned to it, what it will need later, who gets gradients."""

import math

import numpy as np
import pytest
import torch
from running import forked, tiny
from toy_runs import Notes, toy_pipeline, trained, written

from runner.api import Mean, Objective, RunnerError
from runner.plugin.averages import AVERAGES
from runner.plugins.marl.uav.config import UavConfig
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import DivergedError
from runner.training.evaluation import evaluated
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop

NOT_METRICS = {
    "nothing": None,
    "a number": 0.5,
    "a tensor": {"loss": torch.tensor(1.0)},
    "an array": {"loss": np.zeros(1)},
    "a float32": {"loss": np.float32(1)},
    "nested": {"loss": {"mean": 1.0}},
    "none inside": {"loss": None},
}


@pytest.mark.parametrize("name", NOT_METRICS)
def test_an_evaluation_that_returns_no_numbers_is_refused(name, tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4")
    pipeline.source.evaluate = lambda learner: NOT_METRICS[name]
    with pytest.raises(RunnerError, match=r"Words\.evaluate should return numbers by name, got "):
        evaluated(pipeline)


@pytest.mark.parametrize("number", [1, 1.0, np.float64(1), True])
def test_an_evaluation_is_of_plain_numbers(number, tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4")
    pipeline.source.evaluate = lambda learner: {"loss": number}
    assert {name: type(value) for name, value in evaluated(pipeline).items()} == {"loss": float}


@pytest.mark.parametrize("returned", [None, 1.0, {"loss": 1.0}, {"loss": torch.tensor(1.0)}, {"loss": (1.0, 2)}])
def test_metrics_that_are_no_sums_and_counts_are_refused_after_the_first_update(returned, tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4")
    pipeline.learner.metrics = lambda batch: returned
    with pytest.raises(RunnerError, match=r"Toy\.metrics should return Mean\(sum, count\) by name, got "):
        trained(tmp_path, pipeline)
    assert pipeline.progress.updates == 1


def test_a_metric_of_nothing_is_no_number_and_an_objective_that_is_none_has_diverged(tmp_path):
    sets = ("train.updates=4", "train.evaluate_every=2")
    pipeline = toy_pipeline(tmp_path, *sets)
    pipeline.learner.metrics = lambda batch: {"loss": Mean(1.0, 1), "reached": Mean(0.0, 0)}
    _, notes = trained(tmp_path, pipeline)
    assert all(math.isnan(value) for _, value in notes.points["eval/reached"])
    pipeline = toy_pipeline(tmp_path, *sets)
    pipeline.learner.metrics = lambda batch: {"loss": Mean(0.0, 0)}
    with pytest.raises(DivergedError, match=r"updates 2, update 2: the objective, eval/loss, is nan; .*no checkpoint"):
        trained(tmp_path / "diverged", pipeline)


LOSSES = {
    "got Tensor": lambda loss: loss.sum,
    "got tuple": tuple,
    "its sum is a float": lambda loss: loss._replace(sum=loss.sum.item()),
    r"its sum has the shape \[2\]": lambda loss: loss._replace(sum=loss.sum.expand(2)),
    "something on the way is detached": lambda loss: loss._replace(sum=loss.sum.detach()),
}


@pytest.mark.parametrize("said", LOSSES)
def test_what_is_no_loss_is_said_with_class_method_and_file(said, tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4")
    pipeline.slots.wrap("loss", lambda step: lambda *arguments: LOSSES[said](step(*arguments)))
    with pytest.raises(RunnerError, match=rf"Toy\.loss in .*toys\.py:\d+ should return Loss\(sum, count\) .*{said}"):
        trained(tmp_path, pipeline)


def test_a_loss_with_its_gradient_is_refused(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4")
    pipeline.slots.wrap("update", lambda step: lambda *args: step(*args) | {"own": torch.ones((), requires_grad=True)})
    with pytest.raises(RunnerError, match=r"Toy\.update returned 'own' with its gradient; return own\.detach\(\)"):
        trained(tmp_path, pipeline)


def test_a_short_training_is_watched_for_parameters_without_a_gradient(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4")
    pipeline.learner.module.append(torch.nn.Module())
    pipeline.learner.module[-1].extra = torch.nn.Parameter(torch.zeros(2))
    pipeline.learner.module[-1].forward = lambda inputs: inputs
    pipeline.build_another_learner = lambda: pipeline.learner  # which has the additional part, too
    with pytest.raises(RunnerError, match=r"no gradient has reached model\.4\.extra \(1 parameters\) in the first 4"):
        trained(tmp_path, pipeline)


@pytest.mark.parametrize("updates", [12, 110])
def test_a_role_that_is_never_stepped_is_found(updates, tmp_path):
    pipeline = toy_pipeline(tmp_path, "model={kind: toy_pair, every: 2}", f"train.updates={updates}")
    pipeline.learner.generator.step = lambda: None
    with pytest.raises(RunnerError, match=r"role 'generator' was not stepped .* Pair\.update in .*toys\.py:\d+ should"):
        trained(tmp_path, pipeline)
    assert pipeline.progress.updates == min(updates, 40)


def test_an_objective_that_a_dataset_does_not_measure_shows_after_the_first_update(tmp_path):
    pipeline = toy_pipeline(tmp_path, "model.kind=toy_misspelt", "train.updates=4")
    with pytest.raises(RunnerError, match=r"the objective is 'los', which is not among .* Words\.evaluate: loss$"):
        trained(tmp_path, pipeline)
    assert pipeline.progress.updates == 1


def test_an_objective_that_a_simulator_does_not_measure_shows_at_the_first_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(UavConfig, "objective", Objective("sucess", "maximize"))
    pipeline = assemble(tiny("marl_baseline"))
    with pytest.raises(RunnerError, match=r"the objective is 'sucess', which is not among .*success_rate"):
        trained(tmp_path, pipeline)
    assert pipeline.progress.env_steps == 80


def test_the_rehearsal_leaves_no_trace_in_what_is_learnt(tmp_path):
    sets = ("train.updates=6", "train.ema=0.9", "data.augmented=true")
    rehearsing, other = (toy_pipeline(tmp_path, *sets) for _ in range(2))
    other.source.rehearse = lambda learner, batch: None
    states = [trained(tmp_path / str(number), each)[0] for number, each in enumerate((rehearsing, other))]
    one, two = (state.pipeline.learner.complete_state() for state in states)
    for left, right in ((one["modules"]["model"], two["modules"]["model"]), (one[AVERAGES], two[AVERAGES])):
        assert all(torch.equal(value, right[name]) for name, value in left.items())


def test_a_part_that_is_frozen_needs_no_gradient(tmp_path):
    pipeline = toy_pipeline(tmp_path, "model.frozen=true", "train.updates=30", "train.ema=0.9")
    before = pipeline.learner.module[0].weight.clone()
    trained(tmp_path, pipeline)
    assert torch.equal(pipeline.learner.module[0].weight, before)


def test_a_role_that_waits_for_its_turn_is_not_called_dead_and_its_means_are_true(tmp_path):
    pipeline = toy_pipeline(tmp_path, "model={kind: toy_pair, every: 50}", "train.updates=110", "train.log_every=110")
    returned = {}

    def keeping(step):
        def update(*arguments):
            output = step(*arguments)
            for name, value in output.items():
                returned.setdefault(name, []).append(float(value))
            return output

        return update

    pipeline.slots.wrap("update", keeping)
    _, notes = trained(tmp_path, pipeline)
    assert {name: len(values) for name, values in returned.items()} == {"d_loss": 110, "g_loss": 2}
    for name, values in returned.items():
        assert notes.points[f"train/{name}"] == [(110, pytest.approx(math.fsum(values) / len(values)))]


def test_a_role_that_waits_and_gets_no_gradient_is_found_in_its_own_time(tmp_path):
    sets = ("model={kind: toy_pair, every: 2, detached: true}", "train.updates=110")
    pipeline = toy_pipeline(tmp_path, *sets)
    with pytest.raises(RunnerError, match=r"no gradient has reached generator\.bias, generator\.weight .*first 40"):
        trained(tmp_path, pipeline)
    assert pipeline.progress.updates == 40


def test_a_loss_that_is_a_plain_float_stops_the_training_by_its_name(tmp_path):
    pipeline = toy_pipeline(tmp_path, "model={kind: toy_pair}", "train.updates=4")
    pipeline.slots.wrap("update", lambda step: lambda *arguments: step(*arguments) | {"extra": math.nan})
    with pytest.raises(DivergedError, match=r"update 1: slot 'update' returned a tensor 'extra' that is not finite"):
        trained(tmp_path, pipeline)


def test_a_setting_that_is_never_read_is_refused_after_the_first_update(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4", "model.frozen=true", "model.dropout=0.5")
    pipeline._recorded["model"] = pipeline.recipe.model.recorded()  # as if nobody had read it
    with pytest.raises(RecipeError, match=r"model\.dropout: no plugin reads this value"):
        trained(tmp_path, pipeline)
    assert pipeline.progress.updates == 1


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize(
    ("kind", "message"),
    [("toy_silent", "Silent.update should return a dictionary"), ("toy_misspelt", "the objective is 'los'")],
)
def test_the_command_line_says_one_sentence_and_no_traceback(kind, message, tmp_path):
    child = forked(*written(tmp_path, f"model.kind={kind}", "train.updates=10"))
    assert child.returncode == 1
    assert message in child.stderr
    assert "Traceback" not in child.stderr


def test_the_display_is_told_each_phase_and_the_best_value_of_the_objective(tmp_path):
    """Best of a loss is the lowest; the last evaluation is no better than the one before."""
    pipeline = toy_pipeline(tmp_path, "train.updates=4", "train.evaluate_every=2")
    losses = iter([0.0, 1.0, 2.0])  # the first is that of the rehearsal
    pipeline.source.evaluate = lambda learner: {"loss": next(losses)}
    _, notes = trained(tmp_path, pipeline)
    assert notes.phases[:4] == ["training", "warm-up", "first update", "rehearsing the evaluation"]
    assert notes.phases[4:].count("evaluating") == 2
    assert "saving a checkpoint" in notes.phases
    assert notes.best == [1.0, 1.0]


def test_a_resumed_training_shows_the_best_value_from_before(tmp_path):
    first, second = (toy_pipeline(tmp_path, "train.updates=4", "train.evaluate_every=2") for _ in range(2))
    loop, notes = trained(tmp_path / "first", first)
    resumed, shown = Notes(), Notes()
    again = Loop(second, tmp_path / "second", resumed, shown, Stop())
    again.load_state_dict(loop.state_dict())
    assert shown.best == notes.best[-1:]


def test_what_a_source_reports_apart_is_a_phase_with_a_word_of_its_own(tmp_path):
    pipeline = assemble(tiny("marl_baseline"))
    _, notes = trained(tmp_path, pipeline)
    assert notes.phases[:3] == ["training", "warm-up", "collecting"]
    assert notes.phases.index("collecting") < notes.phases.index("first update")


@pytest.mark.usefixtures("traced_only")
def test_the_first_update_of_a_process_is_called_compiling_where_a_stage_traces(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=2", "optimization.compile=on")
    _, notes = trained(tmp_path, pipeline)
    assert notes.phases.count("compiling") == 1
    assert "first update" not in notes.phases
