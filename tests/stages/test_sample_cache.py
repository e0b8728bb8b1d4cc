"""``sample_cache``: the same samples whatever is kept where, and never those of other data or random ones."""

import logging
import multiprocessing
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sample_mutants
import torch
from hdf5_files import SAMPLES, images
from hypothesis import given
from hypothesis import strategies as st
from records import drawn, source_of
from running import NoDisplay

from runner.api import Hdf5Dataset, UsageError, describe_randomness
from runner.plugin.generators import seeded
from runner.plugin.registry import Registry
from runner.plugins.stages import sample_key
from runner.plugins.stages.sample_cache import CachedBatches, CachedSamples, SampleCacheConfig
from runner.plugins.stages.sample_files import (
    UncachableError,
    copy_tree,
    decode_sample,
    encode_sample,
    sample_bytes,
)
from runner.plugins.stages.sample_key import key_of_dataset
from runner.plugins.stages.sample_tiers import DiskTier, MemoryTier, Slot
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.tracking import Workspace
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.verify.timed_gate import quick

REGISTRY = Registry([Path(sample_mutants.__file__)])
RECIPE = """\
name: cached
seed: 3
device: cpu
model: {kind: mlp, widths: [8]}
data: {kind: hdf5_images, file: images.h5, held_out: 0.3}
train: {updates: 6, batch_size: 16, evaluate_every: 3}
tracking: {system_metrics: false}
"""
ARRAYS = {"image": "image", "label": "label"}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return images(tmp_path / "images.h5")


def recipe_of(file, *sets, kind="sample_cache", memory="4KiB"):
    stage = f"optimization.{kind}={{memory: {memory}, folder: {file.parent / 'cache'}}}"
    return load(file.parent / "recipe.yaml", [stage, *sets], REGISTRY)


def trained(recipe):
    return run(recipe, REGISTRY, Workspace(), NoDisplay())


def report_of(result):
    (report,) = result.stages
    return report


# --- tiers --------------------------------------------------------------------------------------------------------


class Counted:
    """Counts how often each sample is made."""

    def __init__(self, count=12):
        self.made = [0] * count

    def __len__(self):
        return len(self.made)

    def __getitem__(self, index):
        self.made[index] += 1
        return {"x": torch.full((25,), float(index)), "label": index}


class CountedBatches(Counted):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def cached(data, memory, disk=None):
    cls = CachedBatches if hasattr(data, "__getitems__") else CachedSamples
    return cls(data, "data", MemoryTier(memory), disk, "key")


SIZE = sample_bytes(Counted()[0])
BATCHES = st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=6), max_size=12)


@pytest.mark.parametrize("kind", [Counted, CountedBatches])
@given(batches=BATCHES, in_memory=st.integers(0, 13), on_disk=st.sampled_from([None, 0, 3, 100]))
def test_samples_are_the_same_whatever_is_kept(kind, tmp_path_factory, batches, in_memory, on_disk):
    folder = tmp_path_factory.mktemp("tier")
    disk = None if on_disk is None else DiskTier(folder, 1 + on_disk * len(encode_sample(Counted()[0])))
    samples = cached(kind(), in_memory * SIZE, disk)
    for batch in batches:
        read = samples.__getitems__(batch) if kind is CountedBatches else [samples[index] for index in batch]
        assert [sample["label"] for sample in read] == batch
        for index, sample in zip(batch, read, strict=True):
            assert sample["x"].tolist() == [index] * 25
            sample["x"] += 100  # as a collate function may do
            sample["label"] = None
        assert samples.memory.bytes <= samples.memory.limit
        assert len(samples.memory) <= in_memory
        if disk is not None:
            assert sum(path.stat().st_size for path in folder.rglob("*.sample")) <= disk.limit
    everything_fits = in_memory >= 12 or on_disk == 100
    if everything_fits:
        assert max(samples.data.made) <= 1


def test_the_least_recently_used_sample_leaves_the_memory_for_the_disk(tmp_path):
    disk = DiskTier(tmp_path, 10**6)
    samples = cached(Counted(), 3 * SIZE, disk)
    for index in (0, 1, 2, 0, 3):
        samples[index]
    assert files_in(tmp_path) == [1]
    for index in (1, 0, 3):
        samples[index]
    assert files_in(tmp_path) == [1, 2]
    assert samples.data.made[:4] == [1, 1, 1, 1]


