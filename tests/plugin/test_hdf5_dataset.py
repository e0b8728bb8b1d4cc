"""Samples of an HDF5 file: the same as in its arrays, in every process, and one line where they cannot be read."""

import gc
import multiprocessing
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hdf5_files import CHUNK, SAMPLES, add_array, damage, images
from hypothesis import given
from hypothesis import strategies as st
from records import drawn, source_of

from runner.api import Hdf5Dataset, UsageError
from runner.plugin.chunked_dataset import _OPEN
from runner.plugin.fingerprint import fingerprint_of_data
from runner.plugin.inspection import is_stream

ARRAYS = {"x": "image", "y": "label"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return images(tmp_path_factory.mktemp("hdf5") / "images.h5")


@pytest.fixture
def file(tmp_path):
    return images(tmp_path / "images.h5")


@pytest.fixture
def start_method():
    before = multiprocessing.get_start_method()
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method(before, force=True)


def contents(path):
    with h5py.File(path) as file:
        return {name: torch.from_numpy(file[array][...]) for name, array in ARRAYS.items()}


@given(rows=st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=60), data=st.data())
def test_samples_are_the_rows_in_the_requested_order(shared, rows, data):
    dataset = Hdf5Dataset(shared, ARRAYS, rows)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=40))
    expected = contents(shared)
    assert len(dataset) == len(rows)
    for index, sample in zip(indices, dataset.__getitems__(indices), strict=True):
        assert list(sample) == ["x", "y"]
        for name, value in sample.items():
            assert value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name][rows[index]])
    assert torch.equal(dataset.column("y"), expected["y"][rows])


def test_a_chunk_is_read_once_for_a_batch(shared, monkeypatch):
    dataset = Hdf5Dataset(shared, {"x": "image"})
    dataset[0]
    accesses = []

    class Watched:
        def __init__(self, array):
            self.array = array
            self.dtype, self.shape, self.chunks = array.dtype, array.shape, array.chunks

        def __getitem__(self, key):
            accesses.append((key.start // CHUNK, (key.stop - 1) // CHUNK))
            return self.array[key]

    monkeypatch.setattr(dataset, "_opened", {"x": Watched(dataset._opened["x"])})
    dataset.__getitems__([0, 17, 4, 16, 2, 0, 47])
    assert accesses == [(0, 0), (3, 3), (9, 9)]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("bool", "bool"), ("uint8", "uint8"), ("int8", "int8"), ("int16", "int16"), ("<i4", "int32"), (">i4", "int32"),
        (">i8", "int64"), ("uint16", "int32"), (">u2", "int32"), ("uint32", "int64"), ("float16", "float16"),
        (">f4", "float32"), ("float64", "float64"), ("complex64", "complex64"),
    ],
)  # fmt: skip
def test_values_are_unchanged_in_every_type(tmp_path, stored, expected):
    values = np.arange(14).astype(stored)
    if np.dtype(stored).kind == "u":
        values[-1] = np.iinfo(stored).max
    with h5py.File(tmp_path / "types.h5", "w") as file:
        add_array(file, "values", values)
    (tensor,) = Hdf5Dataset(tmp_path / "types.h5", {"v": "values"})[13].values()
    assert str(tensor.dtype) == f"torch.{expected}"
    assert tensor.item() == values[-1].item()


def test_it_is_a_map_style_dataset_whose_fingerprint_is_that_of_its_file(file, tmp_path):
    dataset = Hdf5Dataset(file, ARRAYS)
    assert not is_stream(dataset)
    first = fingerprint_of_data(dataset)
    assert first is not None
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.copy(file, tmp_path / "elsewhere"))
    assert fingerprint_of_data(Hdf5Dataset(moved, ARRAYS)) == first
    with h5py.File(file, "r+") as opened:
        opened["image"][3] = 7
    assert fingerprint_of_data(dataset) != first


# --- processes ----------------------------------------------------------------------------------------------------


def test_the_file_is_open_only_between_accesses_of_one_process(file):
    dataset = Hdf5Dataset(file, ARRAYS)
    assert dataset._handle is None
    dataset[0]
    assert dataset in _OPEN
    assert pickle.loads(pickle.dumps(dataset))._handle is None
    process = os.fork()
    if not process:
        is_closed = dataset._handle is None and not open_descriptors(file)
        os._exit(0 if is_closed and int(dataset[3]["y"]) == 1 else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert dataset._handle is None
    assert int(dataset[5]["y"]) == 1
    dataset.close()
    assert not open_descriptors(file)


def open_descriptors(file):
    gc.collect()
    folder = f"/proc/{os.getpid()}/fd"
    links = [os.path.join(folder, name) for name in os.listdir(folder)]
    return [link for link in links if os.path.exists(link) and os.path.realpath(link) == str(file)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("forkserver", 1)])
