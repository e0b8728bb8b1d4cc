"""Datasets that read the same records from files of several kinds, and sources of any dataset."""

import mmap
import os
import sqlite3
import zipfile
from io import BytesIO

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from runner.api import Context, DatasetConfig, DatasetSource, Progress, Slots

ROWS, NUMBERS = 96, 2048
"""Records, each of which repeats its own number so many times: more bytes than a buffer of a file holds."""


class Config(DatasetConfig):
    """Any dataset."""

    kind = "records"
    implementation = "Missing"
    provides = "rows"


class Source(DatasetSource):
    """Trains on the first of a pair, and holds the second out; workers are sent none of it with the class."""

    pair = None, None

    def datasets(self, config):
        return self.pair


def source_of(train, held_out=None, workers=0, batch_size=4, seed=3):
    Source.pair = train, train if held_out is None else held_out
    return Source(Config(workers=workers), Context(torch.device("cpu"), Slots(), seed, batch_size=batch_size))


def drawn(source, count, size=4, unit="updates"):
    batches = []
    for _ in range(count):
        batches.append(source.draw(size, Progress(unit, 1000)))
        source.counts(batches[-1])
    return batches


def record(row):
    return np.full(NUMBERS, row, dtype=np.int64).tobytes()


def write(folder):
    """Writes the records as a plain file, an archive, a database, and HDF5."""
    import h5py

    (folder / "records.bin").write_bytes(b"".join(map(record, range(ROWS))))
    with zipfile.ZipFile(folder / "records.zip", "w") as archive:
        for row in range(ROWS):
            archive.writestr(str(row), record(row))
    with sqlite3.connect(folder / "records.db") as database:
        database.execute("create table records (number integer primary key, content blob)")
        database.executemany("insert into records values (?, ?)", [(row, record(row)) for row in range(ROWS)])
    database.close()
    with h5py.File(folder / "records.h5", "w") as file:
        file["records"] = np.repeat(np.arange(ROWS)[:, None], NUMBERS, 1)
    return folder


OPENED = {}
"""Files of the whole process, as a module may keep them."""


def opened_once(path):
    if path not in OPENED:
        OPENED[path] = open(path, "rb", buffering=0)  # noqa: SIM115
    return OPENED[path]


class Records(Dataset):
    """Opens each file at the first access, and counts the numbers that come from another record."""

    def __init__(self, folder):
        self.folder = folder
        self.file = self.archive = self.database = self.hdf5 = self.map = None

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if self.file is None:
            self._open()
        self.file.seek(index * NUMBERS * 8)
        shared = opened_once(self.folder / "records.bin")
        shared.seek(index * NUMBERS * 8)
        query = "select content from records where number = ?"
        contents = {
            "file": b"".join(self.file.read(1024) for _ in range(NUMBERS * 8 // 1024)),
            "module": b"".join(shared.read(1024) for _ in range(NUMBERS * 8 // 1024)),
            "zip": self.archive.read(str(index)),
            "sqlite": self.database.execute(query, (index,)).fetchone()[0],
            "hdf5": self.hdf5["records"][index].tobytes(),
            "map": self.map[index].tobytes(),
        }
        wrong = {name: (np.frombuffer(content, np.int64) != index).sum() for name, content in contents.items()}
        return {"index": index, "process": os.getpid(), **wrong}

    def __del__(self):
        for file in (self.file, self.archive, self.database, self.hdf5):
            if file is not None:
                file.close()

    def _open(self):
        import h5py

        self.file = open(self.folder / "records.bin", "rb", buffering=0)  # noqa: SIM115 (as long as the process)
        self.archive = zipfile.ZipFile(self.folder / "records.zip")
        self.database = sqlite3.connect(self.folder / "records.db")
        self.hdf5 = h5py.File(self.folder / "records.h5")
        self.map = np.memmap(self.folder / "records.bin", np.int64, "r", shape=(ROWS, NUMBERS))


class OpenedBefore(Dataset):
    """Files that are open before any worker starts."""

    def __init__(self, folder):
        self.file = open(folder / "records.bin", "rb")  # noqa: SIM115 (as long as the dataset)
        self.archive = zipfile.ZipFile(folder / "records.zip")
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

    def __del__(self):
        self.archive.close()
        self.file.close()

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        start = index * NUMBERS * 8
        self.file.seek(start)
        contents = {
            "file": b"".join(self.file.read(1024) for _ in range(NUMBERS * 8 // 1024)),
            "zip": self.archive.read(str(index)),
            "map": self.map[start : start + NUMBERS * 8],
        }
        wrong = {name: (np.frombuffer(content, np.int64) != index).sum() for name, content in contents.items()}
        return {"index": index, **wrong}


class Elsewhere(Dataset):
    """Fails in the process that made it, also where its length is requested."""

    def __init__(self):
        self.process = os.getpid()

    def __len__(self):
        assert os.getpid() != self.process
        return 20

    def __getitem__(self, index):
        assert os.getpid() != self.process
        return {"index": index}


class StreamElsewhere(IterableDataset):
    """The same as a stream."""

    def __init__(self):
        self.process = os.getpid()

    def __iter__(self):
        assert os.getpid() != self.process
        yield from ({"index": index} for index in range(20))


def numbered(count, first=0):
    return ({"index": torch.tensor(number)} for number in range(first, first + count))


class Endless(IterableDataset):
    """A generator that was made outside, so that it goes on where it was."""

    def __init__(self, count):
        self.items = numbered(count)

    def __iter__(self):
        return self.items


class Lines(IterableDataset):
    """Reads on in a file that is open."""

    def __init__(self, count):
        self.file = BytesIO(b"".join(b"%d\n" % number for number in range(count)))

    def __iter__(self):
        for line in self.file:
            yield {"index": torch.tensor(int(line))}


class Itself(IterableDataset):
    """Its own iterator; begins again if told."""

    def __init__(self, count, again):
        self.count, self.again, self.position = count, again, 0

    def __iter__(self):
        if self.again:
            self.position = 0
        return self

    def __next__(self):
        if self.position == self.count:
            raise StopIteration
        self.position += 1
        return {"index": torch.tensor(self.position - 1)}
