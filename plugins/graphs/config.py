"""The faces of the learners on graphs and of their data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from runner.api import (
    ClassWeightsConfig,
    DataFile,
    DataName,
    GradientLearnerConfig,
    Objective,
    PublishedDatasetConfig,
    SourceOutline,
    TensorOutline,
)

from ..molecules.table import MoleculesConfig
from ..settings import Count, Heads

Share = Annotated[float, Field(ge=0, lt=1)]

PLANETOID = "made from the files that Yang et al. 2016 pickled (kimiyoung/planetoid, MIT)"
CORA = DataFile(
    name="cora.npz",
    url="",
    sha256="7991e33b78b565bad2f01ab3689b3c96e73005ab85f2a2a19b64f729f44f5d00",
    size=87_200,
    about=f"2,708 papers of 7 subjects that cite each other, {PLANETOID}",
)
CITESEER = DataFile(
    name="citeseer.npz",
    url="",
    sha256="2acfc6a113c232f2d4802c76a8554116b32b7f1134c8741a9902f7cd1053d34a",
    size=173_974,
    about=f"3,327 papers of 6 subjects that cite each other, {PLANETOID}",
)


class GraphSize(NamedTuple):
    """Counts of a citation graph; an edge counts once."""

    nodes: int
    features: int
    edges: int
    classes: int


PUBLISHED = {
    CORA.name: GraphSize(2708, 1433, 5278, 7),
    CITESEER.name: GraphSize(3327, 3703, 4552, 6),
}


class CitationConfig(PublishedDatasetConfig):
    """A graph whose nodes have features and a class; few classes are used in training.

    The default file is Cora (``runner data get cora.npz``). With ``synthetic: true`` it is the
    graph of scikit-learn's 1,797 digits, each connected with its ten nearest.
    """

    divisible: ClassVar[bool] = False
    headline: ClassVar[tuple[str, ...]] = ("accuracy",)
    objective: ClassVar[Objective] = Objective(
        "accuracy", "maximize", margin=0.02, unit="share"
    )
    files: ClassVar[tuple[DataFile, ...]] = (CORA, CITESEER)

    file: DataName = CORA.name
    """A path of an .npz, relative to the recipe; or the name of a file in the folders of data."""
    held_out: Literal["validation", "test"] = "validation"
    """The nodes of evaluations, which select the best checkpoint. With ``test``, the test nodes
    select it, and no others test it.
    """

    def wanted(self) -> tuple[DataFile, ...]:
        """The published graph that is named, if one is."""
        return tuple(file for file in self.files if file.name == self.file)

    def size(self) -> GraphSize | None:
        """Returns the counts of the graph; None if it is synthetic, or neither published nor
        there.
        """
        if self.synthetic:
            return None
        if self.file in PUBLISHED:
            return PUBLISHED[self.file]
        if self.locate(self.file) is None:
            return None
        from .citation import read

        graph = read(self)
        nodes, features = graph.features.shape
        return GraphSize(
            nodes, features, len(graph.edges), int(graph.labels.max()) + 1
        )


class CitationGraphConfig(CitationConfig):
    """A graph that is one batch, one sample and one epoch.

    Its nodes have features and a class; few classes are used in training. The default file is Cora
    (``runner data get cora.npz``). With ``synthetic: true`` it is the graph of scikit-learn's 1,797
    digits, each connected with its ten nearest.
    """

    kind: ClassVar[str] = "citation_graph"
    implementation = ".citation:CitationGraph"
    provides: ClassVar[str] = "node_graph"
    in_memory: ClassVar[bool] = True

    parts: Count = 1
    """How many parts of equal size the nodes are in, for learners that work on parts."""
    partition: Literal["breadth", "degree", "random"] = "breadth"
    """In what order nodes are put into parts: breadth first, by their number of edges, or at
    random.
    """

    def largest_batch(self) -> int:
        """Returns 1: there is one graph."""
        return 1

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of the graph."""
        size = self.size()
        if size is None:
            return None
        nodes = size.nodes
        edges = 2 * size.edges + size.nodes
        batch = {
            "x": TensorOutline((1, nodes, size.features)),
            "edge": TensorOutline((1, edges, 2), "int64"),
            "weight": TensorOutline((1, edges)),
            "label": TensorOutline((1, nodes), "int64"),
            "mask": TensorOutline((1, nodes), "bool"),
        }
        if self.parts > 1:
            for name in ("part", "readers", "turn"):
                batch[name] = TensorOutline((1, nodes), "int64")
        return SourceOutline(
            batch, sizes={"classes": size.classes}, epoch_samples=1
        )


