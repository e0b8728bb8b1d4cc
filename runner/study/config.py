"""The settings of a study's file."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from runner.plugin.config import Config
from runner.recipe.dumping import dump_inline, is_same
from runner.recipe.scalars import Scalar

VERIFY: Final = "verify"
STAGES: Final = "optimization"
OFF = "off"
Real: TypeAlias = float
Whole: TypeAlias = int
Positive = Annotated[Real, Field(gt=0)]
Count = Annotated[Whole, Field(ge=1)]


class ParameterConfig(Config):
    """The values that one setting of the recipe may take: a range of numbers, or a choice."""

    float: Annotated[list[Real], Field(min_length=2, max_length=2)] | None = None
    """The least and the greatest value of a number."""
    int: Annotated[list[Whole], Field(min_length=2, max_length=2)] | None = None
    """The smallest and the largest value of an integer."""
    choice: Annotated[list[Any], Field(min_length=2)] | None = None
    """Values to choose from: for a stage ``off``, ``on`` or its settings."""
    log: bool = False
    """Whether a range is searched by its logarithm."""
    step: Positive | None = None
    """The distance between two values of a range."""

    @model_validator(mode="after")
    def _one_kind(self) -> ParameterConfig:
        kinds = [name for name in ("float", "int", "choice") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"should have one of float, int and choice, got {' and '.join(kinds) or 'none'}")
        if self.choice is None:
            self._validate_range()
        else:
            self._validate_choice(self.choice)
        return self

    def _validate_choice(self, values: list[Any]) -> None:
        if self.log or self.step is not None:
            raise ValueError("log and step belong to a range, and this is a choice")
        for left, right in itertools.combinations(values, 2):
            # To Optuna 1, 1.0 and true are equal, too.
            if is_same(left, right):
                raise ValueError(f"{dump_inline(left)} and {dump_inline(right)} are the same choice: leave one out")
            if is_same(label(left), label(right)):
                raise ValueError(
                    f"{dump_inline(left)} and {dump_inline(right)} are stored as the same text, "
                    f"{label(left)}: leave one out"
                )

    def _validate_range(self) -> None:
        low, high = self.levels
        if not low < high:
            raise ValueError(f"the range starts at {low:g} and ends at {high:g}: it should start below its end")
        if self.log and low <= 0:
            raise ValueError(f"a logarithmic range should start above 0, not at {low:g}")
        if self.log and self.step is not None:
            raise ValueError("a range has either log or step")
        if self.int is not None and self.step is not None and self.step != round(self.step):
            raise ValueError(f"the step of an integer should be an integer, not {self.step:g}")
        if self.step is not None:
            # Decimal, because 0.3 is not a multiple of 0.1 in binary.
            width = Decimal(str(high)) - Decimal(str(low))
            if width % Decimal(str(self.step)):
                raise ValueError(f"steps of {self.step:g} from {low:g} do not reach {high:g}: end the range at a step")

    @property
    def levels(self) -> list[Any]:
        """Returns values that represent all others in a validation: every choice, or both ends."""
        return list(self.choice or self.float or self.int or ())

    @property
    def spacing(self) -> Real | None:
        """The distance between two values of a range; None between real numbers."""
        if self.step:
            return self.step
        return None if self.int is None else 1

    @property
    def count(self) -> Real:
        """Returns the number of values; infinite in a range of real numbers."""
        if self.choice is not None:
            return len(self.choice)
        if self.spacing is None:
            return math.inf
        low, high = self.levels
        steps = round((high - low) / self.spacing)
        return 1 + int(steps)

    def has(self, value: Any) -> bool:
        """Returns whether a number is in the range."""
        low, high = self.levels
        if isinstance(value, bool) or not isinstance(value, Real | Whole) or not low <= value <= high:
            return False
        steps = 0 if self.spacing is None else (value - low) / self.spacing
        return math.isclose(steps, round(steps), abs_tol=1e-9)

    def __str__(self) -> str:
        if self.choice is not None:
            return f"one of {', '.join(str(label(choice)) for choice in self.choice)}"
        low, high = self.levels
        text = f"{low:g} to {high:g}"
        if self.log:
            return f"{text}, logarithmic"
        return f"{text}, in steps of {self.step:g}" if self.step else text


class ObjectiveConfig(Config):
    """The direction of a metric, and which of its values count."""

    direction: Literal["maximize", "minimize"]
    """Whether more is better."""
    value: Literal["last", "best", "mean", "median"] | None = None
    """Which of the values that a training logs counts; the last by default."""
    reach: Real | None = None
    """If given, the objective is how long it takes until the metric is as good as this, and less is better."""
    reach_in: Literal["seconds", "progress"] | None = None
    """Unit of ``reach``: seconds of training (the default), or progress in the recipe's unit."""

    @model_validator(mode="after")
    def _all_count(self) -> ObjectiveConfig:
        if self.reach is not None and self.value is not None:
            raise ValueError("value has no effect with reach, which measures a time; remove it")
        if self.reach_in is not None and self.reach is None:
            raise ValueError("reach_in has no effect without reach; remove it")
        return self


