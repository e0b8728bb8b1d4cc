"""Schedules that react to evaluations, those of plugins too, are followed and resumed bit for bit."""

import json
import signal
from pathlib import Path

import pytest
import torch
from interrupted import survives
from toy_runs import TOYS, Notes, trained, written
from typer.testing import CliRunner

from runner.cli import app
from runner.plugin.lr_scheduler import SCHEDULES
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import drift, read_lock, write_lock
from runner.recipe.resumption import refuse_fixed
from runner.recipe.schema import schema
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import RunnerError
from runner.system.suggestions import shown_path
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop
from runner.verify.subjects import Training

PLUGIN = Path(__file__).parents[1] / "schedules.py"
REGISTRY = Registry([TOYS, PLUGIN])
SHORT = ("train.updates=40", "train.evaluate_every=4", "train.log_every=4")
PLATEAU = "lr_scheduler={kind: plateau, patience: 0, factor: 0.5, min_delta: 0.3, warmup: 0.1}"
PATIENT = "lr_scheduler={kind: patient, warmup: 0.1}"
TRIANGLE = "lr_scheduler={kind: triangle, lowest: 0.2, warmup: 0.1}"
every_schedule = pytest.mark.parametrize("schedule", [PLATEAU, PATIENT], ids=["plateau", "patient"])


def recipe_of(folder, *sets):
    folder.mkdir(exist_ok=True)
    written(folder)
    return load(folder / "toy.yaml", [*SHORT, *sets], REGISTRY)


def pipeline_of(folder, *sets):
    return assemble(recipe_of(folder, *sets), [TOYS, PLUGIN])


def rates_of(notes):
    return [rate for _, rate in notes.points["optimizer/model/lr"]]


def parameters_of(loop):
    return dict(loop.pipeline.learner.named_parameters())


def reductions_of(loop):
    state = loop.parts["adaptive_rates"].state.state_dict()
    return state.get("reductions", state.get("count"))


@every_schedule
def test_a_training_reduces_its_rates(schedule, tmp_path):
    loop, notes = trained(tmp_path, pipeline_of(tmp_path, *SHORT, schedule))
    assert reductions_of(loop) > 1
    # The last evaluation comes after the last update.
    assert rates_of(notes)[-1] in [1e-2 * 0.5 ** (reductions_of(loop) - lag) for lag in (0, 1)]


def test_without_such_a_schedule_there_is_no_state(tmp_path):
    loop, _ = trained(tmp_path, pipeline_of(tmp_path, TRIANGLE))
    assert "adaptive_rates" not in loop.parts
    assert loop.step.adaptive_rates is None
    assert "adaptive_rates" not in loop.state_dict()


def interrupted_at(update, pipeline, folder):
    """Returns the loop of a training that a signal ends, and its notes."""
    stop = Stop()

    def interrupting(step):
        def interrupted(*arguments):
            if pipeline.progress.updates == update:
                stop.received = signal.SIGTERM
            return step(*arguments)

        return interrupted

    pipeline.slots.wrap("update", interrupting)
    notes = Notes()
    loop = Loop(pipeline, folder, notes, notes, stop)
    loop.run()
    return loop, notes


