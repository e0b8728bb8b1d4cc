import hashlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from runner.api import UsageError
from runner.plugin.registry import Registry
from runner.plugins.sequences.windows import Windows
from runner.recipe.loader import load
from runner.training.pipeline import assemble

TEXT = "".join(chr(97 + i * i % 23) for i in range(403)) + "äß€𝄞"


@pytest.fixture(autouse=True)
def no_data(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def recipe(folder, data, *sets):
    path = folder / "recipe.yaml"
    path.write_text(
        "name: text\ndevice: cpu\nmodel: {kind: gpt, layers: 1, width: 8, heads: 1}\n"
        f"data: {data}\ntrain: {{tokens: 1000, batch_size: 4}}\n"
    )
    return load(path, sets, Registry())


def source_of(folder, data, *sets):
    return assemble(recipe(folder, data, *sets)).source


@pytest.mark.parametrize("context", [1, 7, 10, 39, 40, 41, 200])
def test_every_held_out_character_is_predicted_once(tmp_path, context):
    (tmp_path / "text.txt").write_text(TEXT)
    made = source_of(tmp_path, f"{{kind: text, file: text.txt, context: {context}}}")
    batches = [batch["tokens"] for batch in made.held_out_batches()]
    predicted = [row[1:] for batch in batches for row in batch]
    assert max(len(row) for row in predicted) <= context
    cut = int(len(TEXT) * 0.9)
    vocabulary = sorted(set(TEXT))
    assert "".join(vocabulary[i] for i in torch.cat(predicted)) == TEXT[cut:]
    learner = assemble(recipe(tmp_path, f"{{kind: text, file: text.txt, context: {context}}}")).learner
    assert sum(learner.metrics({"tokens": b})["nats_per_character"].count for b in batches) == len(TEXT) - cut


def test_what_is_trained_on_ends_where_the_held_out_part_begins(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    made = source_of(tmp_path, "{kind: text, file: text.txt, context: 5}")
    windows = made.train.take(torch.arange(len(made.train)))["tokens"]
    vocabulary = sorted(set(TEXT))
    found = ["".join(vocabulary[i] for i in row) for row in windows]
    cut = int(len(TEXT) * 0.9)
    assert found == [TEXT[start : start + 6] for start in range(cut - 5)]
    assert made.sizes == {"vocabulary": len(vocabulary)}
    assert made.shapes == {"tokens": (6,)}
    assert made.fingerprint() == hashlib.sha256(TEXT.encode()).hexdigest()


def test_windows_are_gathered_as_a_loop_would():
    tokens = torch.arange(50, dtype=torch.int32)
    windows = Windows(tokens, 6, 3)
    taken = windows.take(torch.tensor([0, 4, len(windows) - 1]))["tokens"]
    assert taken.tolist() == [list(range(start, start + 7)) for start in (0, 12, 3 * (len(windows) - 1))]
    assert taken.dtype == torch.int64
    assert len(Windows(tokens[:6], 6, 6)) == 0


def test_a_path_starts_at_the_recipe_and_on_the_command_line_at_the_working_directory(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "texts", there):
        folder.mkdir(parents=True)
    (here / "texts" / "a.txt").write_text(TEXT)
    (there / "a.txt").write_text(TEXT[::-1])
    monkeypatch.chdir(there)
    written = "{kind: text, file: texts/a.txt, context: 5}"
    assert recipe(here, written).data.file == str(here / "texts" / "a.txt")
    assert recipe(here, written, "data.file=a.txt").data.file == str(there / "a.txt")
    (here / "over.yaml").write_text("extends: recipe.yaml\n")
    monkeypatch.chdir("/")
    assert load(here / "over.yaml", (), Registry()).data.file == str(here / "texts" / "a.txt")


@pytest.mark.parametrize("where", ["root", "RUNNER_DATA", "cache"])
def test_a_bare_name_is_looked_for_in_the_folders_of_data(tmp_path, where):
    folder = {"root": "mine", "RUNNER_DATA": "data", "cache": "cache/runner/data"}[where]
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "book.txt").write_text(TEXT)
    made = source_of(tmp_path, "{kind: text, file: book.txt, root: mine, context: 5}")
    assert made.fingerprint() == hashlib.sha256(TEXT.encode()).hexdigest()


def test_synthetic_text_is_that_of_pythons_help(tmp_path):
    made = source_of(tmp_path, "{kind: text, context: 5, synthetic: true}")
    topics = Path(find_spec("pydoc_data.topics").origin)
    assert made.fingerprint() == hashlib.sha256(topics.read_bytes()).hexdigest()


def test_a_file_that_is_called_like_a_published_one_and_is_not_it_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tinyshakespeare.txt").write_text(TEXT)
    with pytest.raises(UsageError) as caught:
        source_of(tmp_path, "{kind: text}")
    assert hashlib.sha256(TEXT.encode()).hexdigest() in str(caught.value)
    assert "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nothing.txt", r"data\.file: no 'nothing\.txt' in .*data, .*cache.*, nor next to the recipe"),
        ("texts/nothing.txt", r"data\.file: no such file: .*/texts/nothing\.txt"),
        ("latin.txt", r"data\.file: .*latin\.txt is not text in UTF-8: .* at byte 3"),
        ("short.txt", r"data\.file: .*short\.txt has 10 characters, too few for windows of 128"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_message(tmp_path, file, message):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    (tmp_path / "short.txt").write_text("0123456789")
    with pytest.raises(UsageError, match=message):
        source_of(tmp_path, f"{{kind: text, file: {file}}}")
