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
from .graph_config import BUCKET, LONGEST, PADDED, VOCABULARY
from .walks import PAD, check, encode

if TYPE_CHECKING:
    from .graph_config import GraphWalksConfig


class Walk(NamedTuple):
    """A sample."""

    tokens: Tensor  # [T], long
    target: float  # standardised


class Walks(Dataset[Walk]):
    """Molecules with what was measured; each is walked through when it is drawn."""

    def __init__(self, molecules: Sequence[Molecule], targets: Sequence[float], seed: str, redraw: bool) -> None:
        self.molecules, self.targets, self.seed, self.redraw = molecules, targets, seed, redraw

    def __len__(self) -> int:
        return len(self.molecules)

    def __getitem__(self, index: int) -> Walk:
        return self._made(index, random.Random(random.getrandbits(64))) if self.redraw else self.walk(index, 0)

    def walk(self, index: int, variant: int) -> Walk:
        """The walk of a molecule that follows from both numbers and the seed."""
        return self._made(index, random.Random(f"{self.seed}/{index}/{variant}"))

    def _made(self, index: int, draw: random.Random) -> Walk:
        return Walk(torch.tensor(encode(self.molecules[index], draw)), self.targets[index])


class KeptWalks(Dataset[Walk]):
    """Walks that are made once; which of a molecule's variants comes is drawn from torch's global generator."""

    def __init__(self, walks: Walks, variants: int) -> None:
        self.walks, self.variants = walks, variants
        self.made = self.found = 0
        self._kept: dict[tuple[int, int], Walk] = {}

    def __len__(self) -> int:
        return len(self.walks)

    def __getitem__(self, index: int) -> Walk:
        variant = int(torch.randint(self.variants, ())) if self.variants > 1 else 0
        if (walk := self._kept.get((index, variant))) is not None:
            self.found += 1
            return walk
        self.made += 1
        walk = self._kept[index, variant] = self.walks.walk(index, variant)
        return walk


class GraphWalks(DatasetSource):
    """Batches of tokens [B, L], the length of every walk [B], and the standardised target [B]."""

    def datasets(self, config: GraphWalksConfig) -> tuple[Walks, Walks]:
        """Walks through the molecules to train on, and one for each that is held out.

        Raises:
            UsageError: There is no such table, or a molecule has no walk that fits the tokens.
        """
        seed = self.context.seed
        self.table = table = Table(config, seed)
        self.sizes = {"vocabulary": VOCABULARY, "longest": LONGEST}

        def walks(part: str, rows: Sequence[int], redraw: bool) -> Walks:
            molecules = [_checked(table, row) for row in rows]
            targets = [(table.targets[row] - table.mean) / table.std for row in rows]
            return Walks(molecules, targets, f"{seed}/{part}", redraw)

        return walks("train", table.train, config.redraw), walks(config.held_out, table.held_out, False)

    def collate(self, samples: Sequence[Walk]) -> Batch:
        """Pads walks at their end."""
        lengths = [len(walk.tokens) for walk in samples]
        tokens = torch.full((len(samples), _up(max(lengths), PADDED)), PAD)
        for row, walk in zip(tokens, samples, strict=True):
            row[: len(walk.tokens)] = walk.tokens
        target = torch.tensor([walk.target for walk in samples])
        return {"tokens": tokens, "length": torch.tensor(lengths), "target": target}

    def buckets(self, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """Walks of about equal length, with the numbers of their rows."""
        padded = (batch["length"] + BUCKET - 1) // BUCKET * BUCKET
        for length in padded.unique().tolist():
            rows = (padded == length).nonzero().squeeze(1)
            part = {name: tensor[rows] for name, tensor in batch.items()}
            yield rows, part | {"tokens": part["tokens"][:, :length]}

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """The learner's metrics over all held-out molecules, and the error in the table's unit."""
        return self.table.measured(super().evaluate(learner))

    def rehearse(self, learner: Learner, batch: Batch) -> dict[str, float]:
        """Evaluates a single held-out batch."""
        return self.table.measured(super().rehearse(learner, batch))

    def fingerprint(self) -> str:
        """The table's SHA-256."""
        return self.table.digest


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _checked(table: Table, row: int) -> Molecule:
    molecule = read(table.smiles[row])
    try:
        check(molecule)
    except ValueError as error:
        problem = f"'{table.smiles[row]}' cannot be walked through: {error}; remove that row"
        raise UsageError(f"data.file: {table.path}, row {row + 2}: {problem}") from error
    return molecule