class BoundConfig(Config):
    """Bounds of a metric's last value; a configuration counts if they are met."""

    min: Real | None = None
    """The least that it may be."""
    max: Real | None = None
    """The most that it may be."""

    @model_validator(mode="after")
    def _some(self) -> BoundConfig:
        if self.min is None and self.max is None:
            raise ValueError("should have min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}: no value is within these bounds")
        return self


class SamplerConfig(Config):
    """Selection of the next configuration."""

    kind: Literal["tpe", "random", "nsga2"] = "tpe"
    """Tree-structured Parzen estimator, uniformly at random, or the genetic algorithm NSGA-II."""
    startup: Count | None = None
    """Random trials before ``tpe`` uses results, or the size of a generation of
    ``nsga2``; 10 by default.
    """

    @model_validator(mode="after")
    def _all_count(self) -> SamplerConfig:
        if self.kind == "random" and self.startup is not None:
            raise ValueError("startup has no effect with random; remove it")
        return self


class PrunerConfig(Config):
    """Early end of trials that will not be among the best; with one objective only."""

    kind: Literal["auto", "off", "median", "hyperband", "wilcoxon"] = "auto"
    """Compares evaluations (``median``, ``hyperband``) or seeds (``wilcoxon``); ``auto`` is ``wilcoxon`` with several
    seeds, else ``median``."""
    startup: Annotated[Whole, Field(ge=0)] | None = None
    """Number of trials that ``median`` never prunes at the start, 5 by default, or of seeds for
    ``wilcoxon``, 2 by default.
    """

    @model_validator(mode="after")
    def _all_count(self) -> PrunerConfig:
        if self.startup is not None and self.kind in ("off", "hyperband"):
            raise ValueError(f"startup has no effect with {self.kind}; remove it")
        return self


class BudgetConfig(Config):
    """Limits of the study, for all its sessions and workers together."""

    trials: Count = 20
    """Number of trials, whatever becomes of them."""
    seconds: Positive | None = None
    """Time during which trials were running; afterwards no trial starts."""
    device_seconds: Positive | None = None
    """The sum of the times of all trials; afterwards no trial starts."""
    parallel: Count = 1
    """Trials at a time that ``runner study run`` trains."""


class LimitsConfig(Config):
    """Limits of one training."""

    seconds: Positive | None = None
    """Its length."""
    memory_gib: Positive | None = None
    """Memory of its processes on the host; by default half of the memory that is
    free when it starts.
    """
    silence: Positive = 600.0
    """Seconds without a sign of progress after which it counts as hung; longer than any compilation."""


_Objective: TypeAlias = Literal["maximize", "minimize"] | ObjectiveConfig


def _spelled_out(value: object) -> object:
    return {"direction": value} if isinstance(value, str) else value