def files_in(folder):
    return sorted(int(path.stem) for path in folder.rglob("*.sample"))


def test_the_least_recently_used_file_is_removed(tmp_path):
    size = len(encode_sample(Counted()[0]))
    disk = DiskTier(tmp_path, 10 * size)
    for number in range(10):
        disk.put(Slot("key", number), Counted()[number])
        os.utime(disk._path(Slot("key", number)), (number, number))
    assert disk.get(Slot("key", 0)) is not None
    disk.put(Slot("key", 10), Counted()[10])
    assert files_in(tmp_path) == [0, *range(3, 11)]


@pytest.mark.parametrize("harm", [lambda content: content[:-1], lambda content: b"", lambda c: c[:-9] + b"9" + c[-8:]])
def test_a_damaged_file_is_made_again(tmp_path, harm):
    disk = DiskTier(tmp_path, 10**6)
    cached(Counted(), 0, disk)[5]
    (path,) = tmp_path.rglob("*.sample")
    path.write_bytes(harm(path.read_bytes()))
    again = cached(Counted(), 0, disk)
    assert again[5]["x"].tolist() == [5] * 25
    assert again.data.made[5] == 1
    assert decode_sample(path.read_bytes())["label"] == 5


def write_all(folder, first):
    samples = cached(Counted(60), 2 * SIZE, DiskTier(folder, 40 * len(encode_sample(Counted()[0]))))
    for turn in range(3):
        for index in range(60):
            number = (first + index * 7 + turn) % 60
            assert samples[number]["x"].tolist() == [number] * 25


def test_processes_share_a_folder(tmp_path):
    processes = [multiprocessing.Process(target=write_all, args=(tmp_path, first)) for first in (0, 20, 40)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not list(tmp_path.rglob("*.partial"))
    size = len(encode_sample(Counted()[0]))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.sample")) <= 40 * size * (1 + 3 / 16) + 3 * size


def test_a_disk_that_becomes_full_is_one_warning(tmp_path, monkeypatch, caplog):
    def fill(path, content):
        raise OSError(28, "No space left on device", str(path))

    samples = cached(Counted(), 0, DiskTier(tmp_path, 10**6))
    samples[0]
    monkeypatch.setattr(Path, "write_bytes", fill)
    with caplog.at_level(logging.WARNING):
        for index in (1, 2, 0):
            assert samples[index]["label"] == index
    (message,) = caplog.messages
    assert "No space left on device" in message
    assert not list(tmp_path.rglob("*.partial"))


VALUES = st.recursive(
    st.one_of(
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False),
        st.text(max_size=4),
        st.booleans(),
        st.none(),
        st.sampled_from([torch.arange(3), torch.zeros(0, 2), torch.tensor(1.5), torch.eye(3).T, torch.ones(2).bool()]),
        st.sampled_from([torch.ones(3).bfloat16(), torch.arange(6.0).view(2, 3)[:, 1], torch.tensor([1 + 2j])]),
        st.sampled_from([np.arange(3), np.array(2.5), np.zeros((2, 3), np.float32)[:, ::2], np.array([True])]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=6,
)


def same(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@given(VALUES)
def test_a_file_and_a_copy_contain_the_same_values(sample):
    assert same(decode_sample(encode_sample(sample)), sample)
    assert same(copy_tree(sample), sample)


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(2).to_sparse(), torch.ones(2, requires_grad=True), np.array(["a"]), np.array([1j]), {1, 2}, {1: 2},
        object(), torch.nn.Parameter(torch.ones(1)), np.float32(1),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_not_kept(value):
    for function in (encode_sample, copy_tree):
        with pytest.raises(UncachableError):
            function([value])

    class Odd(Counted):
        def __getitem__(self, index):
            self.made[index] += 1
            return {"x": value}

    samples = cached(Odd(), 10**6)
    assert samples[3]["x"] is value
    assert samples[3]["x"] is value
    assert samples.data.made[3] == 2


# --- random samples -----------------------------------------------------------------------------------------------


class Augmented(Counted):
    """Every third sample is random."""

    def __getitem__(self, index):
        self.made[index] += 1
        return {"x": torch.rand(3) if index % 3 == 0 else torch.full((3,), float(index)), "u": np.ones(2)}


class AugmentedBatches(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Augmented, AugmentedBatches])
@given(batches=BATCHES)
def test_random_samples_are_those_of_a_training_without_the_cache(kind, batches):
    samples, plain = cached(kind(), 10**6), kind()
    for number, batch in enumerate(batches):
        readings = []
        for data in (samples, plain):
            with seeded(number):
                many = hasattr(data, "__getitems__")
                read = data.__getitems__(batch) if many else [data[index] for index in batch]
                readings.append([*(sample["x"].tolist() for sample in read), torch.rand(1).item()])
        assert readings[0] == readings[1]


class OwnGenerator(Counted):
    """Random without the generators that the number of a batch seeds."""

    def __getitem__(self, index):
        return {"x": torch.from_numpy(np.random.default_rng().random(3))}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "text"),
    [(Augmented, "sample 0 of the training data uses random numbers"), (OwnGenerator, "sample 0 .* differs when"),
     (Counted, "^$")],
)  # fmt: skip
def test_randomness_is_described(kind, text, workers):
    assert re.search(text, describe_randomness(source_of(kind(), workers=workers)))


