"""Data that changed since a run began are noticed; labels that stand for something else are refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy_runs import TOYS, toy

import runner
from runner.plugin.registry import Registry
from runner.plugins.sequences.token_file import write_tokens
from runner.recipe.loader import load
from runner.recipe.lock import read_lock
from runner.system.errors import UsageError
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking import RunFolder, Workspace
from runner.training import checkpoint
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.resuming import refuse_other_classes
from runner.training.run import run

pytestmark = pytest.mark.usefixtures("migrated_workspace")
IMAGES = """\
name: folder
device: cpu
model: {kind: classifier, widths: [8]}
data: {kind: image_folder, folder: images, side: 8, held_out: 0.3}
train: {epochs: 1, batch_size: 8}
tracking: {system_metrics: false}
"""
TEXT = """\
name: text
device: cpu
model: {kind: gpt, layers: 1, width: 8, heads: 2}
data: {kind: text, file: text.txt, context: 4, held_out: 0.2}
train: {updates: 2, batch_size: 4}
tracking: {system_metrics: false}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(tmp_path / "cache"))


def images(folder):
    generator = np.random.default_rng(0)
    for name in ("bright", "dark"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(16):
            pixels = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.bmp")
    (folder / "images.yaml").write_text(IMAGES)
    return folder / "images.yaml"


def text(folder):
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 8)
    (folder / "text.yaml").write_text(TEXT)
    return folder / "text.yaml"


