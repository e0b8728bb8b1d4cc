"""What learners and sources keep during a training, next to their metrics."""

import csv
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from running import train_here
from toy_runs import toy_pipeline, trained

from runner.plugin.context import Context, Slots
from runner.plugin.media import MediaLog
from runner.plugin.progress import Progress
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import RunnerError
from runner.tracking.spool import lines


@pytest.fixture
def context(tmp_path):
    context = Context(torch.device("cpu"), Slots(), seed=1)
    context.kept = []
    context.media = MediaLog(tmp_path, Progress("updates", 100, updates=7), context.kept.append)
    return context


def only_file(context):
    (path,) = context.kept
    assert path.name.startswith("000000000007.")
    return path


@pytest.mark.parametrize("shape", [(4, 6), (1, 4, 6), (4, 6, 1), (3, 4, 6), (4, 6, 3), (4, 4, 6)])
def test_a_picture_has_the_pixels_that_were_logged(context, shape):
    numbers = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    context.log_image("pixels", torch.from_numpy(numbers).float() / 255)
    with Image.open(only_file(context)) as picture:
        actual = np.asarray(picture)
    expected = np.moveaxis(numbers, 0, -1) if len(shape) == 3 and shape[0] in (1, 3, 4) else numbers
    assert np.array_equal(actual, expected.squeeze(-1) if expected.shape[-1] == 1 else expected)


@pytest.mark.parametrize("shape", [(4,), (2, 4, 6), (1, 3, 4, 6)])
def test_what_is_no_picture_is_refused_with_its_shape(context, shape):
    with pytest.raises(RunnerError, match=r"a picture has the shape \(height, width\)"):
        context.log_image("pixels", torch.zeros(shape))
    assert context.kept == []


def test_a_figure_a_text_and_a_table_are_kept(context):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    context.log_figure("curve", figure)
    context.log_text("words/first", "größer\n")
    context.log_table("table", ["a", "b"], [(1, "x,y"), (2, "z")])
    assert [path.parent.name for path in context.kept] == ["curve", "first", "table"]
    with Image.open(context.kept[0]) as picture:
        assert picture.size == (640, 480)
    assert context.kept[1].read_text(encoding="utf-8") == "größer\n"
    with context.kept[2].open(newline="") as file:
        assert list(csv.reader(file)) == [["a", "b"], ["1", "x,y"], ["2", "z"]]


@given(st.text(max_size=12))
def test_no_name_leads_out_of_the_folder(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("run") / "inside"
    media = MediaLog(folder, Progress("updates", 100), lambda path: None)
    with suppress(RunnerError):
        media.write(name, ".txt", lambda path: path.write_text("words"))
    written = [path for path in folder.parent.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(folder / "media") for path in written)


def test_nothing_is_kept_where_nobody_takes_it(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=2")
    assert pipeline.context.media is None
    pipeline.context.log_text("words", "lost")
    trained(tmp_path, pipeline)
    assert not list(tmp_path.rglob("media"))


@pytest.mark.usefixtures("migrated_workspace")
def test_pictures_of_evaluations_change_no_digit_and_reach_mlflow():
    sets = ("train.evaluate_every=256", "train.tokens=768", "train.batch_size=8", "data.held_out=0.001")
    plain = train_here("shakespeare_gpt", *sets)
    drawn = train_here("shakespeare_gpt", *sets, "tracking.render_every=2")
    folder = Path(drawn.run_dir)
    pictures = sorted(path.name for path in (folder / "media" / "evaluation").iterdir())
    assert pictures == ["000000000512.txt"]
    artifacts = [line.artifact for line, _ in lines(folder / "spool.jsonl") if line.artifact]
    assert f"media/evaluation/{pictures[0]}" in artifacts
    evaluations = {name: value for name, value in plain.metrics.items() if name.startswith("eval/")}
    assert evaluations.items() <= drawn.metrics.items()


def test_a_source_without_pictures_is_refused_with_the_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits_classifier\ntracking:\n  render_every: 2\n")
    with pytest.raises(RecipeError) as caught:
        load(path, (), Registry())
    assert "mine.yaml:3" in str(caught.value)
    assert "'digits' has no picture of its evaluation to draw" in str(caught.value)
