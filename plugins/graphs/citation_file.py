"""Files with a citation graph, checked before anything is computed with them."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runner.api import UsageError

ARRAYS = (
    "feature_indptr",
    "feature_indices",
    "num_features",
    "edge_index",
    "label",
    "train_index",
    "val_index",
    "test_index",
)
"""Arrays of a file: features are ones, in rows as SciPy's CSR has them; edges have no direction."""
PARTS = ("train_index", "val_index", "test_index")
_log = logging.getLogger(__name__)


def read_arrays(path: Path) -> Mapping[str, Tensor]:
    """Reads a graph.

    Returns:
        The arrays as integers; ``edge_index`` [2, E] has each edge once, without edges from a
        node to itself.

    Raises:
        UsageError: The file is no archive with these arrays, or they contradict each other.
    """
    try:
        with (
            path.open("rb") as opened,
            np.load(opened, allow_pickle=False) as file,
        ):
            missing = [name for name in ARRAYS if name not in file]
            if missing:
                raise UsageError(
                    f"data.file: {path} has no array '{missing[0]}'; it needs {', '.join(ARRAYS)}"
                )
            stored = {name: np.asarray(file[name]) for name in ARRAYS}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"data.file: {path} cannot be read as an .npz: {error}"
        ) from error

    fractions = [name for name, array in stored.items() if not _is_whole(array)]
    if fractions:
        raise UsageError(
            f"data.file: {path}: {fractions[0]}: should have integers, got "
            f"{stored[fractions[0]].dtype}"
        )
    arrays = {
        name: torch.from_numpy(array.astype(np.int64))
        for name, array in stored.items()
    }

    problem = problem_of(arrays)
    if problem is not None:
        raise UsageError(f"data.file: {path}: {problem}")
    return {**arrays, "edge_index": undirected(arrays["edge_index"], path)}


def _is_whole(array: np.ndarray) -> bool:
    # Integers only: a mask of booleans would be read as the numbers 0 and 1.
    if np.issubdtype(array.dtype, np.floating):
        return bool((array == np.round(array)).all())
    return np.issubdtype(array.dtype, np.integer)


def problem_of(arrays: Mapping[str, Tensor]) -> str | None:
    """Returns in one line what is wrong with a graph; None if nothing is."""
    return (
        _problem_of_features(arrays)
        or _problem_of_nodes(arrays)
        or _problem_of_parts(arrays)
    )


def _problem_of_features(arrays: Mapping[str, Tensor]) -> str | None:
    starts = arrays["feature_indptr"]
    columns = arrays["feature_indices"]
    count = arrays["num_features"]
    if count.numel() != 1 or int(count) < 1:
        return "num_features: should be one positive number"
    if starts.ndim != 1 or columns.ndim != 1 or len(starts) < 2:
        return (
            "feature_indptr and feature_indices: should have one dimension, with an entry "
            "more than nodes"
        )
    covers_columns = int(starts[0]) == 0 and int(starts[-1]) == len(columns)
    falls = bool((starts.diff() < 0).any())
    if not covers_columns or falls:
        return (
            f"feature_indptr: should rise from 0 to {len(columns)}, the length of "
            f"feature_indices"
        )
    return _out_of_range("feature_indices", columns, int(count), "num_features")


def _problem_of_nodes(arrays: Mapping[str, Tensor]) -> str | None:
    nodes = len(arrays["feature_indptr"]) - 1
    edges = arrays["edge_index"]
    labels = arrays["label"]
    if edges.ndim != 2 or len(edges) != 2:
        return f"edge_index: should be [2, edges], got {list(edges.shape)}"
    if labels.shape != (nodes,):
        return f"label: should have an entry for each of {nodes} nodes, got {list(labels.shape)}"
    for name in ("edge_index", *PARTS):
        problem = _out_of_range(
            name, arrays[name], nodes, "the number of nodes"
        )
        if problem is not None:
            return problem
    return None


def _problem_of_parts(arrays: Mapping[str, Tensor]) -> str | None:
    labels = arrays["label"]
    for name in PARTS:
        unlabelled = arrays[name][labels[arrays[name]] < 0]
        if len(unlabelled):
            return f"{name}: node {int(unlabelled[0])} has no label"
    for first, second in combinations(PARTS, 2):
        shared = arrays[first][torch.isin(arrays[first], arrays[second])]
        if len(shared):
            return (
                f"node {int(shared[0])} is in {first} and in {second}: remove it from one "
                f"of them"
            )
    return None


def _out_of_range(
    name: str, numbers: Tensor, count: int, limit: str
) -> str | None:
    invalid = numbers[(numbers < 0) | (numbers >= count)]
    if not len(invalid):
        return None
    return f"{name}: {int(invalid[0])} should be at least 0 and less than {count}, {limit}"


def undirected(edges: Tensor, path: Path) -> Tensor:
    """Returns each edge [2, E] once, the smaller node first, and warns if that changes the graph.

    An average over neighbours would count an edge twice that a file lists in both directions.
    Every node has an edge to itself in the models, so those of the file are left out.
    """
    pairs = edges.sort(0).values
    proper = pairs[:, pairs[0] < pairs[1]]
    unique: Tensor = torch.unique(proper, dim=1)
    self_loops = pairs.shape[1] - proper.shape[1]
    repeated = proper.shape[1] - unique.shape[1]
    if not self_loops and not repeated:
        # The order is kept: sums of floats depend on it.
        return pairs
    counts = (
        f"{repeated:,} of {edges.shape[1]:,} edges are listed again or in both "
        f"directions, {self_loops:,} join a node"
    )
    _log.warning(
        "data.file: %s: %s to itself: each edge counts once, and those to itself are left out",
        path,
        counts,
    )
    return unique