@every_schedule
def test_a_resumed_training_is_the_same(schedule, tmp_path):
    expected, expected_notes = trained(tmp_path / "whole", pipeline_of(tmp_path, schedule))
    # During warm-up, before, at and after evaluations, and at the last one but one.
    for update in (3, 4, 8, 17, 36):
        folder = tmp_path / str(update)
        interrupted, notes = interrupted_at(update, pipeline_of(tmp_path, schedule), folder / "interrupted")
        resumed = Loop(pipeline_of(tmp_path, schedule), folder / "resumed", notes, notes, Stop())
        resumed.load_state_dict(interrupted.state_dict())
        resumed.run()
        assert rates_of(notes) == rates_of(expected_notes), update
        for name, value in parameters_of(expected).items():
            assert torch.equal(value, parameters_of(resumed)[name]), (update, name)


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        (PLATEAU.replace("factor: 0.5", "factor: 0.1"), lambda count: 1e-2 * 0.1**count),
        (PATIENT, lambda _: 1e-2),
        ("lr_scheduler.kind=constant", lambda _: 1e-2),
        ("lr_scheduler={kind: linear}", lambda _: 1e-2 * (1 - 20 / 40)),
    ],
    ids=["other_factor", "other_kind", "constant", "linear"],
)
def test_a_changed_schedule_is_followed_from_the_next_update(schedule, rate, tmp_path):
    loop, _ = interrupted_at(19, pipeline_of(tmp_path, PLATEAU), tmp_path / "interrupted")
    count = reductions_of(loop)
    assert count > 1
    recipe = recipe_of(tmp_path, schedule)
    changed = {change.path for change in refuse_fixed(recipe_of(tmp_path, PLATEAU).values(), recipe)}
    assert all(path.startswith("lr_scheduler.") for path in changed)
    resumed = Loop(assemble(recipe, [TOYS, PLUGIN]), tmp_path / "resumed", Notes(), Notes(), Stop())
    resumed.load_state_dict(loop.state_dict())
    resumed.step(resumed.step.next())
    (group,) = resumed.pipeline.learner.model.optimizer.param_groups[:1]
    assert group["lr"] == pytest.approx(rate(count), rel=1e-9)


@every_schedule
def test_the_sentinel_repeats_updates_with_the_reduced_rate(schedule, tmp_path):
    sets = (schedule, "train.sentinel={share: 0.5}", "optimization.fused_optimizer=on")
    loop, _ = trained(tmp_path, pipeline_of(tmp_path, *sets))
    assert reductions_of(loop) > 1
    assert loop.sentinel.alarms == []


@every_schedule
def test_groups_with_rates_of_their_own_and_averages_follow(schedule, tmp_path):
    sets = (schedule, "optimizer.groups={'*bias': {lr: 0.1}}", "train.ema=0.9")
    loop, _ = trained(tmp_path, pipeline_of(tmp_path, *sets))
    rates = {group["lr"] for group in loop.pipeline.learner.model.optimizer.param_groups}
    low, high = sorted(rates)
    assert high == pytest.approx(10 * low)


def by_hand(loop, schedule_of):
    """Trains the model of a loop again with AdamW and a schedule of torch; returns its parameters.

    Batches and evaluations are those of the runner, the updates and rates are plain torch.
    """
    pipeline = loop.pipeline
    step = loop.step
    module = pipeline.learner.module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = schedule_of(optimizer)
    while pipeline.progress.updates < 40:
        inputs = step.next()
        step.seed(pipeline.progress.updates)
        optimizer.zero_grad()
        loss = pipeline.learner.loss(inputs.batch, inputs.noise, pipeline.progress)
        (loss.sum / loss.count).backward()
        optimizer.step()
        pipeline.progress.updates += 1
        step.count(inputs.batch)
        if pipeline.progress.updates % 4 == 0:
            with pipeline.learner.evaluating():
                schedule.step(pipeline.source.evaluate(pipeline.learner)["loss"])
    return list(module.parameters())