# --- keys ---------------------------------------------------------------------------------------------------------


def test_a_key_depends_on_files_attributes_and_code(file, tmp_path):
    def key(rows=None, fingerprint=None, cls=Hdf5Dataset):
        return key_of_dataset(cls(file, ARRAYS, rows), fingerprint)

    class Other(Hdf5Dataset):
        pass

    first = key()
    assert first == key()
    keys = [first, key(range(20)), key(range(1, 21)), key(fingerprint="x"), key(cls=Other)]
    images(file, image=np.zeros((SAMPLES, 3, 8, 8), np.uint8))
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key_of_dataset(Counted(), None) is None
    assert key_of_dataset(Counted(), "x") is not None


def test_a_key_is_the_same_in_another_process(file):
    script = (
        "from runner.api import Hdf5Dataset; from runner.plugins.stages.sample_key import key_of_dataset; import torch;"
        f"data = Hdf5Dataset({str(file)!r}, {ARRAYS}, range(9), targets=torch.arange(9));"
        "print(key_of_dataset(data, None))"
    )
    keys = set()
    for seed in ("0", "1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script]
        keys.add(subprocess.run(command, capture_output=True, text=True, env=environment).stdout)
    (key,) = keys
    assert re.fullmatch(r"[0-9a-f]{32}\n", key)


def test_a_key_has_the_installed_packages_and_not_the_copies_inside_of_one(tmp_path, monkeypatch):
    def install(name, folder):
        metadata = folder / f"{name}-1.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        monkeypatch.syspath_prepend(folder)
        sample_key._packages.cache_clear()
        return sample_key._packages()

    monkeypatch.setattr(sample_key, "_packages", cache(sample_key._packages.__wrapped__))
    before = sample_key._packages()
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    assert install("copied", package / "_vendor") == before
    assert "decoder 1.0" in install("decoder", tmp_path / "site")


# --- trainings ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("migrated_workspace")
def test_runs_and_workers_share_the_files(file):
    baseline = run(load(file.parent / "recipe.yaml", [], REGISTRY), REGISTRY, Workspace(), NoDisplay())
    results = [
        trained(recipe_of(file, *sets, memory="1 MiB")) for sets in (["data.workers=2"], [], ["data.folds={count: 2}"])
    ]
    for result in results[:2]:
        assert {name: result.metrics[name] for name in ("train/loss", "eval/loss")} == {
            name: baseline.metrics[name] for name in ("train/loss", "eval/loss")
        }
    assert any(note.startswith("0 samples made, found") for note in report_of(results[1]).notes)
    assert any(note.startswith("0 samples made, found") for note in report_of(results[2]).notes)


@pytest.mark.usefixtures("migrated_workspace")
def test_a_folder_that_cannot_be_used_is_one_warning(file, caplog):
    (file.parent / "cache").write_text("a file")
    result = trained(recipe_of(file))
    assert report_of(result).active
    messages = [message for message in caplog.messages if message.startswith("sample_cache: ")]
    assert len(messages) == 1
    assert "the training continues without it" in messages[0]


@pytest.mark.parametrize("sets", [(), ("data.every=7",), ("data.declares=true",)])
def test_augmented_samples_make_it_inactive(file, sets):
    pipeline = assemble(recipe_of(file, "data.kind=noisy_images", *sets), REGISTRY.files)
    report = pipeline.reports["sample_cache"]
    assert not report.active
    assert any(text in report.reason for text in ("uses random numbers", "changes samples at random"))
    assert not isinstance(pipeline.source.train, CachedSamples)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("{memory: null, disk: null}", "without them no sample is kept"),
        ("{disk: null, folder: here}", "folder has no effect with disk: null"),
        ("{memory: 3 parsecs}", "should be a number and one of B, KB"),
    ],
)
def test_settings_that_have_no_effect_are_refused(file, stage, text):
    with pytest.raises(RecipeError, match=text):
        load(file.parent / "recipe.yaml", [f"optimization.sample_cache={stage}"], REGISTRY)