class GcnConfig(ClassWeightsConfig, GradientLearnerConfig):
    """A graph convolutional network that predicts the class of every node (Kipf and
    Welling 2017, GCN).

    Every layer mixes the features of a node and averages them over the node and those it is
    connected with.

    When it helps: most neighbours are of one class, and few classes are known.
    When it hurts: neighbours differ, or relevant nodes are further away than there are layers.
    """

    kind: ClassVar[str] = "gcn"
    implementation = ".gcn:Gcn"
    classifies: ClassVar[bool] = True
    learns_from: ClassVar[str] = "node_graph"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {"kind": "adam", "lr": 0.01, "weight_decay": 5e-4}
    }
    slots: ClassVar[frozenset[str]] = GradientLearnerConfig.slots | {
        "features",
        "aggregate",
    }
    headline: ClassVar[tuple[str, ...]] = ("accuracy", "loss")
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "accuracy": (0, 1),
        "loss": (0, math.inf),
    }

    layers: Annotated[int, Field(ge=1)] = 2
    """Each reaches one edge further."""
    width: Count = 16
    """Size of the vector of a node between the layers."""
    dropout: Share = 0.5
    """Share of the numbers between the layers that is dropped in training."""
    input_dropout: Share | None = None
    """The dropout of the features; equal to ``dropout`` by default."""

    def draws(self) -> bool:
        """Dropout does."""
        return self.dropout > 0 or bool(self.input_dropout)


class PartitionedGcnConfig(GcnConfig):
    """A graph convolutional network on a graph in parts, each of which could be on a separate
    machine; one process computes all.

    The values of nodes at a border are needed on the other side. ``full_halo`` sends all of them in
    every update; ``historical`` sends all of them every few updates; ``emma`` sends one of several
    chunks in every update (after Huang et al. 2025). Receivers use the values that they received
    last. Evaluation uses all values.

    When it helps: what is sent takes longer than what is computed. This simulation counts bytes,
    and saves none. When it hurts: gradients do not go through what was sent in earlier updates,
    and that is out of date.
    """

    kind: ClassVar[str] = "partitioned_gnn"
    implementation = ".partitioned:PartitionedGcn"
    depends_on_progress: ClassVar[bool] = True
    slots: ClassVar[frozenset[str]] = GradientLearnerConfig.slots

    exchange: Literal["full_halo", "historical", "emma"] = "full_halo"
    """Which nodes send in which updates."""
    chunks: Count = 4
    """In how many updates everything is sent once, unless all is sent in every one."""


class GpsConfig(GradientLearnerConfig):
    """A graph transformer that predicts one number of every graph (Rampášek et al. 2022, GPS).

    In every layer a node hears from those that it is bonded to (GINE, Hu et al. 2020) and, by
    attention, from all others; both are put together and go through a feed-forward layer.

    When it helps: distant nodes matter, and graphs are small: attention uses all pairs.
    When it hurts: a thousand molecules are few for it; where counts of atoms are sufficient, ridge
    regression is as good.
    """

    sample_losses: ClassVar[bool] = True
    kind: ClassVar[str] = "gps"
    implementation = ".gps:Gps"
    learns_from: ClassVar[str] = "molecules"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {
            "kind": "adamw",
            "lr": 1e-3,
            "weight_decay": 1e-4,
            "max_grad_norm": 1.0,
        }
    }

    layers: Count = 4
    """Each reaches one bond further, and everywhere."""
    width: Count = 64
    """Size of the vector of an atom between the layers."""
    heads: Heads = 4
    """Attention heads of every layer; they share the width among them."""
    fusion: Literal["sum", "scalar", "channel", "node"] = "sum"
    """How the two are combined: added, or weighted by a trained share for all, for each
    number, for each node.
    """
    dropout: Share = 0.0
    """Share of the activations that is dropped in training."""

    def draws(self) -> bool:
        """Dropout does."""
        return self.dropout > 0


class MoleculeGraphsConfig(MoleculesConfig):
    """Molecules as graphs of their atoms, with one measured number each, from a table of SMILES.

    An atom is described by element, number of bonds, aromaticity, charge, whether it is in a ring,
    and the probability that a random walk returns to it. Batches are padded to 16, 24, 32, 56 or
    more atoms. The default file is ESOL (``runner data get esol.csv``). With ``synthetic: true``
    molecules and measurements are generated.
    """

    kind: ClassVar[str] = "molecules"
    implementation = ".molecules:MoleculeGraphs"
    provides: ClassVar[str] = "molecules"
    shapes_vary: ClassVar[bool] = True

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of a batch with the largest molecules of the table."""
        from .padding import padded_nodes

        sizes = self.largest_sizes(
            batch_size,
            lambda counts: counts.nodes,
            lambda molecule: padded_nodes(
                len(molecule.atoms), 2 * len(molecule.bonds)
            ),
        )
        if sizes is None:
            return None
        rows = Counter(sizes)
        return SourceOutline(
            batch_of_molecules(batch_size, sizes[-1]),
            f"the {batch_size} largest molecules of {self.file}, padded to {sizes[-1]} atoms",
            buckets=tuple(
                batch_of_molecules(count, nodes)
                for nodes, count in rows.items()
            ),
        )


def batch_of_molecules(rows: int, nodes: int) -> Mapping[str, TensorOutline]:
    """Returns the shapes of a batch of molecules that are padded to the same number of nodes."""
    from .padding import EDGES, FEATURES

    edges = int(nodes * EDGES)
    return {
        "x": TensorOutline((rows, nodes, FEATURES)),
        "edge": TensorOutline((rows, edges, 2), "int64"),
        "bond": TensorOutline((rows, edges), "int64"),
        "mask": TensorOutline((rows, nodes), "bool"),
        "target": TensorOutline((rows,)),
    }