def test_a_plateau_trains_what_plain_torch_trains(tmp_path):
    sets = ("optimizer={kind: adamw, lr: 1e-2, weight_decay: 0.0}",)
    plateau = "lr_scheduler={kind: plateau, patience: 0, factor: 0.5, min_delta: 0.3}"
    loop, _ = trained(tmp_path, pipeline_of(tmp_path, *sets, plateau))
    assert reductions_of(loop) > 1
    again = Loop(pipeline_of(tmp_path, *sets), tmp_path / "again", Notes(), Notes(), Stop())

    def schedule_of(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.3, threshold_mode="abs"
        )

    expected = by_hand(again, schedule_of)
    assert len(expected) == len(parameters_of(loop))
    for value, expected_value in zip(parameters_of(loop).values(), expected, strict=True):
        torch.testing.assert_close(value, expected_value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", [PLATEAU, PATIENT])
def test_verification_changes_the_rates_of_its_updates(schedule, tmp_path):
    training = Training(pipeline_of(tmp_path, schedule, "lr_scheduler.warmup=0"))
    (optimizer,) = [optimizer for _, optimizer in training.pipeline.learner.optimizers()]
    rates = []
    for _ in range(4):
        training._sampled_step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1e-2, 5e-3, 2.5e-3, 1e-2]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ("lr_scheduler.kind=plateau", "train.evaluate_every=null"),
            "lr_scheduler.kind: 'plateau' reacts to evaluations, and there is only the last: set train.evaluate_every",
        ),
        (
            ("lr_scheduler={kind: plateau, metric: eval/x}",),
            "lr_scheduler.metric: is not the objective: set direction to minimize or maximize",
        ),
        (
            ("lr_scheduler={kind: plateau, metric: loss}",),
            r"lr_scheduler.metric: should match pattern '^eval/\S+$', got 'loss'",
        ),
        (
            ("lr_scheduler={kind: plateau, factor: 1.0}",),
            "lr_scheduler.factor: should be less than 1, got 1.0",
        ),
        (
            ("lr_scheduler={kind: plato}",),
            "lr_scheduler.kind: unknown kind 'plato' - did you mean 'plateau'?; --plugin FILE adds the plugins of a "
            "file",
        ),
        (("lr_scheduler={kind: patient, facto: 0.5}",), "lr_scheduler.facto: unknown key - did you mean 'factor'?"),
        (
            ("lr_scheduler={kind: triangle, lowest: 2.0}",),
            "lr_scheduler.lowest: should be less than or equal to 1, got 2.0",
        ),
        (
            ("lr_scheduler={kind: incomplete}",),
            f"lr_scheduler.kind: class Incomplete in {shown_path(PLUGIN)} has no method 'load_state_dict'",
        ),
    ],
)
def test_misuse_is_one_line(sets, message, tmp_path):
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, *sets)
    (problem,) = caught.value.problems
    assert f"{problem.path}: {problem.message}" == message
    assert problem.place.line == 1


@pytest.mark.parametrize("returned", ["-1.0", "-1e-9"])
def test_a_rate_that_is_not_valid_is_refused(returned, tmp_path):
    expected = f"Wrong.rate should return a finite number of at least 0, got {float(returned)!r}"
    with pytest.raises(RunnerError) as caught:
        trained(tmp_path, pipeline_of(tmp_path, f"lr_scheduler={{kind: wrong, returned: {returned}}}"))
    assert str(caught.value) == expected


def test_the_lock_contains_the_plugin_of_a_schedule_but_not_a_schedule_of_the_runner(tmp_path):
    for schedule, names in ((PATIENT, {"lr_scheduler.patient"}), (PLATEAU, set())):
        recipe = recipe_of(tmp_path, schedule)
        lock = write_lock(recipe, tmp_path, REGISTRY)
        locked = read_lock(lock)["plugins"]
        assert {name for name in locked if name.startswith("lr_scheduler.")} == names
        assert [each for each in drift(lock, recipe, REGISTRY) if each.matters] == []


def test_the_schema_has_the_schedules_of_plugins():
    forms = schema(REGISTRY)["properties"]["lr_scheduler"]["anyOf"]
    kinds = {form["properties"]["kind"]["const"] for form in forms}
    assert kinds == SCHEDULES.keys() | {"triangle", "patient", "wrong", "incomplete"}


def test_a_schedule_in_a_file_is_listed():
    listed = CliRunner().invoke(app, ["plugins", "--json", "--plugin", str(PLUGIN)])
    assert listed.exit_code == 0
    cards = [card for card in json.loads(listed.stdout)["plugins"] if card["section"] == "lr_scheduler"]
    settings = {card["kind"]: [setting["name"] for setting in card["settings"]] for card in cards}
    assert settings["triangle"] == ["warmup", "lowest"]
    assert settings["patient"] == ["warmup", "factor"]


def test_a_run_with_a_schedule_of_a_file_survives_a_kill(tmp_path, isolated_workspace):
    command = [*written(tmp_path, *SHORT, "train.checkpoint_every=6", PATIENT), "--plugin", str(PLUGIN)]
    survives(tmp_path, command, isolated_workspace, 0, ["checkpoint.synced=kill@4"])
