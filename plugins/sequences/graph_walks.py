"""Molecules as batches of walks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.api import Batch, DatasetSource, Learner, UsageError

from ..molecules.smiles import Molecule, read
from ..molecules.table import Table
from .graph_config import BUCKET, LONGEST, PADDED, VOCABULARY, round_up
from .walks import PAD, check, decode, encode

if TYPE_CHECKING:
    from .graph_config import GraphWalksConfig


class Walk(NamedTuple):
    """A sample.

    Attributes:
        tokens: The tokens, [T], int64.
        target: The measured number, standardised.
    """

    tokens: Tensor
    target: float


class Walks(Dataset[Walk]):
    """Molecules with their targets; a walk is computed at each access.

    Args:
        molecules: The molecules.
        targets: Their targets, standardised.
        seed: Seed of the walks that follow from the number of their molecule.
        redraw: Whether each access has a new walk.
    """

    def __init__(
        self,
        molecules: Sequence[Molecule],
        targets: Sequence[float],
        seed: str,
        redraw: bool,
    ) -> None:
        self.molecules = molecules
        self.targets = targets
        self.seed = seed
        self.redraw = redraw

    def __len__(self) -> int:
        return len(self.molecules)

    def __getitem__(self, index: int) -> Walk:
        if not self.redraw:
            return self.walk(index, 0)
        # The global generator is seeded for every batch, so a resumed training has the same
        # walks.
        return self._encode(index, random.Random(random.getrandbits(64)))

    def walk(self, index: int, variant: int) -> Walk:
        """Returns the walk of a molecule that follows from both numbers and the seed."""
        return self._encode(
            index, random.Random(f"{self.seed}/{index}/{variant}")
        )

    def _encode(self, index: int, generator: random.Random) -> Walk:
        tokens = encode(self.molecules[index], generator)
        return Walk(torch.tensor(tokens), self.targets[index])


class CachedWalks(Dataset[Walk]):
    """Walks that are computed once.

    A variant of a molecule is selected with torch's global generator.
    """

    def __init__(self, walks: Walks, variants: int) -> None:
        self.walks = walks
        self.variants = variants
        self.misses = 0
        self.hits = 0
        self._cache: dict[tuple[int, int], Walk] = {}

    def __len__(self) -> int:
        return len(self.walks)

    def __getitem__(self, index: int) -> Walk:
        # A single variant must not advance the generator: its walks have to be the same as
        # without the cache.
        variant = 0
        if self.variants > 1:
            variant = int(torch.randint(self.variants, ()))
        walk = self._cache.get((index, variant))
        if walk is not None:
            self.hits += 1
            return walk
        self.misses += 1
        walk = self.walks.walk(index, variant)
        self._cache[index, variant] = walk
        return walk


class GraphWalks(DatasetSource):
    """Batches of tokens [B, L], the length of every walk [B], and the standardised target [B].

    Held-out batches have several walks of each molecule, [B, K, L], with ``data.walks``.
    """

    def datasets(
        self, config: GraphWalksConfig
    ) -> tuple[Walks, Walks, Walks | None]:
        """Returns the walks for training, and one for each molecule that is held out.

        Raises:
            UsageError: The table is missing, or a molecule has no walk that fits the tokens.
        """
        table = Table(config, self.context.seed)
        self.table = table
        self.walks = config.walks
        self._further: dict[str, list[list[int]]] = {}
        """Further walks of held-out molecules, by their first walk."""
        self.sizes = {"vocabulary": VOCABULARY, "longest": LONGEST}
        train = self._walks("train", table.train, config.redraw)
        held_out = self._walks(config.held_out, table.held_out, redraw=False)
        if table.test is None:
            return train, held_out, None
        return train, held_out, self._walks("test", table.test, redraw=False)

    def _walks(self, split: str, rows: Sequence[int], redraw: bool) -> Walks:
        table = self.table
        molecules = [_read_molecule(table, row) for row in rows]
        # Standardised targets suit an untrained head, whatever the unit of the table is.
        targets = [
            (table.targets[row] - table.mean) / table.std for row in rows
        ]
        return Walks(molecules, targets, f"{self.context.seed}/{split}", redraw)

    def collate(self, samples: Sequence[Walk]) -> Batch:
        """Pads walks at their end."""
        lengths = [len(walk.tokens) for walk in samples]
        tokens = torch.full((len(samples), round_up(max(lengths), PADDED)), PAD)
        for row, walk in zip(tokens, samples, strict=True):
            row[: len(walk.tokens)] = walk.tokens
        return {
            "tokens": tokens,
            "length": torch.tensor(lengths),
            "target": torch.tensor([walk.target for walk in samples]),
        }

    def held_out_batch_size(self) -> int:
        """Returns the molecules of a held-out batch, which has about as many walks as an update."""
        return max(1, super().held_out_batch_size() // self.walks)

    def held_out_batches(self) -> Iterator[Batch]:
        """Yields all held-out molecules, each with ``data.walks`` walks."""
        for batch in super().held_out_batches():
            yield batch if self.walks == 1 else self._with_further_walks(batch)

    def _with_further_walks(self, batch: Batch) -> Batch:
        """Returns a batch with tokens [B, K, L]; the first walk of a molecule remains the first."""
        first = batch["tokens"]
        # All walks of a molecule have the same length, so the padding is sufficient for them.
        tokens = first[:, None].repeat(1, self.walks, 1)
        lengths = batch["length"].tolist()
        for row, length in enumerate(lengths):
            further = self._further_walks(first[row, :length].tolist())
            tokens[row, 1:, :length] = torch.tensor(further)
        return {**batch, "tokens": tokens}

    def _further_walks(self, tokens: list[int]) -> list[list[int]]:
        # The walk is the seed: its molecule has the same walks in every evaluation, whatever its
        # number in the table or in a cross-validation.
        seed = " ".join(map(str, tokens))
        if seed not in self._further:
            molecule = decode(tokens)
            generator = random.Random(seed)
            self._further[seed] = [
                encode(molecule, generator) for _ in range(self.walks - 1)
            ]
        return self._further[seed]

    def buckets(self, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """Yields walks of about equal length, with the numbers of their rows."""
        padded_lengths = (batch["length"] + BUCKET - 1) // BUCKET * BUCKET
        # Few different lengths: a compiled network is compiled for each of them.
        for length in padded_lengths.unique().tolist():
            rows = (padded_lengths == length).nonzero().squeeze(1)
            bucket = {name: tensor[rows] for name, tensor in batch.items()}
            bucket["tokens"] = bucket["tokens"][:, :length]
            yield rows, bucket

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Returns the learner's metrics over all held-out molecules.

        The error is in the unit of the table.
        """
        return self.table.measured(super().evaluate(learner))

    def fingerprint(self) -> str:
        """Returns the table's SHA-256."""
        return self.table.digest


def _read_molecule(table: Table, row: int) -> Molecule:
    smiles = table.smiles[row]
    molecule = read(smiles)
    try:
        check(molecule)
    except ValueError as error:
        problem = (
            f"'{smiles}' cannot be walked through: {error}; remove that row"
        )
        # The first row of the file has the names of the columns, and people count from 1.
        line = row + 2
        raise UsageError(
            f"data.file: {table.path}, row {line}: {problem}"
        ) from error
    return molecule
