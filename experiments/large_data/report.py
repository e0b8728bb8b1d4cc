"""Writes the report of the stored results.

python experiments/large_data/report.py
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TITLE = """# Data on disk: what compression costs, and what a cache gains

Time to read an epoch of random batches from an HDF5 file, without training. A ratio above 1 is faster.

    python experiments/large_data/measure.py --rounds {rounds} --samples {samples}
    python experiments/large_data/report.py

{date}; {machine}; load average {load}. Batches of {batch}; {rounds} rounds of one process that alternate
between the variants, medians, ratios with a 95 % interval over rounds
(the difference of two identical processes is not in it). All files are in the page cache of the kernel: a disk
that is slower than decompressing changes the answers. Chunks that HDF5 keeps of an open
file are forgotten before every epoch.
"""
FILES = """
## Compressed files

*Photographs* are [3, 64, 64] in bytes with noise in the two lowest bits, *scenes* clouds of [4096, 3] points in
float32 on a millimetre grid. Ratios are to the file without compression.

| file | size | ms an epoch | ratio |
|---|---|---|---|
"""
CACHE = """
**Gzip never made loading faster here; it makes files smaller.** A chunk of 16 rows is decompressed for one of
them. `Hdf5Dataset` reads a slice of each chunk, because h5py joins the selections of a list
of rows one by one (the rows with *lists*).

## `sample_cache`

Ratios of later epochs to reading without a cache. *Memory* keeps all samples, *half* keeps half of them and the others
in files, *files* keeps none in memory. The *first epoch* fills an empty folder.

| file | no cache, ms | memory | half | files | first epoch with files |
|---|---|---|---|---|---|
"""
END = """
**A cache in memory gains most, and `preprocess_once` has that without a limit. Files gain where making a
sample costs more than reading and checking a file. They lose where samples are cheap to read, and the first
epoch pays for writing them: 1.5 to 13 times as long. With half in memory, each sample that is found in a file moves
into the memory and another one leaves it, which costs more than it gains where every sample is read once in an
epoch: set `memory: null`, or enough for all.**
"""


def ratio_text(values: list[float]) -> str:
    """Returns a ratio with its interval."""
    return "{:.2f}x [{:.2f}, {:.2f}]".format(*values)


def main() -> None:
    """Writes README.md."""
    result: dict[str, Any] = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    sizes = {case["name"]: case["file"] for case in result["cases"]}
    text = TITLE.format(**result)
    text += FILES
    for file in result["files"]:
        for name, figures in file.items():
            if name == "name":
                continue
            label = f"{file['name']}, {name}"
            size = sizes[label.removesuffix(", h5py's lists")]
            label = label.replace("h5py's lists", "*lists*")
            text += (
                f"| {label} | {100 * size:.0f} % | {figures['milliseconds']:.0f} | {ratio_text(figures['ratio'])} |\n"
            )
    text += CACHE
    for case in result["cases"]:
        later = case["later epochs"]
        cells = [ratio_text(later[name]["ratio"]) for name in ("memory", "half in memory", "disk")]
        cells.append(ratio_text(case["first epoch, disk"]["ratio"]))
        text += f"| {case['name']} | {later['no cache']['milliseconds']:.0f} | {' | '.join(cells)} |\n"
    text += END
    (FOLDER / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
