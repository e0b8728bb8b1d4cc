"""Updates with numbers that are not finite are skipped without a trace, if the recipe allows it."""

import json
import logging
import math
import signal
from pathlib import Path

import pytest
import torch
from toy_runs import TOYS, Notes, trained, written

from runner.cli.closing_table import show
from runner.distributed.refusals import refuse_recipe
from runner.plugin.registry import Registry
from runner.plugins.stages.amp import AmpConfig
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.console import Console
from runner.system.errors import DivergedError, UsageError
from runner.tracking import Workspace
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.signals import Stop
from runner.training.skipped_updates import Skipped

POISONED = Path(__file__).parents[1] / "poisoned.py"
REGISTRY = Registry([TOYS, POISONED])
SHORT = ("model.kind=poisoned", "train.updates=12", "train.evaluate_every=6", "train.log_every=4")
SKIP = "train.on_nonfinite=skip"
BAD = [3, 7]


def recipe_of(folder, *sets):
    written(folder)
    return load(folder / "toy.yaml", [*SHORT, *sets], REGISTRY)


def pipeline_of(folder, *sets):
    return assemble(recipe_of(folder, *sets), [TOYS, POISONED])


def state_of(learner):
    """Returns the bits of everything that an update changes."""
    state = learner.complete_state()
    moments = state["optimizers"]["model"]["state"].values()
    tensors = [*state["modules"]["model"].values(), *state.get("weight_averages", {}).values()]
    tensors += [torch.as_tensor(value) for group in moments for value in group.values()]
    return [tensor.clone() for tensor in tensors]


def is_same(before, after):
    return len(before) == len(after) and all(map(torch.equal, before, after))


def observed(pipeline):
    """Wraps an update; returns the numbers of those that changed nothing, by which they are filled."""
    unchanged = []

    def watching(step):
        def update(*arguments):
            before = state_of(pipeline.learner)
            output = step(*arguments)
            if is_same(before, state_of(pipeline.learner)):
                unchanged.append(pipeline.progress.updates)
            return output

        return update

    return unchanged, watching


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("sets", [(), ("train.ema=0.9",), ("optimization.gradient_accumulation.micro_batch=3",)])
def test_a_skipped_update_changes_nothing(what, sets, tmp_path, caplog):
    pipeline = pipeline_of(tmp_path, SKIP, f"model.what={what}", "optimizer.max_grad_norm=1.0", *sets)
    notes = Notes()
    loop = Loop(pipeline, tmp_path / "run", notes, notes, Stop())
    unchanged, watching = observed(pipeline)
    pipeline.slots.wrap("update", watching)
    loop.run()
    assert unchanged == BAD
    assert (loop.skipped.count, loop.progress.updates) == (2, 12)
    assert notes.points["train/skipped_updates"] == [(4, 1.0), (8, 2.0), (12, 2.0)]
    assert all(math.isfinite(value) for _, value in notes.points["train/loss"])
    warnings = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    origin = "slot 'loss' returned a tensor 'sum'" if what == "loss" else "the gradient of 'model.3.weight'"
    assert warnings[0].startswith(f"update 4 was skipped (1 of at most 10): {origin}")
    assert loop.skipped.summary() == "2 of 12 updates, whose loss or gradients were not finite (at most 10)"


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_learner_keeps_between_batches_is_restored(in_place, tmp_path):
    """Otherwise, a number that is not finite would spoil all later updates."""
    loop, notes = trained(tmp_path, pipeline_of(tmp_path, SKIP, "model.kind=carrying", f"model.in_place={in_place}"))
    assert (loop.skipped.count, loop.progress.updates) == (2, 12)
    carry = loop.pipeline.learner.carry
    assert carry["calls"] == [10]
    assert carry["mean"].isfinite()
    assert all(math.isfinite(value) for _, value in notes.points["train/loss"])


def test_without_a_bad_batch_the_setting_changes_no_bit(tmp_path):
    stopped, _ = trained(tmp_path, pipeline_of(tmp_path, "model.bad=[]"))
    skipping, notes = trained(tmp_path, pipeline_of(tmp_path, "model.bad=[]", SKIP))
    assert is_same(state_of(stopped.pipeline.learner), state_of(skipping.pipeline.learner))
    assert stopped.skipped is None
    assert notes.points["train/skipped_updates"][-1] == (12, 0.0)


def test_the_default_stops(tmp_path):
    with pytest.raises(DivergedError, match=r"update 4: .* is not finite; the run was stopped"):
        trained(tmp_path, pipeline_of(tmp_path))
    assert "on_nonfinite" not in recipe_of(tmp_path).values()["train"]
    assert recipe_of(tmp_path).digest == recipe_of(tmp_path, "train.on_nonfinite=stop").digest


