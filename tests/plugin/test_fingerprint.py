"""Fingerprints follow what is in files and tables, and nothing else."""

import logging
import os
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from runner.plugin import fingerprint
from runner.plugin.fingerprint import fingerprint_of_data, fingerprint_of_files, is_same_data
from runner.plugin.nested_content import NestedContent
from runner.plugin.rows import TensorRows


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