def test_workers_load_the_same_batches(shared, start_method, method, workers):
    expected = drawn(source_of(Hdf5Dataset(shared, ARRAYS), batch_size=8), 9, 8)
    start_method(method)
    source = source_of(Hdf5Dataset(shared, ARRAYS), workers=workers, batch_size=8)
    batches = drawn(source, 9, 8)
    for one, other in zip(expected, batches, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ARRAYS)
    resumed = source_of(Hdf5Dataset(shared, ARRAYS), workers=0, batch_size=8)
    resumed.load_state_dict({"consumed": 5})
    assert torch.equal(drawn(resumed, 1, 8)[0]["x"], expected[5]["x"])


def test_workers_that_start_after_the_parent_has_read_do_not_share_its_file(shared, start_method):
    start_method("fork")
    dataset = Hdf5Dataset(shared, ARRAYS)
    dataset.__getitems__([*range(20)])
    expected = contents(shared)
    source = source_of(dataset, workers=2, batch_size=4)
    for _ in range(3):
        for number, batch in enumerate(source.held_out_batches()):
            assert torch.equal(batch["x"], expected["x"][4 * number : 4 * number + 4])
        dataset[7]


# --- errors -------------------------------------------------------------------------------------------------------


def refused(match, *arguments, **options):
    with pytest.raises(UsageError, match=match) as caught:
        Hdf5Dataset(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_of_another_format_is_named(tmp_path):
    refused(r"^data\.file: no such file: .*nowhere\.h5$", tmp_path / "nowhere.h5", ARRAYS)
    (tmp_path / "text.h5").write_text("no HDF5")
    refused(r"^data\.scenes: .*text\.h5 cannot be read as an HDF5 file", tmp_path / "text.h5", ARRAYS,
            setting="data.scenes")  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_named(file, share):
    os.truncate(file, int(share * file.stat().st_size))
    refused(r"images\.h5 cannot be read as an HDF5 file .*damaged, truncated", file, ARRAYS)


def test_an_array_that_cannot_be_used_is_named_with_its_setting(tmp_path):
    path = images(tmp_path / "images.h5", short=np.arange(SAMPLES - 1), scalar=np.array(3.0))
    with h5py.File(path, "a") as file:
        file["texts"] = ["a"] * SAMPLES
        file["wide"] = np.arange(SAMPLES, dtype=np.uint64)
        file.create_group("views/left")
    settings = {"array_settings": {"y": "data.label"}}
    for array, text in {
        "labels": r"^data\.label: 'labels' in .* is missing - did you mean 'label'\?$",
        "views": r"^data\.label: 'views' in .* is a group",
        "texts": r"^data\.label: 'texts' in .* is of type object, which is none of .*int64",
        "wide": r"^data\.label: 'wide' in .* is of type uint64, which is none of",
        "scalar": r"^data\.label: 'scalar' in .* has no dimension",
        "short": r"^data\.file: .* but 'image' has 48, 'short' has 47$",
    }.items():
        refused(text, path, {"x": "image", "y": array}, **settings)


def test_rows_in_other_files_are_refused(tmp_path):
    path = images(tmp_path / "images.h5")
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["linked"] = h5py.ExternalLink(str(path), "/image")
        file["lost"] = h5py.ExternalLink("nowhere.h5", "/image")
        layout = h5py.VirtualLayout((SAMPLES,), "int64")
        layout[:] = h5py.VirtualSource(str(path), "label", shape=(SAMPLES,))
        file.create_virtual_dataset("virtual", layout)
    for array in ("linked", "virtual"):
        refused(f"'{array}' in .* its rows are in another file", tmp_path / "links.h5", {"x": array})
    refused("'lost' in .* is missing", tmp_path / "links.h5", {"x": "lost"})


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_in_the_middle_is_one_line_with_the_sample(file, workers):
    damage(file, "image", 21)
    source = source_of(Hdf5Dataset(file, ARRAYS), workers=workers, batch_size=4)
    text = r"^data\.file: .*s\.h5 cannot be read at row 2[0-4] of 'image' \(sample 2[0-4]\): .*\(samples .*training"
    with pytest.raises(UsageError, match=text) as caught:
        drawn(source, SAMPLES // 4)
    assert "\n" not in str(caught.value)


def test_a_file_that_has_fewer_rows_than_before_is_named(file):
    dataset = Hdf5Dataset(file, ARRAYS)
    images(file, 20)
    with pytest.raises(UsageError, match=r"images\.h5 has fewer rows than when the training was prepared"):
        dataset[0]


def test_without_h5py_the_message_has_the_command(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused(re.escape("data.kind: HDF5 files need the package 'h5py': pip install 'proven-runner[hdf5]'"), file, ARRAYS)


def test_rows_that_do_not_exist_are_an_error_of_the_program(file):
    with pytest.raises(ValueError, match="row 48 is none of the 48 rows"):
        Hdf5Dataset(file, ARRAYS, [0, 48])
    with pytest.raises(ValueError, match="at least one array"):
        Hdf5Dataset(file, {})