def test_one_too_many_stops_with_a_diagnosis(tmp_path):
    sets = ("train.on_nonfinite={action: skip, at_most: 1}", "model.what=gradient")
    message = "update 8: the gradient of 'model.3.weight' is not finite; .*; 1 updates were skipped"
    with pytest.raises(DivergedError, match=message):
        trained(tmp_path, pipeline_of(tmp_path, *sets))
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert (diagnosis["update"], diagnosis["found"]["kind"]) == (8, "gradient")


@pytest.mark.parametrize("update", [2, 3, 5, 8])
def test_a_resumed_run_skips_the_same(update, tmp_path):
    expected, expected_notes = trained(tmp_path / "whole", pipeline_of(tmp_path, SKIP))
    pipeline = pipeline_of(tmp_path, SKIP)
    stop = Stop()

    def interrupting(step):
        def interrupted(*arguments):
            if pipeline.progress.updates == update:
                stop.received = signal.SIGTERM
            return step(*arguments)

        return interrupted

    notes = Notes()
    interrupted = Loop(pipeline, tmp_path / "interrupted", notes, notes, stop)
    pipeline.slots.wrap("update", interrupting)
    interrupted.run()
    resumed = Loop(pipeline_of(tmp_path, SKIP), tmp_path / "resumed", notes, notes, Stop())
    resumed.load_state_dict(interrupted.state_dict())
    resumed.run()
    assert is_same(state_of(expected.pipeline.learner), state_of(resumed.pipeline.learner))
    assert resumed.skipped.count == 2
    for name in ("train/loss", "train/skipped_updates", "eval/loss"):
        assert notes.points[name] == expected_notes.points[name]


@pytest.fixture
def fp16_on_a_cpu(monkeypatch):
    monkeypatch.setattr(AmpConfig, "inactive", lambda self, setting: None)
    logging.getLogger("runner").setLevel(logging.WARNING)


@pytest.mark.usefixtures("fp16_on_a_cpu")
@pytest.mark.parametrize("clipping", ["null", "1.0"])
def test_loss_scaling_is_not_touched_by_a_bad_loss(clipping, tmp_path):
    sets = (SKIP, "optimization.amp.dtype=fp16", f"optimizer.max_grad_norm={clipping}")
    pipeline = pipeline_of(tmp_path, *sets)
    scaler = pipeline.stages["amp"].scaler
    # Smaller than by default, with which the first gradients overflow.
    scaler._init_scale = 128.0
    notes = Notes()
    loop = Loop(pipeline, tmp_path / "run", notes, notes, Stop())
    scales = []

    def watching(step):
        def update(*arguments):
            before = dict(scaler.state_dict())
            output = step(*arguments)
            if isinstance(output, Skipped):
                scales.append(before == scaler.state_dict())
            return output

        return update

    pipeline.slots.wrap("update", watching)
    loop.run()
    assert scales == [True, True]
    assert (loop.skipped.count, loop.progress.updates) == (2, 12)


@pytest.mark.usefixtures("fp16_on_a_cpu")
def test_gradients_that_overflow_are_the_scalers_affair(tmp_path):
    sets = (SKIP, "optimization.amp.dtype=fp16", "model.what=gradient")
    pipeline = pipeline_of(tmp_path, *sets)
    scaler = pipeline.stages["amp"].scaler
    scaler._init_scale = 128.0
    loop, _ = trained(tmp_path, pipeline)
    assert loop.skipped.count == 0
    assert scaler.get_scale() == 128.0 / 4


OWN = "has an update of its own, which may step an optimizer before a later loss is computed"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("model={kind: toy_pair}",), f"train.on_nonfinite: 'toy_pair' {OWN}"),
        (("model={kind: toy_silent}",), f"train.on_nonfinite: 'toy_silent' {OWN}"),
        (("optimization.cuda_graph=on",), "train.on_nonfinite: 'cuda_graph' captures an update, which cannot end"),
        (("train.on_nonfinite={action: stop, at_most: 3}",), "train.on_nonfinite: at_most has no effect with action"),
        (("train.on_nonfinite=skp",), "train.on_nonfinite: should be 'stop' or 'skip', got 'skp' - did"),
        (("train.on_nonfinite.at_most=0",), "train.on_nonfinite.at_most: should be greater than or equal to 1, got 0"),
    ],
)  # fmt: skip
def test_misuse_is_one_line(sets, message, tmp_path):
    first = () if "on_nonfinite" in sets[0] else (SKIP,)
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, *first, *sets)
    (problem,) = caught.value.problems
    assert f"{problem.path}: {problem.message}".startswith(message)


def test_several_processes_refuse_it(tmp_path):
    with pytest.raises(UsageError, match=r"train.on_nonfinite: processes might skip different updates; use stop"):
        refuse_recipe(recipe_of(tmp_path, SKIP, "train.batch_size=8"), 2)


@pytest.mark.usefixtures("migrated_workspace")
def test_the_closing_table_has_the_number(tmp_path, capsys):
    result = run(recipe_of(tmp_path, SKIP), REGISTRY, Workspace(), NoOutput())
    show(result, (), Console(width=200))
    assert "skipped   2 of 12 updates" in capsys.readouterr().out
