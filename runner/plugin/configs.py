"""Configs of plugins: their settings, what they fit and promise, and their implementation.

Validation and editors read them, so nothing slower than pydantic is imported here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from runner.plugin.config import Config
from runner.plugin.context import PIPELINE, PROCESSES
from runner.plugin.contract import HELD_OUT_LOSS, Contract, Objective
from runner.plugin.files import Anchor, DataFile, find, folders
from runner.plugin.folds import FoldsConfig
from runner.plugin.hybrid_sampling import HybridSamplingConfig
from runner.plugin.memory_choice import MemoryChoice
from runner.plugin.plugin_config import PluginConfig
from runner.plugin.progress import Unit
from runner.system.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

    from runner.plugin.outline import SourceOutline


FETCH_HINT = "get it with: runner data get {name}, or add --download to runner run"


class ServedRequest(Config):
    """The JSON of a request to a served learner."""

    def group(self) -> Hashable:
        """Requests of equal groups can be answered as one batch."""
        return None


class ServedResponse(Config):
    """The JSON of a served learner's answer."""

    # Clients have strict parsers: JSON has no number that is not finite.
    model_config = ConfigDict(ser_json_inf_nan="null")


class EvaluatedConfig(PluginConfig, ABC):
    """Settings of learners and sources; those of the source have precedence."""

    headline: ClassVar[tuple[str, ...]] = ()
    """The evaluation metrics that a person looks at first, without ``eval/``."""
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """The smallest and the largest possible value of evaluation metrics, by name; ``*`` in a name
    matches anything. An objective whose unit is a share needs no entry.
    """
    objective: ClassVar[Objective | None] = None
    """The metric by which models are compared; for a ``GradientLearner`` on a dataset ``eval/loss``
    if neither declares one.
    """


class LearnerConfig(EvaluatedConfig, ABC):
    """The settings of a learner."""

    learns_from: ClassVar[str]
    """The form of data it needs; a source with the same ``provides`` fits."""
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {"model": {"kind": "adamw"}}
    """Names of the optimized roles, each with the default optimizer."""
    slots: ClassVar[frozenset[str]] = frozenset()
    """Methods that stages may replace or wrap, in addition to the steps of every pipeline."""
    answering: ClassVar[frozenset[str]] = frozenset()
    """The names in ``slots`` that no update calls, without ``predict``."""
    depends_on_progress: ClassVar[bool] = False
    """Whether an update depends on the progress, so that not all are the same computation."""
    request: ClassVar[type[ServedRequest] | None] = None
    """The request when it is served, an input of ``Learner.requested``; None if it
    cannot be served.
    """
    response: ClassVar[type[ServedResponse] | None] = None
    """The response when it is served, a result of ``Learner.answered``."""
    page: ClassVar[str | None] = None
    """A folder with ``index.html`` that the server delivers, relative to the folder of the module;
    None if there is none.
    """
    couples_samples: ClassVar[bool] = False
    """Whether the loss of a sample depends on the others of its batch (a contrastive loss), so that
    parts of it cannot be trained on, one after the other or by several processes.
    """
    sample_losses: ClassVar[bool] = False
    """Whether the loss returns that of every sample, too, if ``context.sample_losses`` requests
    them for hybrid sampling.
    """
    losses_are_means: ClassVar[bool] = False
    """Whether the losses of an own ``update`` are means over the samples of a batch; several
    processes then weight them with their samples. Losses in ``forward_backward`` have counts.
    """
    buffer_rule: ClassVar[Literal["broadcast", "average"]] = "broadcast"
    """How several processes agree on buffers after an update: all take those of the first one, or
    means that are weighted with the samples.
    """
    classifies: ClassVar[bool] = False
    """Whether the outputs of the slot ``forward`` in the loss are logits of classes, [...,
    classes], which the loss compares with labels.
    """
    prediction_batch: ClassVar[int | None] = None
    """Largest number of samples that ``predict`` computes together; None without a limit.

    Set it where a prediction is slow: ``runner verify`` then compares the predictions of fewer
    samples.
    """

    init_from: Annotated[str | None, Anchor(named=True)] = Field(
        default=None, exclude=True
    )
    """A run that provides initial weights where names and shapes are the same: its
    name, digits or folder.
    """

    def lacks(self, slot: str) -> str | None:
        """Returns a message if these settings offer no slot of that name; None if they do."""
        if slot == "forward_backward" and self.couples_samples:
            return (
                f"learner '{self.kind}' compares the samples of a batch with one another, so that "
                "the batch cannot be cut"
            )
        if slot in self.slots | PIPELINE | PROCESSES:
            return None
        return f"learner '{self.kind}' has no slot '{slot}'"

    def default_objective(self, data: SourceConfig) -> Objective | None:
        """Returns the objective where neither learner nor source declares one."""
        return None

    def phases(self) -> tuple[float, ...]:
        """Returns the shares of the training after which updates compute something else."""
        return (0.0,)

    def draws(self) -> bool:
        """Returns whether an update uses torch's global generator (dropout), so that cutting a
        batch changes it.
        """
        return False

    def reduced(self) -> Mapping[str, Any]:
        """Returns settings of a smaller model of the same kind, by path; none if it is small.

        ``runner verify --reduced`` compares stages with it, where the whole model takes too long.
        """
        return {}