class StudyConfig(Config):
    """A study: a search over stages and hyperparameters of a recipe."""

    kind: Literal["study"]
    """Marks this file as a study."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the study in its storage, its folder and its run in MLflow."""
    recipe: Annotated[str, Field(min_length=1, examples=["recipes/marl_phase2.yaml"])]
    """A recipe, as seen from this file's folder, or the bare name of one that ships."""
    set: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Assignments ``a.b.c=VALUE`` for all trials."""
    space: dict[str, ParameterConfig] = Field(
        min_length=1, examples=[{"optimizer.lr": {"float": [1e-4, 1e-2], "log": True}}]
    )
    """The search space, by dotted path of the recipe; settings of a stage exist
    where the stage is on.
    """
    objectives: dict[
        str,
        Annotated[ObjectiveConfig, BeforeValidator(_spelled_out, json_schema_input_type=_Objective)],
    ] = Field(min_length=1, examples=[{"eval/loss": "minimize"}])
    """Metrics to maximize or minimize, by name."""
    constraints: dict[str, BoundConfig | Literal["pass", "no_fail"]] = Field(default_factory=dict)
    """Bounds on metrics; and ``verify``: whether the gate has to pass the stages, or must not fail them."""
    seeds: Count = 1
    """Trainings of a trial, with the recipe's seed and those after it; what counts is their mean."""
    seed: Annotated[Whole, Field(ge=0, lt=2**32)] = 0
    """Suggestions are a function of the seed and of earlier results."""
    sampler: SamplerConfig = SamplerConfig()
    """How the next configuration is chosen."""
    pruner: PrunerConfig = PrunerConfig()
    """When a trial is ended early."""
    retries: Annotated[Whole, Field(ge=0)] = 1
    """Number of times that a training continues from its checkpoint after a crash
    that may not be repeated.
    """
    budget: BudgetConfig = BudgetConfig()
    """Limits of the study."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of one training."""

    @model_validator(mode="after")
    def _consistent(self) -> StudyConfig:
        for name, constraint in self.constraints.items():
            if (name == VERIFY) != isinstance(constraint, str):
                expected = "'pass' or 'no_fail'" if name == VERIFY else "a mapping with min or max"
                raise ValueError(f"constraints.{name} should be {expected}")
        if len(self.objectives) > 1 and self.pruner.kind not in ("auto", "off"):
            raise ValueError(f"pruner.kind: {self.pruner.kind} compares by one objective, and there are several")
        if self.pruner.kind == "wilcoxon" and self.seeds == 1:
            raise ValueError("pruner.kind: wilcoxon compares seeds, and seeds is 1")
        if self.pruner.kind in ("median", "hyperband"):
            if self.seeds > 1:
                raise ValueError(f"pruner.kind: {self.pruner.kind} compares single trainings; with seeds use wilcoxon")
            if next(iter(self.objectives.values())).reach is not None:
                raise ValueError(f"pruner.kind: {self.pruner.kind} compares values of a metric, not the time to one")
        if self.budget.parallel > 1 and self.timed:
            raise ValueError(
                f"budget.parallel is {self.budget.parallel}, but '{self.timed[0]}' is a speed: parallel trials "
                "would slow each other; use parallel: 1"
            )
        return self

    @property
    def times(self) -> list[str]:
        """Returns the objectives that are measured in seconds."""
        return [
            name
            for name, objective in self.objectives.items()
            if objective.reach is not None and objective.reach_in != "progress"
        ]

    @property
    def timed(self) -> list[str]:
        """The metrics that depend on how fast the machine is at the moment."""
        speeds = [name for name in (*self.objectives, *self.constraints) if name.startswith("perf/")]
        return [*self.times, *speeds]

    @property
    def pruner_kind(self) -> str:
        """Returns the pruner that ``auto`` selects here."""
        if self.pruner.kind != "auto":
            return self.pruner.kind
        if len(self.objectives) > 1 or next(iter(self.objectives.values())).reach is not None:
            return "off"
        return "wilcoxon" if self.seeds > 1 else "median"


def label(value: Any) -> Scalar:
    """A choice as Optuna keeps it: a scalar as it is, anything else spelled on one line."""
    return value if isinstance(value, Scalar) else dump_inline(value)
