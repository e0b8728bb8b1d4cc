"""Samples of a Zarr group: the same as in its arrays, in every process, and one line where they cannot be read."""

import os
import pickle
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import zarr
from hdf5_files import SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from records import drawn, source_of
from zarr_groups import damage_chunk, zarr_images

from runner.api import UsageError, ZarrDataset
from runner.plugin.fingerprint import fingerprint_of_data

ARRAYS = {"x": "image", "y": "label"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return zarr_images(tmp_path_factory.mktemp("zarr") / "images.zarr")


def contents(path):
    group = zarr.open_group(str(path), mode="r")
    return {name: torch.from_numpy(group[array][...]) for name, array in ARRAYS.items()}


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=60), data=st.data())
def test_samples_are_the_rows_in_the_requested_order(shared, rows, data):
    dataset = ZarrDataset(shared, ARRAYS, rows)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=20))
    expected = contents(shared)
    for index, sample in zip(indices, dataset.__getitems__(indices), strict=True):
        for name, value in sample.items():
            assert value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name][rows[index]])
    assert torch.equal(dataset.column("y"), expected["y"][rows])


@pytest.mark.parametrize(("name", "version"), [("images.zarr", 2), ("images.zarr.zip", 3)])
def test_both_versions_and_archives_are_the_same_samples(shared, tmp_path, name, version):
    expected = contents(shared)
    dataset = ZarrDataset(zarr_images(tmp_path / name, version=version), ARRAYS)
    samples = dataset.__getitems__([7, 3, 40])
    assert torch.equal(torch.stack([sample["x"] for sample in samples]), expected["x"][[7, 3, 40]])
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy._handle is None
    assert torch.equal(copy[7]["x"], expected["x"][7])
    dataset.close()
    copy.close()


@pytest.mark.parametrize(
    ("stored", "expected"), [("bool", "bool"), ("uint16", "int32"), (">i4", "int32"), ("f2", "float16")]
)
def test_values_are_unchanged_in_every_type(tmp_path, stored, expected):
    path = zarr_images(tmp_path / "types.zarr", values=np.arange(48).astype(stored))
    (tensor,) = ZarrDataset(path, {"v": "values"})[13].values()
    assert str(tensor.dtype) == f"torch.{expected}"
    assert tensor.item() == np.arange(48).astype(stored)[13].item()


def test_its_fingerprint_is_that_of_all_chunks(tmp_path):
    path = zarr_images(tmp_path / "images.zarr")
    dataset = ZarrDataset(path, ARRAYS)
    first = fingerprint_of_data(dataset)
    assert first is not None
    moved = shutil.copytree(path, tmp_path / "elsewhere" / "images.zarr")
    assert fingerprint_of_data(ZarrDataset(moved, ARRAYS)) == first
    damage_chunk(path, "image", 33)
    assert fingerprint_of_data(dataset) != first


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_load_the_same_batches_after_the_parent_has_read(shared):
    dataset = ZarrDataset(shared, ARRAYS)
    dataset[5]
    expected = drawn(source_of(ZarrDataset(shared, ARRAYS), batch_size=8), 9, 8)
    batches = drawn(source_of(dataset, workers=2, batch_size=8), 9, 8)
    for left, right in zip(expected, batches, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in ARRAYS)
    # The loop in which the library reads is another one in a child.
    process = os.fork()
    if not process:
        os._exit(0 if int(dataset[3]["y"]) == 1 else 1)
    assert os.waitpid(process, 0)[1] == 0


# --- errors -------------------------------------------------------------------------------------------------------


def refused(match, *arguments, **options):
    with pytest.raises(UsageError, match=match) as caught:
        ZarrDataset(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_a_group_that_is_missing_or_of_another_format_is_named(tmp_path):
    refused(r"^data\.file: no such file or folder: .*nowhere\.zarr$", tmp_path / "nowhere.zarr", ARRAYS)
    (tmp_path / "folder").mkdir()
    refused(
        r"^data\.scenes: .*folder cannot be read as a Zarr group", tmp_path / "folder", ARRAYS, setting="data.scenes"
    )
    (tmp_path / "text.zip").write_text("no archive")
    refused(r"text\.zip cannot be read as a Zarr group .*damaged", tmp_path / "text.zip", ARRAYS)


@pytest.mark.parametrize("content", ["", "{", "[]"])
@pytest.mark.parametrize("name", ["zarr.json", "image/zarr.json"])
def test_damaged_metadata_are_one_line(tmp_path, name, content):
    path = zarr_images(tmp_path / "images.zarr")
    (path / name).write_text(content)
    refused(r"images\.zarr .*(is damaged|is missing)", path, ARRAYS)


def test_an_array_that_cannot_be_used_is_named_with_its_setting(tmp_path):
    path = zarr_images(
        tmp_path / "images.zarr",
        short=np.arange(SAMPLES - 1),
        scalar=np.array(3.0),
        wide=np.arange(SAMPLES, dtype="u8"),
    )
    zarr.open_group(str(path)).create_group("views/left")
    for array, text in {
        "labels": r"^data\.label: 'labels' in .* is missing - did you mean 'label'\?$",
        "views": r"^data\.label: 'views' in .* is a group",
        "wide": r"^data\.label: 'wide' in .* is of type uint64, which is none of",
        "scalar": r"^data\.label: 'scalar' in .* has no dimension",
        "short": r"^data\.file: .* but 'image' has 48, 'short' has 47$",
    }.items():
        refused(text, path, {"x": "image", "y": array}, array_settings={"y": "data.label"})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_chunk_is_one_line_with_the_sample(tmp_path, workers):
    path = zarr_images(tmp_path / "images.zarr")
    damage_chunk(path, "image", 21)
    source = source_of(ZarrDataset(path, ARRAYS), workers=workers, batch_size=4)
    text = r"^data\.file: .*s\.zarr cannot be read at row 2[0-4] of 'image' \(sample 2[0-4]\): .*\(samples .*training"
    with pytest.raises(UsageError, match=text) as caught:
        drawn(source, SAMPLES // 4)
    assert "\n" not in str(caught.value)


def test_without_zarr_the_message_has_the_command(shared, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    message = "data.kind: Zarr groups need the package 'zarr': pip install 'proven-runner[zarr]'"
    refused(re.escape(message), shared, ARRAYS)