def test_the_fingerprint_and_the_labels_are_those_of_the_data(file):
    plain = assemble(load(file.parent / "recipe.yaml", [], REGISTRY)).source
    source = assemble(recipe_of(file)).source
    assert isinstance(source.train, CachedSamples)
    assert source.fingerprint() == plain.fingerprint() is not None
    assert torch.equal(source.labels(), plain.labels())
    preprocessed = assemble(load(file.parent / "recipe.yaml", ["optimization.preprocess_once=on"], REGISTRY)).source
    assert preprocessed.fingerprint() == plain.fingerprint()


def test_workers_load_the_same_batches_through_the_cache(file):
    expected = drawn(assemble(load(file.parent / "recipe.yaml", [], REGISTRY)).source, 6, 16)
    for workers in (2, 0, 1):
        source = assemble(recipe_of(file, f"data.workers={workers}")).source
        batches = drawn(source, 6, 16)
        assert all(torch.equal(one["image"], other["image"]) for one, other in zip(expected, batches, strict=True))
    assert len(files_in(file.parent / "cache")) > 20


# --- the gate -----------------------------------------------------------------------------------------------------

STALE = ("stale", "sample_cache")


@pytest.mark.usefixtures("migrated_workspace", "traced_only", "copied_children")
@pytest.mark.parametrize(
    ("kind", "sets", "outcome"),
    [
        ("sample_cache", (), Outcome.PASS),
        ("sample_cache", ("data.workers=1",), Outcome.PASS),
        ("without_number", (), Outcome.FAIL),
        ("without_dataset", (), Outcome.FAIL),
        ("frozen", ("data.kind=noisy_images",), Outcome.FAIL),
        ("frozen", ("data.kind=noisy_images", "data.every=7"), Outcome.FAIL),
    ],
)
def test_the_gate_passes_the_cache_and_fails_wrong_ones(file, kind, sets, outcome):
    verdict = quick(recipe_of(file, *sets, kind=kind), REGISTRY, [kind])
    assert verdict.outcome is outcome, verdict.summary


@pytest.mark.usefixtures("migrated_workspace", "traced_only", "copied_children")
@pytest.mark.parametrize("kind", STALE)
def test_samples_of_a_file_that_changed_are_not_found(file, kind):
    trained(recipe_of(file, kind=kind))
    images(file, image=np.random.default_rng(1).integers(0, 255, (SAMPLES, 3, 8, 8), dtype=np.uint8))
    verdict = quick(recipe_of(file, kind=kind), REGISTRY, [kind])
    assert verdict.outcome is (Outcome.FAIL if kind == "stale" else Outcome.PASS), verdict.summary


def test_without_tiers_the_message_has_the_setting():
    with pytest.raises(ValueError, match="set memory, disk, or both"):
        SampleCacheConfig(memory=None, disk=None)
    assert issubclass(RecipeError, UsageError)