def another_pixel(folder):
    path = next((folder / "images" / "dark").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(content)


def fewer_images(folder):
    next((folder / "images" / "dark").iterdir()).unlink()


def another_text(folder):
    (folder / "text.txt").write_text("the quick brown dog jumps over the lazy fox. " * 8)


def tokens(folder):
    text(folder)
    write_tokens([folder / "text.txt"], "bytes", folder / "tokens.bin")
    (folder / "text.yaml").write_text(TEXT.replace("kind: text, file: text.txt", "kind: tokens, file: tokens.bin"))
    return folder / "text.yaml"


def other_tokens(folder):
    another_text(folder)
    write_tokens([folder / "text.txt"], "bytes", folder / "tokens.bin")


CHANGES = [(images, another_pixel), (images, fewer_images), (text, another_text), (tokens, other_tokens)]


def resume(folder, registry, **options):
    unit, length = load(folder.path / LOCK_NAME, [], registry).length
    longer = load(folder.path / LOCK_NAME, [f"train.{unit}={length + 1}"], registry)
    return run(longer, registry, Workspace(), NoOutput(), folder, **options)


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_data_that_changed_have_another_fingerprint(make, change, tmp_path):
    recipe = make(tmp_path)
    before, again = (assemble(load(recipe, [], Registry())).source.fingerprint() for _ in range(2))
    assert before == again
    change(tmp_path)
    assert assemble(load(recipe, [], Registry())).source.fingerprint() != before


def test_data_that_changed_are_refused_at_resume_and_reported_when_a_lock_is_run(tmp_path, caplog):
    recipe, registry = text(tmp_path), Registry()
    first = run(load(recipe, [], registry), registry, Workspace(), NoOutput())
    folder, lock = RunFolder(Path(first.run_dir)), Path(first.lock)
    before = read_lock(lock)["data"]["fingerprint"]
    run(load(lock, [], registry), registry, Workspace(), NoOutput())
    assert "data.fingerprint" not in caplog.text
    another_text(tmp_path)
    with pytest.raises(UsageError, match=r"its data have changed; restore them, or .* --allow-drift$"):
        resume(folder, registry)
    run(load(lock, [], registry), registry, Workspace(), NoOutput())
    assert f"drift: data.fingerprint: {before[:12]} in the lock" in caplog.text
    assert resume(folder, registry, allow_drift=True).status == "FINISHED"
    assert read_lock(lock)["data"]["fingerprint"] != before
    resume(folder, registry)  # which has been accepted


NAMED_ROWS = """\
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss


class ScoredConfig(DatasetConfig):
    \"\"\"Texts and their scores.\"\"\"

    kind, provides, implementation = "scored", "scored", "Scored"
    folder: str


class Texts(Dataset):
    def __init__(self, folder):
        self.folder = folder
        self.rows = json.loads(Path(folder, "rows.json").read_text())

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        text = Path(self.folder, row["file"]).read_text()
        return {"length": torch.tensor([float(len(text))]), "score": torch.tensor([row["score"]])}


class Scored(DatasetSource):
    def datasets(self, config):
        return Texts(config.folder), Texts(config.folder)


class ScorerConfig(GradientLearnerConfig):
    \"\"\"Predicts a score.\"\"\"

    kind, learns_from, implementation = "scorer", "scored", "Scorer"


class Scorer(GradientLearner):
    def build(self, config, shapes, context):
        return nn.Linear(1, 1)

    def loss(self, batch, noise, progress):
        error = self.slots.forward(batch["length"]) - batch["score"]
        return Loss((error**2).sum(), len(error))
"""


def write_named_rows(folder, score=0.0, text="one"):
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text(text)
    rows = [{"file": "a.txt", "score": 1.0}, {"file": "a.txt", "score": score}]
    (folder / "texts" / "rows.json").write_text(json.dumps(rows))


@pytest.mark.parametrize("change", [{"score": 0.5}, {"text": "two"}, {}])
def test_rows_of_a_list_and_the_files_they_name_are_compared_at_resume(change, tmp_path):
    (tmp_path / "scored.py").write_text(NAMED_ROWS)
    write_named_rows(tmp_path)
    recipe = {
        "name": "scored",
        "device": "cpu",
        "model": {"kind": "scorer"},
        "data": {"kind": "scored", "folder": str(tmp_path / "texts")},
        "train": {"updates": 2, "batch_size": 2},
    }
    registry = Registry([tmp_path / "scored.py"])
    first = run(load(recipe, [], registry), registry, Workspace(), NoOutput())
    write_named_rows(tmp_path, **change)
    folder = RunFolder(Path(first.run_dir))
    if not change:
        assert resume(folder, registry).status == "FINISHED"
        return
    with pytest.raises(UsageError, match="its data have changed"):
        resume(folder, registry)


def test_tables_in_memory_that_changed_are_refused_and_data_that_moved_are_not(tmp_path):
    registry = Registry([TOYS])
    first = run(toy(tmp_path, "train.updates=2"), registry, Workspace(), NoOutput())
    folder = RunFolder(Path(first.run_dir))
    rows = load(folder.path / LOCK_NAME, ["train.updates=3"], registry)
    assert run(rows, registry, Workspace(), NoOutput(), folder).status == "FINISHED"
    longer = load(folder.path / LOCK_NAME, ["train.updates=4"], registry)
    source = type(assemble(rows, [TOYS]).source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "fingerprint", lambda self: "other")
        with pytest.raises(UsageError, match="its data have changed"):
            run(longer, registry, Workspace(), NoOutput(), folder)
    second = run(load(text(tmp_path), [], registry), registry, Workspace(), NoOutput())
    shutil.copy(tmp_path / "text.txt", tmp_path / "moved.txt")
    moved = load(second.lock, [f"data.file={tmp_path / 'moved.txt'}", "train.updates=3"], registry)
    assert run(moved, registry, Workspace(), NoOutput(), RunFolder(Path(second.run_dir))).status == "FINISHED"


def test_a_renamed_folder_swaps_no_labels(tmp_path):
    recipe, registry = images(tmp_path), Registry()
    first = run(load(recipe, [], registry), registry, Workspace(), NoOutput())
    folder = RunFolder(Path(first.run_dir))
    assert checkpoint.load_newest(folder.checkpoints)["pipeline"]["classes"] == ["bright", "dark"]
    runner.load_model(first)
    (tmp_path / "images" / "bright").rename(tmp_path / "images" / "light")
    said = "class 0 was 'bright' when the model was trained, and is 'dark' now"
    with pytest.raises(UsageError, match=said):
        resume(folder, registry, allow_drift=True)
    with pytest.raises(UsageError, match=said):
        runner.load_model(first)


@pytest.mark.parametrize(
    ("trained", "present", "message"),
    [
        (["a", "b"], ["b", "a"], "class 0 was 'a' when the model was trained, and is 'b' now"),
        (["a", "b"], ["a", "c"], "class 1 was 'b' .* is 'c' now"),
        (["a", "b"], ["a", "b", "c"], "2 classes, and the data have 3"),
        (["a"], [], "1 classes, and the data have 0"),
    ],
)
def test_other_classes_are_refused(trained, present, message):
    with pytest.raises(UsageError, match=message):
        refuse_other_classes(trained, present)
    refuse_other_classes(trained, trained)
    refuse_other_classes(None, present)
    refuse_other_classes([], present)
