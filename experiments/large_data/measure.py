"""Times how batches of data on disk are read: compressed or not, with and without ``sample_cache``.

python experiments/large_data/measure.py

Every case reads the same batches in random order, in rounds that alternate between its variants. The
files are in the page cache of the kernel: what a slow disk adds is not in these times.
"""

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import default_collate

from runner.api import Hdf5Dataset
from runner.plugins.stages.sample_cache import CachedBatches
from runner.plugins.stages.sample_tiers import DiskTier, MemoryTier
from runner.proof import ratio
from runner.system.hardware import cpu_model
from runner.system.stopwatch import Stopwatch

FOLDER = Path(__file__).parent
BATCH = 32
EVERYTHING = 2**34
Read = Callable[[], object]


def noisy_images(count: int) -> np.ndarray:
    """Returns images whose two lowest bits are noise, as in photographs: [N, 3, 64, 64] in bytes."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 64, (count, 3, 8, 8), dtype=np.uint8)
    noise = generator.integers(0, 4, (count, 3, 64, 64), dtype=np.uint8)
    return coarse.repeat(8, axis=2).repeat(8, axis=3) * 4 + noise


def scenes(count: int) -> np.ndarray:
    """Returns clouds of points on a millimetre grid: [N, 4096, 3] in float32."""
    points = np.random.default_rng(2).normal(size=(count, 4096, 3)) * 0.1
    return points.round(3).astype(np.float32)


def write(path: Path, values: np.ndarray, chunk: int, gzip: bool) -> Path:
    """Writes the values as an array of a new file."""
    with h5py.File(path, "w") as file:
        chunks = (chunk, *values.shape[1:]) if gzip else None
        file.create_dataset("x", data=values, chunks=chunks, compression="gzip" if gzip else None)
    return path


def batches_of(count: int) -> list[list[int]]:
    """Returns an epoch of random batches."""
    order = np.random.default_rng(3).permutation(count)[: count // BATCH * BATCH]
    return [batch.tolist() for batch in order.reshape(-1, BATCH)]


def epoch(data: Any, batches: list[list[int]]) -> Read:
    """Returns a function that reads an epoch."""

    file = getattr(data, "data", data)

    def read() -> None:
        # HDF5 keeps chunks of an open file in memory, and a file larger than that finds few of them.
        file.close()
        for batch in batches:
            default_collate(data.__getitems__(batch))

    return read


def h5py_lists(path: Path, batches: list[list[int]]) -> Read:
    """Returns a function that reads an epoch by h5py's lists of rows."""
    array = h5py.File(path)["x"]

    def read() -> None:
        for batch in batches:
            torch.from_numpy(array[sorted(batch)])

    return read


def compare(variants: Mapping[str, Read], rounds: int) -> dict[str, Any]:
    """Times the variants alternately; ratios are to the first one."""
    stopwatch = Stopwatch(torch.device("cpu"))
    for read in variants.values():
        read()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        # Alternating the order cancels a drift of the machine.
        names = list(variants)[:: 1 if number % 2 else -1]
        for name in names:
            seconds[name].append(stopwatch.seconds(variants[name]))
    first = next(iter(variants))
    results = {}
    for name, values in seconds.items():
        effect = ratio(seconds[first], values)
        results[name] = {
            "milliseconds": round(1000 * float(np.median(values)), 3),
            "ratio": [round(value, 4) for value in (effect.value, effect.low, effect.high)],
        }
    return results


def first_epoch(make: Callable[[], Any], plain: Any, batches: list[list[int]], rounds: int) -> Any:
    """Compares the first epoch with an empty cache and one without a cache."""
    empty: list[Any] = []

    def fill() -> None:
        empty.append(make())
        epoch(empty[-1], batches)()

    return compare({"plain": epoch(plain, batches), "first epoch": fill}, rounds)


def cached(path: Path, memory: int, disk: Path | None) -> CachedBatches:
    """Returns the rows of a file with a cache."""
    tier = None if disk is None else DiskTier(disk, EVERYTHING)
    return CachedBatches(Hdf5Dataset(path, {"x": "x"}), "x", MemoryTier(memory), tier, "x")


def case(folder: Path, name: str, values: np.ndarray, chunk: int, gzip: bool, rounds: int) -> dict[str, Any]:
    """Measures one file."""
    path = write(folder / f"{name}.h5", values, chunk, gzip)
    batches = batches_of(len(values))
    size = values.nbytes // len(values) + 1000
    disk = folder / f"{name} disk"
    both = folder / f"{name} both"
    read = compare(
        {
            "no cache": epoch(Hdf5Dataset(path, {"x": "x"}), batches),
            "memory": epoch(cached(path, EVERYTHING, None), batches),
            "half in memory": epoch(cached(path, len(values) * size // 2, both), batches),
            "disk": epoch(cached(path, 0, disk), batches),
        },
        rounds,
    )
    counter = iter(range(10**6))
    plain = Hdf5Dataset(path, {"x": "x"})
    fill = first_epoch(lambda: cached(path, 0, folder / f"{name} {next(counter)}"), plain, batches, max(5, rounds // 3))
    compressed = path.stat().st_size / values.nbytes
    return {
        "name": name,
        "samples": len(values),
        "bytes": values.nbytes // len(values),
        "file": round(compressed, 3),
        "later epochs": read,
        "first epoch, disk": fill["first epoch"],
    }


def main() -> None:
    """Measures all cases and writes the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--samples", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.samples
    kinds = {"photographs": (noisy_images, 4 * count), "scenes": (scenes, count)}
    cases = []
    files = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, (make, samples) in kinds.items():
            values = make(samples)
            for gzip, chunk in ((True, 1), (True, 16), (False, 0)):
                label = f"{kind}, gzip, chunks of {chunk}" if gzip else f"{kind}, not compressed"
                cases.append(case(folder, label, values, chunk, gzip, options.rounds))
                print(json.dumps(cases[-1]), flush=True)
            files.append({"name": kind} | compare_files(folder, values, options.rounds))
            print(json.dumps(files[-1]), flush=True)
    result = {
        "command": "python experiments/large_data/measure.py",
        "date": datetime.date.today().isoformat(),
        "machine": f"cpu, {cpu_model()}, 1 thread, torch {torch.__version__}, h5py {h5py.__version__}",
        "load": round(os.getloadavg()[0], 1),
        "rounds": options.rounds,
        "batch": BATCH,
        "samples": options.samples,
        "cases": cases,
        "files": files,
    }
    (FOLDER / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare_files(folder: Path, values: np.ndarray, rounds: int) -> dict[str, Any]:
    """Compares ways to read the same rows."""
    batches = batches_of(len(values))
    flat = write(folder / "flat.h5", values, 0, False)
    small = write(folder / "small.h5", values, 1, True)
    large = write(folder / "large.h5", values, 16, True)
    return compare(
        {
            "not compressed": epoch(Hdf5Dataset(flat, {"x": "x"}), batches),
            "gzip, chunks of 1": epoch(Hdf5Dataset(small, {"x": "x"}), batches),
            "gzip, chunks of 16": epoch(Hdf5Dataset(large, {"x": "x"}), batches),
            "gzip, chunks of 1, h5py's lists": h5py_lists(small, batches),
            "gzip, chunks of 16, h5py's lists": h5py_lists(large, batches),
        },
        rounds,
    )


if __name__ == "__main__":
    main()
