"""A training is counted in one unit, and so are all its intervals."""

from itertools import pairwise

import pytest
from running import tiny
from toy_runs import toy_pipeline, trained

from runner.training import checkpoint
from runner.training.pipeline import assemble

PER_UPDATE = {"updates": 1, "samples": 8, "tokens": 48}
"""Of batches of eight sentences of six words."""
UPDATES_PER_EPOCH = 5


def intervals(unit, length, log, evaluate, save):
    pairs = {unit: length, "log_every": log, "evaluate_every": evaluate, "checkpoint_every": save}
    return [f"train.{key}={value}" for key, value in pairs.items()]


def checkpoints(loop):
    """How far the checkpoints that are left say that they are, oldest first."""
    return [checkpoint.read_manifest(path)["done"] for path in checkpoint.checkpoints(loop.writer.folder)]


def steps(notes, name):
    return [step for step, _ in notes.points[name]]


def counted(folder, unit, of_updates):
    """The training of 20 updates, counted in a unit, with intervals of so many updates."""
    scale = PER_UPDATE.get(unit) or 1 / UPDATES_PER_EPOCH
    numbers = [int(updates * scale) for updates in of_updates]
    return (numbers, *trained(folder, toy_pipeline(folder, *intervals(unit, *numbers))))


@pytest.mark.parametrize("unit", ["updates", "epochs", "samples", "tokens"])
def test_reports_evaluations_and_checkpoints_come_in_the_recipes_unit(unit, tmp_path):
    (length, log, evaluate, save), loop, notes = counted(tmp_path, unit, (20, 5, 10, 5))
    assert (loop.progress.updates, loop.progress.done) == (20, length)
    assert steps(notes, "train/loss") == list(range(log, length + 1, log))
    assert steps(notes, "eval/loss") == list(range(evaluate, length + 1, evaluate))
    assert checkpoints(loop)[-2:] == [length - save, length]
    assert loop.state_dict()["step"] == notes.shown[-1] == length
    speed = "samples" if unit == "epochs" else unit
    assert len(notes.points[f"perf/{speed}_per_second"]) == length // log


def test_the_unit_changes_nothing_of_what_is_learnt(tmp_path):
    values = []
    for unit in ("updates", "epochs", "samples", "tokens"):
        folder = tmp_path / unit
        folder.mkdir()
        *_, notes = counted(folder, unit, (20, 5, 10, 5))
        values.append([[value for _, value in notes.points[name]] for name in ("train/loss", "eval/loss")])
    assert all(one == other for one, other in pairwise(values))


def test_an_interval_that_no_update_ends_at_is_kept_by_the_next_one(tmp_path):
    pipeline = toy_pipeline(tmp_path, *intervals("tokens", 490, 100, 200, 200))
    loop, notes = trained(tmp_path, pipeline)
    assert loop.progress.tokens == 528  # the first number of whole batches that is not less
    assert steps(notes, "train/loss") == [144, 240, 336, 432, 528]
    assert steps(notes, "eval/loss") == [240, 432, 528]
    assert checkpoints(loop)[-2:] == [432, 528]


def test_a_training_counted_in_environment_steps(tmp_path):
    loop, notes = trained(tmp_path, assemble(tiny("marl_baseline", *intervals("env_steps", 160, 40, 80, 80))))
    assert loop.progress.env_steps == 160
    assert loop.progress.updates == (160 - 64) / 4  # one for every four steps
    assert steps(notes, "train/critic_loss") == [80, 120, 160]  # the first 64 are the warm-up
    assert steps(notes, "eval/return") == [80, 160]
    assert checkpoints(loop) == [80, 160]


def test_an_epoch_is_all_whole_batches_in_an_order_of_its_own(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.epochs=3", "data.rows=43")
    seen = []
    pipeline.slots.wrap("update", lambda step: lambda batch, *rest: seen.append(batch["words"]) or step(batch, *rest))
    loop, _ = trained(tmp_path, pipeline)
    assert (loop.progress.epochs, loop.progress.samples, loop.progress.updates) == (3, 120, 15)
    assert checkpoints(loop) == [3]
    epochs = [[tuple(row.tolist()) for words in seen[i : i + 5] for row in words] for i in (0, 5, 10)]
    assert epochs[0] != epochs[1] != epochs[2]
