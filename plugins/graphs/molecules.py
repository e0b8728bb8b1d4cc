"""Molecules as graphs of their atoms; an item is parsed, and its features are computed,
at each access.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.utils.data import Dataset

from runner.api import Batch, DatasetSource, Learner

from ..molecules.smiles import Molecule, read
from ..molecules.table import Table
from .padding import EDGES, padded_nodes

if TYPE_CHECKING:
    from .config import MoleculeGraphsConfig

ELEMENTS = ("C", "O", "N", "Cl", "S", "F", "Br", "P", "I")
"""Distinguished elements; all others share one more index."""
DEGREES = 5
"""Distinguished numbers of bonds, from at most one; more count as the last."""
WALKS = 16
"""Lengths of random walks."""


class MolecularGraph(NamedTuple):
    """A molecule: x [N, 34], edge [E, 2] from atom to atom, bond [E] by kind, target []
    standardised.
    """

    x: Tensor
    edge: Tensor
    bond: Tensor
    target: Tensor


class MolecularGraphs(Dataset[MolecularGraph]):
    """Rows of a table."""

    def __init__(self, table: Table, rows: Sequence[int]) -> None:
        self.smiles = [table.smiles[row] for row in rows]
        self.targets = [
            (table.targets[row] - table.mean) / table.std for row in rows
        ]

    def __len__(self) -> int:
        return len(self.smiles)

    def __getitem__(self, index: int) -> MolecularGraph:
        """The molecule as a graph."""
        molecule = read(self.smiles[index])
        pairs = [*molecule.bonds, *((b, a) for a, b in molecule.bonds)]
        # A molecule of one atom has no pairs, and its tensor would have one dimension.
        edge = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        bond = torch.tensor([*molecule.bonds.values()] * 2, dtype=torch.int64)
        target = torch.tensor(self.targets[index])
        return MolecularGraph(features(molecule, edge), edge, bond, target)


def features(molecule: Molecule, edge: Tensor) -> Tensor:
    """Returns the features of every atom, [N, 34].

    They are element, number of bonds, aromaticity, charge, and whether it is in a ring;
    then for 1 to 16 steps the probability that a random walk is at its start (Dwivedi
    et al. 2022, arXiv 2110.07875).
    """
    atoms = molecule.atoms
    rings = molecule.rings()
    index_of = {element: index for index, element in enumerate(ELEMENTS)}
    element = torch.tensor(
        [index_of.get(atom.element, len(ELEMENTS)) for atom in atoms]
    )
    degree = torch.bincount(edge[:, 0], minlength=len(atoms))
    flags = [
        [atom.aromatic, atom.charge, index in rings]
        for index, atom in enumerate(atoms)
    ]
    # NumPy is faster than torch for matrices of this size.
    adjacency = np.zeros((len(atoms), len(atoms)), np.float32)
    adjacency[edge[:, 0], edge[:, 1]] = 1
    # The walk of an atom without bonds ends; the maximum avoids a division by zero.
    step = adjacency / np.maximum(adjacency.sum(1, keepdims=True), 1)
    returns = np.empty((len(atoms), WALKS), np.float32)
    probabilities = np.eye(len(atoms), dtype=np.float32)
    for length in range(WALKS):
        probabilities = probabilities @ step
        returns[:, length] = probabilities.diagonal()

    degrees = (degree.clamp(1, DEGREES) - 1).clamp(min=0)
    one_hot = [
        F.one_hot(element, len(ELEMENTS) + 1),
        F.one_hot(degrees, DEGREES),
        torch.tensor(flags),
    ]
    return torch.cat([*one_hot, torch.from_numpy(returns)], 1)


def _last(real: Tensor) -> Tensor:
    """Returns the number of columns up to the last real one, of [B, N]."""
    return (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(
        1
    )


class MoleculeGraphs(DatasetSource):
    """Molecules to train on and to hold out."""

    def datasets(self, config: MoleculeGraphsConfig) -> tuple[Any, Any, Any]:
        """The parts of the table."""
        self.table = table = Table(config, self.context.seed)
        train = MolecularGraphs(table, table.train)
        held_out = MolecularGraphs(table, table.held_out)
        if table.test is None:
            return train, held_out, None
        return train, held_out, MolecularGraphs(table, table.test)

    def collate(self, samples: Sequence[MolecularGraph]) -> Batch:
        """Pads: x [B, N, 34], edge [B, E, 2], bond [B, E] (0 is none), mask [B, N] (True for an
        atom), target [B].
        """
        nodes = max(
            padded_nodes(len(sample.x), len(sample.bond)) for sample in samples
        )
        edges = int(nodes * EDGES)

        def padded(tensor: Tensor, rows: int) -> Tensor:
            # Padding is listed from the last dimension to the first, which alone grows.
            other_dimensions = [0, 0] * (tensor.dim() - 1)
            return F.pad(tensor, [*other_dimensions, 0, rows - len(tensor)])

        return {
            "x": torch.stack([padded(sample.x, nodes) for sample in samples]),
            "edge": torch.stack(
                [padded(sample.edge, edges) for sample in samples]
            ),
            "bond": torch.stack(
                [padded(sample.bond, edges) for sample in samples]
            ),
            "mask": torch.stack(
                [torch.arange(nodes) < len(sample.x) for sample in samples]
            ),
            "target": torch.stack([sample.target for sample in samples]),
        }

    def buckets(self, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """Molecules that are padded to one size, in which all that an edge or a mask names has
        room.
        """
        atoms = _last(batch["mask"])
        bonds = _last(batch["bond"] > 0)
        # A stage may have changed the edges; an edge to a node that was cut off would be invalid.
        referenced = batch["edge"].amax((1, 2)) + 1
        node_counts = torch.maximum(atoms, referenced).tolist()
        counts = zip(node_counts, bonds.tolist(), strict=True)
        sizes = torch.tensor(
            [padded_nodes(nodes, edges) for nodes, edges in counts]
        )
        for nodes in sorted(set(sizes.tolist())):
            index = (sizes == nodes).nonzero()[:, 0]
            bucket = {
                name: tensor[index.to(tensor.device)]
                for name, tensor in batch.items()
            }
            edges = int(nodes * EDGES)
            for name in ("x", "mask"):
                bucket[name] = bucket[name][:, :nodes]
            for name in ("edge", "bond"):
                bucket[name] = bucket[name][:, :edges]
            yield index, bucket

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """The root of the mean squared error, in the table's unit."""
        return self.table.measured(super().evaluate(learner))

    def fingerprint(self) -> str:
        """The file's SHA-256."""
        return self.table.digest
