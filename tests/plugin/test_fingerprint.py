"""Fingerprints follow what is in files and tables, and nothing else."""

import copy
import datetime
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from runner.plugin import fingerprint, named_files
from runner.plugin.fingerprint import fingerprint_of_data, fingerprint_of_files, is_same_data
from runner.plugin.nested_content import NestedContent
from runner.plugin.rows import TensorRows
from runner.plugin.value_content import digest_of_rows

# A text that begins with a slash is the path of a file that may be moved.
TEXTS = st.text(st.characters(exclude_characters="/\\"), max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda values: st.lists(values) | st.dictionaries(TEXTS, values),
    max_leaves=5,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    (path / "inside").mkdir(parents=True)
    for name, content in (("a", b"one"), ("inside/b", b"two"), (os.fsdecode(b"caf\xe9"), b"three")):
        (path / name).write_bytes(content)
        os.utime(path / name, (1_000_000, 1_000_000))
    return path


def of(folder):
    return fingerprint_of_files([path for path in folder.rglob("*") if path.is_file()], folder)


def test_data_that_were_moved_copied_or_touched_are_the_same(folder, tmp_path):
    before = of(folder)
    os.utime(folder / "a")
    assert of(folder) == before
    shutil.copytree(folder, tmp_path / "copy")
    assert of(tmp_path / "copy") == before
    folder.rename(tmp_path / "moved")
    assert of(tmp_path / "moved") == before


def rewrite(folder):
    (folder / "a").write_bytes(b"eno")


def rewrite_in_the_same_second(folder):
    status = (folder / "a").stat()
    (folder / "a").write_bytes(b"eno")
    os.utime(folder / "a", ns=(status.st_atime_ns, status.st_mtime_ns))


def rename(folder):
    (folder / "a").rename(folder / "c")


def swap(folder):
    (folder / "a").write_bytes(b"two")
    (folder / "inside" / "b").write_bytes(b"one")


def add(folder):
    (folder / "c").touch()


@pytest.mark.parametrize("change", [rewrite, rewrite_in_the_same_second, rename, swap, add])
def test_data_that_have_changed_are_different(change, folder):
    before = of(folder)
    change(folder)
    assert of(folder) != before


def test_a_file_is_read_again_only_if_it_has_changed(folder, monkeypatch):
    before, read = of(folder), []
    digest_of = fingerprint._digest_of
    monkeypatch.setattr(fingerprint, "_digest_of", lambda path, *more: read.append(path.name) or digest_of(path, *more))
    assert of(folder) == before
    assert read == []
    (folder / "a").write_bytes(b"longer")
    of(folder)
    assert read == ["a"]


def test_a_cache_that_is_damaged_or_cannot_be_written_costs_only_time(folder, tmp_path):
    before = of(folder)
    for path in (tmp_path / "cache" / "fingerprints").iterdir():
        path.write_text("{")
    assert of(folder) == before
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()
    assert of(folder) == before


def test_of_very_large_data_the_ends_are_read(folder, monkeypatch):
    monkeypatch.setattr(fingerprint, "COMPLETE_BYTES", 10)
    monkeypatch.setattr(fingerprint, "END_BYTES", 2)
    (folder / "large").write_bytes(b"ab" + b"x" * 50 + b"cd")
    before = of(folder)
    (folder / "large").write_bytes(b"ab" + b"x" * 50 + b"ce")
    assert of(folder) != before


class Files:
    def __init__(self, folder):
        self.samples = [(str(path), 0) for path in sorted(folder.rglob("*")) if path.is_file()]


def test_tables_and_files_that_a_dataset_names_are_followed(folder):
    tables = [TensorRows({"x": torch.tensor(values)}) for values in ([1.0, 0.0], [1.0, 0.0], [1.0, -0.0])]
    same, copy, other = map(fingerprint_of_data, tables)
    assert same == copy != other
    before = fingerprint_of_data(Files(folder))
    (folder / "a").write_bytes(b"eno")
    assert fingerprint_of_data(Files(folder)) != before
    assert fingerprint_of_data(object(), range(3)) is None


class Holder(Dataset):
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 2


NESTED = {
    "subset": lambda path, number: Subset(Holder(path=str(path)), [0]),
    "concatenated": lambda path, number: ConcatDataset([Holder(samples=[(path, 0)])]),
    "stacked": lambda path, number: StackDataset(x=TensorDataset(torch.tensor([number, 1]))),
    "reader": lambda path, number: Holder(reader=Holder(file=path)),
    "array": lambda path, number: Holder(rows=[np.array([number, 1])]),
    "memory map": lambda path, number: Holder(rows=np.memmap(path, np.uint8, "r")),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED.keys())
def test_content_of_inner_objects_is_followed(make, folder, tmp_path):
    before = fingerprint_of_data(make(folder / "a", 0))
    (tmp_path / "moved").mkdir()
    shutil.copy(folder / "a", tmp_path / "moved" / "a")
    assert fingerprint_of_data(make(tmp_path / "moved" / "a", 0)) == before
    (folder / "a").write_bytes(b"eno")
    assert fingerprint_of_data(make(folder / "a", 1)) != before


@dataclass
class Row:
    text: str
    label: int


ROWS = {
    "texts": lambda number: ["first", f"text {number}"],
    "records": lambda number: [{"text": "first", "label": number}],
    "pairs": lambda number: (("first", 0), ("second", number)),
    "by name": lambda number: {"first": 0, "second": number},
    "by pair": lambda number: {"first": {"pair": (0, number)}},
    "objects": lambda number: [Row("first", number)],
    "bytes": lambda number: [b"first", bytes([number])],
    "arrays": lambda number: [(np.array([number]), "first")] * 1200,
    "tensors": lambda number: [{"x": torch.tensor([number])}] * 2,
    "numbers of numpy": lambda number: [np.float32(number)],
    "sets": lambda number: [{"first", f"text {number}"}],
    "dates": lambda number: [datetime.date(2026, 1, 1 + number)],
    "array of objects": lambda number: [np.array(["first", number], dtype=object)],
    "table": lambda number: pandas.DataFrame({"text": ["first"], "label": [number]}),
    "column": lambda number: pandas.Series(["first", f"text {number}"]),
    "tables": lambda number: {"train": pandas.DataFrame({"label": [number]})},
    "many": lambda number: [("text", 0)] * 25_000 + [("text", number)],
}


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("place", ["attribute", "inner", "dataset"])
def test_rows_are_followed(make, place):
    def of_rows(number):
        rows = make(number)
        data = {"attribute": Holder(rows=rows), "inner": Subset(Holder(rows=rows), [0]), "dataset": rows}
        return fingerprint_of_data(data[place])

    assert of_rows(0) == of_rows(0)
    assert of_rows(0) != of_rows(1)


@given(rows=st.lists(VALUES, min_size=1), other=st.lists(VALUES, min_size=1))
def test_rows_have_one_digest_if_they_are_equal_only(rows, other):
    assert digest_of_rows(rows) == digest_of_rows(copy.deepcopy(rows))
    assert (digest_of_rows(rows) == digest_of_rows(other)) == (json.dumps(rows) == json.dumps(other))


def test_texts_of_a_set_have_one_digest_in_every_process():
    code = "from runner.plugin.value_content import digest_of_rows;print(digest_of_rows([{'a', 'b', 'c', 'd'}]).hex())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "123"
    }
    assert len(outputs) == 1