class GradientLearnerConfig(LearnerConfig, ABC):
    """The settings of a ``GradientLearner``."""

    slots: ClassVar[frozenset[str]] = frozenset({"forward", "loss", "forward_backward"})

    def default_objective(self, data: SourceConfig) -> Objective | None:
        """Returns the loss on held-out samples, if evaluations can be compared by it."""
        # A loss that depends on the progress is another function in every evaluation.
        is_comparable = isinstance(data, DatasetConfig) and not self.depends_on_progress
        return HELD_OUT_LOSS if is_comparable else None


class SourceConfig(EvaluatedConfig, ABC):
    """The settings of a source."""

    provides: ClassVar[str]
    """The form of its batches, matched with ``LearnerConfig.learns_from``."""
    units: ClassVar[frozenset[Unit]] = frozenset({"updates", "samples"})
    """The counts of the source: the possible units of a training's length."""
    depends_on_feedback: ClassVar[bool] = False
    """Whether the outputs of an update change which batches are sampled next (priorities)."""
    division: ClassVar[Literal["rows", "draws"] | None] = None
    """How several processes divide its batches. ``rows``: every process draws the same batch and
    takes its rows. ``draws``: every process draws a part of each batch itself, from numbers of
    ``Context.process_generator``; ``draw`` returns a batch in all of them or in none. Statistics
    and counts, except samples, are those of all processes. None: one process has to train.
    """
    shapes_vary: ClassVar[bool] = False
    """Whether batches of one size may have tensors of different shapes."""
    files: ClassVar[tuple[DataFile, ...]] = ()
    """Published files that it can read; ``runner data`` lists and fetches them."""

    evaluation_size: ClassVar[str | None] = None
    """The dotted path in ``data`` of the setting with the size of an evaluation, if there is
    one.
    """
    evaluation_seed: ClassVar[str | None] = None
    """The setting from whose seed it is drawn, if there is one."""
    pictures: ClassVar[tuple[str, ...]] = ()
    """Endings of the files that ``Source.render`` can draw, if there is that method."""

    prepares_text: ClassVar[bool] = False
    """Whether ``prepare_text`` converts texts to a file that the source reads."""

    @classmethod
    def prepare_text(cls, texts: Sequence[Path], tokenizer: str, out: Path) -> str:
        """Converts texts to a file that the source reads, for ``runner data prepare``.

        Args:
            texts: Existing text files, in this order.
            tokenizer: Name of a tokenizer.
            out: The file, in an existing folder.

        Returns:
            A description of the file for a person.
        """
        raise NotImplementedError(
            f"{cls.__name__} has no prepare_text, although it declares prepares_text"
        )

    def absent(self) -> list[DataFile]:
        """Returns the missing files of ``files`` that these settings need."""
        return []

    def largest_batch(self) -> int | None:
        """Returns the largest batch that can be sampled, None if there is no limit."""
        return None

    def indivisible(self, processes: int) -> str | None:
        """Returns why these settings cannot be divided among that many processes; None if they can.

        The text begins with a key of ``data``.
        """
        return None

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of the largest batch of that many samples, without building the
        source.

        Files that are there may be read; without them, those of the published files are returned.
        None if only the source itself shows its shapes: ``runner plan`` then builds it.
        """
        return None

    def resident(self, device: str) -> bool:
        """Returns whether its batches are made on a device of that type (``cpu``, ``cuda``), so
        that none has to be moved.
        """
        return device == "cpu"

    def other_sizes(self, batch_size: int) -> Iterator[Mapping[str, Any]]:
        """Yields settings of ``data`` by dotted path, with which rare events occur within few
        batches.

        ``runner verify`` compares the batches of a source that acts with its learner with these
        settings, too. They should make the source small and quick.

        Args:
            batch_size: Samples of a batch of the training.
        """
        return iter(())

    def reduced(self) -> Mapping[str, Any]:
        """Returns settings of smaller samples, by path, as ``LearnerConfig.reduced`` does."""
        return {}

    def is_synthetic(self) -> bool:
        """Returns whether the data are synthetic, so that results have no meaning for real data."""
        return "synthetic" in self.kind.split("_")

    def contradictions(self, unit: Unit, length: int) -> Iterator[tuple[str, str]]:
        """Yields contradictions between these settings and a training of that length: pairs of a
        key and the problem.
        """
        return iter(())


def _form_of_sampling(setting: Any) -> str:
    return "name" if isinstance(setting, str) else "hybrid"


Sampling = Annotated[
    Annotated[Literal["random", "balanced"], Tag("name")]
    | Annotated[HybridSamplingConfig, Tag("hybrid")],
    Discriminator(_form_of_sampling),
]
"""A name, or the settings of hybrid sampling."""


class LimitConfig(Config):
    """Shares of a dataset; of each part, one batch is left at least."""

    train: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the samples to train on."""
    held_out: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the held-out samples."""


class DatasetConfig(SourceConfig):
    """Settings that every dataset has."""

    omitted: ClassVar[frozenset[str]] = frozenset(
        {"limit", "sampling", "folds", "test"}
    )
    divisible: ClassVar[bool] = True
    """Whether a part of the samples is a dataset, too, so that ``limit``, ``folds`` and ``test``
    can be set.
    """

    units: ClassVar[frozenset[Unit]] = frozenset({"updates", "samples", "epochs"})
    division: ClassVar[Literal["rows", "draws"] | None] = "rows"
    in_memory: ClassVar[bool] = False
    """Whether the data are in memory, that of an accelerator if they fit."""

    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of processes that load batches; with 0, the training's process loads them."""
    prefetch: Annotated[int, Field(ge=1, le=64)] = 4
    """Number of batches that each worker has ready; it needs ``workers``."""
    pin: bool = True
    """Whether batches for a GPU are copied into pinned memory, from which copies do not block."""
    limit: LimitConfig | None = None
    """Shares of the samples that are used, the same for every seed; null uses all of them."""
    sampling: Sampling = "random"
    """How an epoch draws training samples: random (each once), balanced (as many, from every
    class equally often, with replacement), or {kind: hybrid} (shares of uniform, hard and rare
    ones).
    """

    folds: FoldsConfig | None = None
    """Fold of a cross-validation; null holds out what the source holds out."""
    test: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the held-out samples that no evaluation of the training reads: the best checkpoint
    is tested on them once, at the end. null tests only if the source has test data of its own.
    """

    @property
    def depends_on_feedback(self) -> bool:  # type: ignore[override]  # the sampling decides
        """Whether the losses of an update change which samples are drawn next."""
        return isinstance(self.sampling, HybridSamplingConfig)

    def draws_samples(self) -> bool:
        """Returns whether each access to a sample gives another one (augmentation), so that it
        can neither be cached nor held out in a fold. Override it for samples of which only a few
        are random: others are recognized.
        """
        return False

    def resident(self, device: str) -> bool:
        """Returns whether batches are made on a device of that type."""
        # Data that are in memory are moved once, to the device that uses them.
        return device == "cpu" or self.in_memory


class FileDatasetConfig(DatasetConfig):
    """Settings of a dataset that is read from files."""

    root: Annotated[str | None, Anchor()] = None
    """A folder in which its files are looked for first, before RUNNER_DATA and the user's cache."""

    def locate(self, name: str) -> Path | None:
        """Returns the path of a file according to ``find``: an absolute path itself, a name in the
        folders of data.
        """
        return find(name, self.root, self.files)

    def nowhere(self, name: str) -> str:
        """Returns a message about a missing file, with the fix."""
        if Path(name).is_absolute():
            return f"no such file: {name}"
        is_published = any(file.name == name for file in self.files)
        searched = f"no '{name}' in {', '.join(map(str, folders(self.root)))}"
        if is_published:
            return f"{searched}; {FETCH_HINT.format(name=name)}"
        return f"{searched}, nor next to the recipe"

    def wanted(self) -> tuple[DataFile, ...]:
        """Returns the files that these settings need."""
        return self.files

    def absent(self) -> list[DataFile]:
        """Returns the needed files that are missing."""
        return [file for file in self.wanted() if self.locate(file.name) is None]


