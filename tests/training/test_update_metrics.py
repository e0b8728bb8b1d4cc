"""Learning rates, gradient norms and update ratios that every training logs."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_runs import RECIPE, TOYS, Notes, toy_pipeline, trained

from runner.api import Progress, Slots
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.checkpoint import kept
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop
from runner.training.update_metrics import LEAST_UPDATES, UpdateMetrics

PREFIX = "optimizer/"


def loop_of(folder, *sets):
    pipeline = toy_pipeline(folder, *sets)
    notes = Notes()
    return Loop(pipeline, folder / "run", notes, notes, Stop()), notes


def points(notes):
    return {name: values for name, values in notes.points.items() if name.startswith(PREFIX)}


def norm(tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


@pytest.mark.parametrize("interval", [LEAST_UPDATES, LEAST_UPDATES + 1])
def test_every_report_has_a_measured_update_if_there_are_enough_between(interval, tmp_path):
    loop, notes = loop_of(tmp_path, f"train.updates={3 * interval}", f"train.log_every={interval}")
    loop.run()
    assert len(points(notes)["optimizer/model/update_ratio"]) == 3


@pytest.mark.parametrize("clipping", ["null", "0.01", "100.0"])
def test_the_last_update_before_a_report_is_measured(clipping, tmp_path):
    loop, notes = loop_of(
        tmp_path,
        "train.updates=50",
        "train.log_every=25",
        f"optimizer={{kind: adam, lr: 0.01, max_grad_norm: {clipping}}}",
        "lr_scheduler.kind=linear",
        "model.dropout=0.0",
    )
    learner = loop.pipeline.learner
    parameters = list(learner.module.parameters())
    measured = []

    def measuring(step):
        def update(*arguments):
            before = [parameter.detach().clone() for parameter in parameters]
            output = step(*arguments)
            changes = [parameter.detach() - old for parameter, old in zip(parameters, before, strict=True)]
            measured.append((norm(gradients), norm(changes) / norm(before)))
            return output

        return update

    gradients = []

    def backward(step):
        def backward(loss):
            step(loss)
            gradients[:] = [parameter.grad.clone() for parameter in parameters]

        return backward

    loop.pipeline.slots.wrap("update", measuring)
    loop.pipeline.slots.wrap("backward", backward)
    loop.run()
    for number, name in enumerate(("gradient_norm", "update_ratio")):
        expected = [(at, pytest.approx(measured[at - 1][number], rel=1e-4)) for at in (25, 50)]
        assert notes.points[f"optimizer/model/{name}"] == expected
    rates = [0.01 * (1 - (at - 1) / 50) for at in (25, 50)]
    assert notes.points["optimizer/model/lr"] == list(zip((25, 50), map(pytest.approx, rates), strict=True))


def test_measuring_changes_no_digit(tmp_path, monkeypatch):
    sets = ("train.updates=12", "train.log_every=3", "optimizer.max_grad_norm=0.1")
    measured, notes = loop_of(tmp_path, *sets)
    measured.run()
    assert len(notes.points["optimizer/model/update_ratio"]) == 1
    monkeypatch.setattr(UpdateMetrics, "is_due", lambda *_: False)
    plain, _ = loop_of(tmp_path, *sets)
    plain.run()
    for (name, left), (_, right) in zip(
        measured.pipeline.learner.named_parameters(), plain.pipeline.learner.named_parameters(), strict=True
    ):
        assert torch.equal(left, right), name


LAYERED = [TOYS, TOYS.with_name("annealing.py"), TOYS.with_name("poisoned.py")]
CLIPPED = {"kind": "sgd", "lr": 0.01, "max_grad_norm": 100.0}
CHANGING = {
    "plain": {},
    "unfrozen": {"model": {"kind": "toy_layered", "thaw": 5}},
    "frozen": {"model": {"kind": "toy_layered", "freeze": 12}},
    "frozen again": {"model": {"kind": "toy_layered", "thaw": 3, "freeze": 12}},
    "pauses": {"model": {"kind": "toy_pair", "every": 8}},
    "skipped": {"model": {"kind": "poisoned", "bad": [19, 20, 21]}, "train.on_nonfinite": "skip"},
}


def loop_with(folder, settings, *sets, state=None):
    (folder / "toy.yaml").write_text(RECIPE)
    pairs = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    pipeline = assemble(load(folder / "toy.yaml", [*pairs, *sets], Registry(LAYERED)), LAYERED)
    notes = Notes()
    loop = Loop(pipeline, folder / "run", notes, notes, Stop())
    if state is not None:
        loop.load_state_dict(state)
    return loop, notes


@pytest.mark.parametrize("name", ["unfrozen", "frozen", "frozen again"])
def test_only_gradients_of_the_last_update_are_in_the_norm(name, tmp_path):
    sets = ("train.updates=24", "train.log_every=24")
    loop, notes = loop_with(tmp_path, CHANGING[name] | {"optimizer": CLIPPED}, *sets)
    norms = []

    def clipping(clip):
        def clipped(parameters, *arguments):
            norms.append(norm([parameter.grad for parameter in parameters]))
            return clip(parameters, *arguments)

        return clipped

    loop.pipeline.slots.wrap("clip", clipping)
    loop.run()
    assert notes.points["optimizer/model/gradient_norm"] == [(24, pytest.approx(norms[-1], rel=1e-4))]


@pytest.mark.parametrize("clipping", [None, 100.0])
@pytest.mark.parametrize("name", CHANGING)
def test_a_resumed_training_logs_the_same(name, clipping, tmp_path, monkeypatch):
    sets = ("train.updates=30", "train.log_every=4", "train.checkpoint_every=1")
    settings = CHANGING[name] | {"optimizer": CLIPPED | {"max_grad_norm": clipping}}
    complete, expected = loop_with(tmp_path, settings, *sets)
    states = {}
    monkeypatch.setattr(
        complete.writer, "save", lambda position, state, *_: states.__setitem__(position, (kept(state), snapshot()))
    )

    def snapshot():
        return {name: list(values) for name, values in points(expected).items()}

    complete.run()
    for cut in (1, 19, 20, 21, 24, 29, 30):
        state, logged = states[cut]
        resumed, notes = loop_with(tmp_path, settings, *sets, state=state)
        resumed.run()
        later = points(notes)
        joined = {name: logged.get(name, []) + later.get(name, []) for name in logged.keys() | later.keys()}
        assert joined == points(expected), cut


def test_roles_and_groups_have_names(tmp_path):
    path = tmp_path / "pair.yaml"
    section = "{generator: {kind: adam, lr: 0.1, groups: {bias: {lr: 0.2}}}, discriminator: {kind: sgd, lr: 0.3}}"
    path.write_text(RECIPE.replace("{lr: 1e-2}", section))
    recipe = load(path, ["model={kind: toy_pair, every: 2}", "train.updates=6"], Registry([TOYS]))
    _, notes = trained(tmp_path, assemble(recipe, [TOYS]))
    assert set(points(notes)) == {
        "optimizer/generator/default/lr",
        "optimizer/generator/bias/lr",
        "optimizer/generator/gradient_norm",
        "optimizer/generator/update_ratio",
        "optimizer/discriminator/lr",
        "optimizer/discriminator/gradient_norm",
        "optimizer/discriminator/update_ratio",
    }
    assert notes.points["optimizer/generator/bias/lr"] == [(6, 0.2)]


def test_groups_of_an_author_are_numbered(tmp_path):
    plugins = [TOYS, TOYS.with_name("annealing.py")]
    path = tmp_path / "toy.yaml"
    path.write_text(
        "name: toy\nmodel: {kind: toy_layered, rates: [0.1, 0.2]}\ndata: {kind: toy_words}\ntrain: {batch_size: 8}\n"
    )
    pipeline = assemble(load(path, ["train.updates=3", "device=cpu"], Registry(plugins)), plugins)
    notes = Notes()
    Loop(pipeline, tmp_path / "run", notes, notes, Stop()).run()
    assert notes.points["optimizer/model/group_0/lr"] == [(3, 0.1)]
    assert notes.points["optimizer/model/group_1/lr"] == [(3, 0.2)]


def test_large_roles_are_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.training.update_metrics.MOST_NUMBERS", 20)
    loop, notes = loop_of(tmp_path, "train.updates=4")
    loop.run()
    ((_, ratio),) = notes.points["optimizer/model/update_ratio"]
    assert 0 < ratio < 1


def test_a_clip_without_a_norm_logs_none(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4", "optimizer.max_grad_norm=0.1")
    clip = pipeline.slots.clip

    def silent(parameters, norm):
        clip(parameters, norm)

    pipeline.slots.replace("clip", silent)
    notes = Notes()
    Loop(pipeline, tmp_path / "run", notes, notes, Stop()).run()
    assert set(points(notes)) == {"optimizer/model/lr", "optimizer/model/update_ratio"}


@given(
    batch=st.integers(1, 40),
    partial=st.integers(1, 40),
    interval=st.integers(1, 500),
    length=st.integers(1, 2000),
)
def test_the_last_update_of_an_interval_is_due(batch, partial, interval, length):
    """Updates have one size, and the last one of an epoch has another."""
    progress = Progress("samples", length)
    recipe = SimpleNamespace(optimizer={})
    metrics = UpdateMetrics(SimpleNamespace(progress=progress, recipe=recipe, slots=Slots()), interval)
    metrics._rates = dict
    last_measured = -LEAST_UPDATES
    while progress.position < length:
        previous = progress.position
        size = min(batch, partial) if progress.updates % 5 == 4 else batch
        is_due = metrics.is_due(previous)
        progress.advance({"samples": size})
        progress.updates += 1
        crosses = previous // interval != progress.position // interval or progress.position >= length
        can_be_due = progress.updates >= max(2, last_measured + LEAST_UPDATES)
        mean = previous / max(1, progress.updates - 1)
        if crosses and can_be_due and size <= 1.25 * mean:
            assert is_due
        if is_due:
            assert can_be_due
            last_measured = metrics._measured_at = progress.updates
        if crosses:
            metrics.take()