def test_rows_that_contain_themselves_or_have_no_values_are_no_content():
    rows = [0]
    rows.append(rows)
    assert digest_of_rows(rows) is None
    assert fingerprint_of_data(Holder(rows=rows)) is None
    assert fingerprint_of_data(Holder(rows=[])) is None


def test_what_belongs_to_a_process_is_no_row(folder):
    def of_process():
        return fingerprint_of_data(
            Holder(parts=[threading.Lock(), nn.Linear(2, 2), np.random.default_rng(), object(), Holder(a=object())])
        )

    assert of_process() == of_process()


def make_with_names(root):
    return Holder(root=root, names=sorted(os.listdir(root)))


LISTINGS = {
    "names in a list": make_with_names,
    "names in records": lambda root: Holder(root=str(root), rows=[{"file": "a", "label": 0}]),
    "names with a folder": lambda root: Holder(root=root, rows=[("inside/b", 0), ("a", 1)]),
    "in a reader": lambda root: Subset(Holder(reader=Holder(folder=root, names=("a",))), [0]),
    "relative to the working directory": lambda root: Holder(rows=["data/a"]),
    "a relative folder": lambda root: Holder(root="./data", rows=["a"]),
}


@pytest.mark.parametrize("make", LISTINGS.values(), ids=LISTINGS.keys())
def test_files_that_are_named_below_a_folder_are_followed(make, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = fingerprint_of_data(make(folder))
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(folder, tmp_path / "elsewhere" / "data")
    with monkeypatch.context() as context:
        context.chdir(tmp_path / "elsewhere")
        assert fingerprint_of_data(make(tmp_path / "elsewhere" / "data")) == before
    (folder / "a").write_bytes(b"eno")
    (folder / "inside" / "b").write_bytes(b"owt")
    assert fingerprint_of_data(make(folder)) != before


def test_texts_that_are_no_names_of_files_are_not_tried_one_by_one(folder, monkeypatch):
    tried = []
    monkeypatch.setattr(named_files, "_is_file", tried.append)
    fingerprint_of_data(Holder(root=folder, texts=["a text"] * 10_000))
    assert 0 < len(tried) < 3000


def test_what_reading_fills_is_no_content_of_data(folder):
    logger = logging.FileHandler(folder / "log", delay=True)
    data = Holder(reader=Holder(file=folder / "a"), cache=None, late=None, logger=logger)
    content = NestedContent([data])
    before = fingerprint_of_data(data, content=content)
    data.late = data.cache = np.zeros(3)
    (folder / "log").write_bytes(b"more")
    assert fingerprint_of_data(data, content=content) == before


def test_a_fingerprint_of_an_earlier_version_is_compared_without_inner_content(folder):
    present = fingerprint_of_data(Holder(file=folder / "a", array=np.zeros(2)))
    earlier = fingerprint_of_data(Holder(file=folder / "a"))
    assert "+" not in earlier
    assert is_same_data(earlier, present)
    assert not is_same_data(present, earlier)
    assert not is_same_data("another", present)
    assert is_same_data(present, present)