class PublishedDatasetConfig(FileDatasetConfig):
    """Settings of a dataset that is read from published files, or generated on request."""

    synthetic: bool = False
    """Whether to generate synthetic data instead of reading files. Runs on them are marked, and
    their results cannot be compared with others.
    """

    def is_synthetic(self) -> bool:
        """Returns whether the data are synthetic."""
        return self.synthetic or super().is_synthetic()

    def absent(self) -> list[DataFile]:
        """Returns the missing published files; none if synthetic data were configured."""
        return [] if self.synthetic else super().absent()

    def require(self, name: str) -> Path:
        """Returns the path of a file.

        Raises:
            UsageError: The file is missing. The message names what provides it, or synthetic data.
        """
        path = self.locate(name)
        if path is None:
            hint = (
                "; or train on generated data: data.synthetic=true"
                if self.wanted()
                else ""
            )
            raise UsageError(f"data.file: {self.nowhere(name)}{hint}")
        return path


class CallbackConfig(PluginConfig, ABC):
    """The settings of a callback; the docstring is its card."""


@dataclass(frozen=True)
class Setting:
    """The context with which a stage determines its contract, and whether it has an effect."""

    model: LearnerConfig
    data: SourceConfig
    device: torch.device
    stages: Mapping[str, StageConfig]
    """All stages that the recipe switches on, by kind."""
    unit: Unit
    """Unit of the training's length."""
    processes: int = 1
    """Number of processes that train one model."""


