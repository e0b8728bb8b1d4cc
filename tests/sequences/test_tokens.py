"""Files of tokens: prepared from texts, read as windows, and refused with one line."""

import json
import random
import re
import sys

import numpy as np
import pytest
import tokenizers
import torch
from running import forked
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from runner.api import UsageError
from runner.plugin.registry import Registry
from runner.plugins.sequences import tokenizers as ours
from runner.plugins.sequences.token_file import description_path, read_description, read_tokens, write_tokens
from runner.recipe.loader import load
from runner.training.pipeline import assemble

WORDS = ("the", "quick", "brown", "fox", "jumps", "über", "lazy", "€𝄞", "dog", "  ", "\n", "\n\n", "\r\n", "1.5")


@pytest.fixture(autouse=True)
def no_data(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(tmp_path / "cache"))


def random_text(seed, words=400):
    choice = random.Random(seed)
    return "".join(choice.choice(WORDS) + choice.choice(("", " ", "\n")) for _ in range(words))


def written(path, text):
    path.write_bytes(text.encode())
    return path


def tokenizer_file(folder, texts):
    """Trains a tokenizer of 300 tokens, and returns its file."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=300, special_tokens=[ours.END_OF_TEXT], initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def recipe(folder, *settings):
    path = folder / "recipe.yaml"
    path.write_text(
        "name: tokens\ndevice: cpu\nmodel: {kind: gpt, layers: 1, width: 8, heads: 1}\n"
        "data: {kind: tokens, file: tokens.bin, context: 8, held_out: 0.2}\ntrain: {updates: 3, batch_size: 2}\n"
    )
    return load(path, list(settings), Registry())


def source_of(folder, *settings):
    return assemble(recipe(folder, *settings)).source


def described(path, **fields):
    """Changes fields of a description; None removes one."""
    place = description_path(path)
    content = json.loads(place.read_text()) | fields
    place.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize("seed", range(50))
def test_texts_come_back_from_tokens_of_any_tokenizer(seed, tmp_path, monkeypatch):
    """Pieces are as short as a few characters, so that every text is cut."""
    choice = random.Random(seed)
    monkeypatch.setattr(ours, "PIECE", choice.randint(5, 200))
    texts = [random_text(f"{seed} {number}", choice.randint(1, 300)) for number in range(choice.randint(1, 3))]
    files = [written(tmp_path / f"{number}.txt", text) for number, text in enumerate(texts)]
    joined = "".join(texts)
    out = tmp_path / "tokens.bin"

    write_tokens(files, "bytes", out)
    numbers = np.fromfile(out, "<u2")
    assert bytes(numbers.astype(np.uint8)).decode() == joined

    description = write_tokens(files, "characters", out)
    numbers = np.fromfile(out, "<u2")
    assert "".join(description.characters[number] for number in numbers) == joined
    assert description.vocabulary == len(set(joined))

    place = tokenizer_file(tmp_path, texts)
    description = write_tokens(files, str(place), out)
    tokenizer = tokenizers.Tokenizer.from_file(str(place))
    end = tokenizer.token_to_id(ours.END_OF_TEXT)
    expected = [number for text in texts for number in (*tokenizer.encode(text).ids, end)]
    numbers = np.fromfile(out, "<u2")
    assert numbers.tolist() == expected
    assert read_description(out) == description
    assert (description.tokens, description.tokenizer) == (len(expected), "tokenizer.json")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("seed", range(25))
def test_windows_have_the_tokens_of_the_file(seed, dtype, tmp_path):
    choice = random.Random(seed)
    vocabulary = choice.choice((40_000, 2**16) if dtype == "uint16" else (2**17, 2**32))
    count = choice.randint(60, 300)
    numbers = np.array([choice.randrange(vocabulary) for _ in range(count)], dtype)
    numbers[choice.randrange(count)] = vocabulary - 1
    out = tmp_path / "tokens.bin"
    numbers.tofile(out)
    content = {"tokenizer": "mine", "vocabulary": vocabulary, "dtype": dtype}
    description_path(out).write_text(json.dumps(content))
    context, stride = choice.randint(1, 20), choice.randint(1, 20)
    description = read_description(out)
    # A model of that many tokens would not fit into memory.
    tokens = torch.from_numpy(read_tokens(out, description))
    train, held_out = windows_of(tokens, context, stride, dtype)
    cut = int(count * 0.8)
    taken = train.take(torch.arange(len(train)))["tokens"]
    starts = range(0, cut - context, stride)
    assert taken.tolist() == [numbers[start : start + context + 1].tolist() for start in starts]

    predicted = held_out.take(torch.arange(len(held_out)))["tokens"][:, 1:].flatten()
    predicted = torch.cat([predicted, held_out.remainder()[1:]])
    assert predicted.tolist() == numbers[cut:].tolist()


def windows_of(tokens, context, stride, dtype):
    from runner.plugins.sequences.windows import split

    return split(tokens, context, stride, 0.2, 2 ** (8 * np.dtype(dtype).itemsize) - 1)


def test_a_source_has_the_vocabulary_of_its_data(tmp_path):
    text = written(tmp_path / "a.txt", random_text(0))
    write_tokens([text], "characters", tmp_path / "tokens.bin")
    made = source_of(tmp_path, "data.vocabulary_multiple=64")
    assert made.sizes == {"vocabulary": 64}
    assert made.shapes == {"tokens": (9,)}
    assert made.epoch_samples(2) == len(made.train) // 2 * 2
    characters = sorted(set(text.read_bytes().decode()))
    assert made.classes == characters
    assert [chr(code) for code in made.tables["characters"]] == characters


def test_a_training_counts_tokens_and_logs_its_loss_by_the_token(tmp_path):
    write_tokens([written(tmp_path / "a.txt", random_text(0))], "bytes", tmp_path / "tokens.bin")
    pipeline = assemble(recipe(tmp_path))
    batch = pipeline.source.draw(2, pipeline.progress)
    metrics = pipeline.source.evaluate(pipeline.learner)
    assert metrics.keys() == {"nats_per_token"} == pipeline.source.rehearse(pipeline.learner, batch).keys()
    assert pipeline.source.counts(batch) == {"samples": 2, "tokens": 16}


def test_an_evaluation_of_long_windows_has_small_batches(tmp_path):
    write_tokens([written(tmp_path / "a.txt", random_text(0, 20_000))], "bytes", tmp_path / "tokens.bin")
    made = source_of(tmp_path, "data.context=4096", "train.batch_size=9")
    assert max(len(batch["tokens"]) for batch in made.held_out_batches()) == 4


def test_the_plan_has_the_outline_of_the_source(tmp_path):
    config = recipe(tmp_path).data
    assert config.outline(2).sizes == {"vocabulary": 50_257}
    for tokenizer in ("bytes", "characters"):
        write_tokens([written(tmp_path / "a.txt", random_text(1))], tokenizer, tmp_path / "tokens.bin")
        made = source_of(tmp_path)
        outline = recipe(tmp_path).data.outline(2)
        assert outline.sizes == made.sizes
        assert outline.epoch_samples == len(made.train)
        assert {name: table.shape for name, table in outline.tables.items()} == {
            name: tuple(table.shape) for name, table in made.tables.items()
        }


def test_synthetic_tokens_are_bytes_of_pythons_help(tmp_path):
    made = source_of(tmp_path, "data.synthetic=true")
    assert made.sizes == {"vocabulary": 256}
    assert int(made.train.tokens.max()) < 256


ERRORS = {
    "description": (lambda path: description_path(path).unlink(), r"no description tokens\.bin\.json .*data prepare"),
    "dtype": (lambda path: described(path, dtype="float32"), r"json: dtype: .*uint16.*correct it, or prepare"),
    "key": (lambda path: described(path, size=3), r"json: size: .*correct it, or prepare"),
    "vocabulary": (lambda path: described(path, vocabulary="many"), r"json: vocabulary: .*correct it, or prepare"),
    "missing key": (lambda path: described(path, tokenizer=None), r"json: tokenizer: .*correct it, or prepare"),
    "no JSON": (lambda path: description_path(path).write_text("{"), r"json cannot be read: .*prepare the file again"),
    "type": (lambda path: described(path, dtype="uint32"), r"tokens of uint32.*describes.*correct tokens or dtype"),
    "range": (lambda path: described(path, vocabulary=33), r"token \d+ at position \d+ is outside of .* 33 .*correct"),
    "odd": (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"no multiple of a uint16: see dtype"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() * 2), r"describes.*correct tokens"),
    "changed": (lambda path: path.write_bytes(path.read_bytes()[::-1]), r"fingerprint is another one; prepare"),
    "empty": (lambda path: (path.write_bytes(b""), described(path, tokens=None, fingerprint=None)), r"no tokens"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS)
def test_a_file_that_cannot_be_used_is_one_line_with_the_fix(kind, tmp_path):
    path = tmp_path / "tokens.bin"
    write_tokens([written(tmp_path / "a.txt", "words and words\n" * 20)], "bytes", path)
    source_of(tmp_path)
    change, message = ERRORS[kind]
    change(path)
    with pytest.raises(UsageError, match=message) as caught:
        source_of(tmp_path)
    # The setting in the recipe, and a mark below it, follow.
    problem, *place = str(caught.value).splitlines()
    assert re.search(message, problem)
    assert "data.file: " in problem
    assert len(place) == 2


def test_a_short_file_and_a_missing_file_are_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"data\.file: .*tokens\.bin.*runner data prepare TEXT.*data\.synthetic=true"):
        source_of(tmp_path)
    write_tokens([written(tmp_path / "a.txt", "short")], "bytes", tmp_path / "tokens.bin")
    with pytest.raises(
        UsageError, match=r"data\.file: .* has 5 tokens, too few for windows of 8: reduce data\.context"
    ):
        source_of(tmp_path)


def test_the_fingerprint_is_that_of_the_tokens_and_their_description(tmp_path):
    path = tmp_path / "tokens.bin"
    text = random_text(0)
    write_tokens([written(tmp_path / "a.txt", text)], "bytes", path)
    first = source_of(tmp_path).fingerprint()
    write_tokens([tmp_path / "a.txt"], "bytes", path)
    assert source_of(tmp_path).fingerprint() == first
    described(path, tokenizer="another")
    second = source_of(tmp_path).fingerprint()
    write_tokens([written(tmp_path / "a.txt", text[:-1])], "bytes", path)
    assert len({first, second, source_of(tmp_path).fingerprint()}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.txt", "--tokenizer", "nothing"], "no tokenizer 'nothing'"),
        (["a.txt", "--tokenizer", "nothing.json"], "no such file: nothing.json"),
        (["a.txt", "--tokenizer", "bad.json"], "bad.json is not the file of a tokenizer"),
        (["nothing.txt", "--tokenizer", "bytes"], "no such file: nothing.txt"),
        (["empty.txt", "--tokenizer", "bytes"], "there is no text to convert"),
        (["latin.txt", "--tokenizer", "bytes"], "latin.txt is not text in UTF-8"),
        (["a.txt", "--tokenizer", "bytes", "--out", "nowhere/a.bin"], "no such folder"),
        (["a.txt", "--tokenizer", "bytes", "--out", "a.txt"], "is one of the texts"),
        (["a.txt", "--tokenizer", "tiktoken:gpt2"], "pip install 'proven-runner[tokens]'"),
    ],
)
def test_data_prepare_refuses_with_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    written(tmp_path / "a.txt", "words")
    written(tmp_path / "empty.txt", "")
    written(tmp_path / "bad.json", "{}")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 \xff")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    defaults = [] if "--out" in arguments else ["--out", "out.bin"]
    done = forked("data", "prepare", *arguments, *defaults)
    assert done.returncode == 2, done
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_data_prepare_prints_the_path_and_the_source_reads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a.txt", "words and words\n" * 20)
    done = forked("data", "prepare", "a.txt", "--tokenizer", "characters", "--out", "tokens.bin")
    assert (done.returncode, done.stdout) == (0, "tokens.bin\n")
    assert "320 tokens as uint16" in done.stderr
    assert source_of(tmp_path).sizes == {"vocabulary": 9}


class Encoding:
    """Two of the methods of an encoding of tiktoken."""

    n_vocab, eot_token = 257, 256

    def encode_ordinary(self, text):
        return list(text.encode())


class Tiktoken:
    """Two of the functions of tiktoken, whose encodings need the network."""

    @staticmethod
    def get_encoding(name):
        if name == "offline":
            raise OSError("no network")
        if name != "gpt2":
            raise ValueError(name)
        return Encoding()

    @staticmethod
    def list_encoding_names():
        return ["gpt2"]


def test_an_encoding_of_tiktoken_ends_every_text(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", Tiktoken)
    files = [written(tmp_path / name, name) for name in ("a", "b")]
    description = write_tokens(files, "tiktoken:gpt2", tmp_path / "tokens.bin")
    assert np.fromfile(tmp_path / "tokens.bin", "<u2").tolist() == [97, 256, 98, 256]
    assert (description.tokenizer, description.vocabulary) == ("tiktoken:gpt2", 257)
    for name, message in {
        "tiktoken:offline": "could not be downloaded",
        "tiktoken:x": "no encoding 'x'; it has gpt2",
    }.items():
        with pytest.raises(UsageError, match=message):
            write_tokens(files, name, tmp_path / "tokens.bin")
