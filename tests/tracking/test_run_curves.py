"""The plot of a run's evaluations."""

import random
from types import SimpleNamespace

import pytest
from canvases import cut, kept, told
from run_folders import run_folder

from runner.tracking.run_curves import CURVES, draw_run
from runner.tracking.spool import Spool

METRICS = ("loss", "accuracy", "nats", "rmse", "strict")


@pytest.fixture
def recipe():
    plugin = SimpleNamespace(bounds={})
    return SimpleNamespace(
        seed=3, length=("epochs", 12), headline=("accuracy",), model=plugin, data=plugin, objective=None
    )


def log(folder, evaluations):
    """Logs metrics of evaluations by step, with others that are no evaluation."""
    spool = Spool(folder.spool)
    for step, metrics in evaluations.items():
        spool.append(step=step, metrics={f"eval/{name}": value for name, value in metrics.items()})
        spool.append(step=step, metrics={"train/loss": 1.0})
    spool.close()


@pytest.mark.parametrize("seed", range(50))
def test_evaluations_of_two_steps_or_more_are_drawn_the_primary_metrics_first(
    isolated_workspace, monkeypatch, recipe, seed
):
    rng = random.Random(seed)
    names = rng.sample(METRICS, rng.randint(1, 4))
    steps = rng.sample(range(1, 50), rng.randint(0, 4))
    folder = run_folder()
    log(folder, {step: {name: rng.random() for name in names} for step in sorted(steps)})
    drawn = []
    monkeypatch.setattr("runner.tracking.seeds.draw_all", lambda pictures, place: drawn.append((pictures, place)) or [])
    draw_run(folder, recipe)
    assert len(drawn) == (len(steps) > 1)
    for pictures, place in drawn:
        assert place == folder.path
        ((_, (_, (width, _))),) = pictures.items()
        assert width == 4.0 * len(names)


def test_the_plot_has_the_name_of_each_metric_and_its_points(isolated_workspace, monkeypatch, recipe):
    figures = kept(monkeypatch)
    folder = run_folder()
    log(folder, {step: {"loss": 1 / step, "accuracy": step / 9} for step in (2, 4, 8)})
    assert [path.name for path in draw_run(folder, recipe)] == [CURVES]
    figure = figures["curves"]
    assert [axes.get_title() for axes in figure.axes] == ["accuracy", "loss"]
    assert [[*axes.lines[0].get_xdata()] for axes in figure.axes] == [[2, 4, 8]] * 2
    assert told(figure) == {"evaluation"}
    assert cut(figure) == []


def test_a_disk_that_refuses_the_plot_costs_no_training(isolated_workspace, monkeypatch, recipe, caplog):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    folder = run_folder()
    log(folder, {1: {"loss": 1.0}, 2: {"loss": 0.5}})
    monkeypatch.setattr("runner.tracking.seeds.draw_all", refuse)
    assert draw_run(folder, recipe) == []
    assert "the evaluations could not be drawn: No space left on device" in caplog.text