class StageConfig(PluginConfig, ABC):
    """The settings of a stage; the docstring is its card: what it does, when it helps,
    when it hurts.

    Queries have no side effects; ``contract`` and ``inactive`` depend only on the
    fields and the context.
    """

    sections: ClassVar[frozenset[str]] = frozenset({"optimization"})
    """Sections of a recipe that may switch the stage on, if it comes from a file: the training, and
    ``inference`` for its model; for an installed stage, entry points declare them.
    """
    phase: ClassVar[int]
    """1 removes repeated work, 2 precision and data movement, 3 tunes to the machine; stages attach
    in this order.
    """
    claims: ClassVar[frozenset[str]] = frozenset()
    """Slots that the stage replaces; two active stages may not claim the same one."""
    wraps: ClassVar[frozenset[str]] = frozenset()
    """Slots that the stage wraps; any number of stages may wrap a slot."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Kinds of the stages that must be on with this one."""
    works_through: ClassVar[frozenset[str] | None] = None
    """Slots; the stage is without effect if the learner calls none of them. By default,
    all that it changes.
    """
    traces: ClassVar[bool] = False
    """Whether it traces what its slots call, so that nothing in there may be looked at or change
    later.
    """
    usual: ClassVar[bool] = False
    """Whether a training script usually has it. ``runner ablate`` measures these together."""
    captures: ClassVar[bool] = False
    """Whether it captures an update and launches it as a whole, so that it cannot end half-way."""
    cuts_batches: ClassVar[bool] = False
    """Whether an update computes parts of its batch one after the other."""
    prepares: ClassVar[bool] = False
    """Whether it changes what is built (``Stage.prepare``)."""
    one_process: ClassVar[str] = ""
    """Why several processes cannot train with it; empty if they can."""
    unplanned: ClassVar[str] = ""
    """Why ``runner plan`` leaves it out, because it needs real tensors or a real device; empty if
    it needs none.
    """

    @abstractmethod
    def contract(self, setting: Setting) -> Contract:
        """Returns the promise of the stage about results here."""

    def inactive(self, setting: Setting) -> str | None:
        """Returns why the stage has no effect here; None if it has one.

        Raises:
            UsageError: The stage must not run here.
        """
        return None

    def tunes(self, setting: Setting) -> bool:
        """Returns whether the stage selects something by measuring.

        It records its choices with ``choices`` of the pipeline or plan. Each timed process of an
        ablation searches again, so that its interval includes the luck of the choices.
        """
        return False

    def planned_batch_size(self, setting: Setting, batch_size: int) -> int:
        """Returns a smaller batch whose update has the same peak, apart from the batch itself.

        ``runner plan`` is quicker with it where parts of a batch are computed one after another.
        """
        return batch_size

    @classmethod
    def memory_choices(cls, batch_size: int) -> Sequence[MemoryChoice]:  # noqa: ARG003 (some depend on it)
        """Returns settings with which the stage saves memory, the fastest first; none if it saves
        none.
        """
        return ()
