"""The validated recipe, and the sections that do not depend on plugins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SecretBytes,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import to_jsonable_python

from runner.plugin.config import Config
from runner.plugin.plugin_config import PluginConfig
from runner.plugin.progress import UNITS, Unit
from runner.recipe.keeping import KeepConfig
from runner.recipe.safeguards import (
    MemoryBudgetConfig,
    NonfiniteConfig,
    SentinelConfig,
    budget_of,
    nonfinite_of,
)
from runner.recipe.stopping import StopConfig
from runner.recipe.yaml_nodes import DEFAULT, MAPPING, Place
from runner.system.secrets import MASK, redact_values, register
from runner.system.tensor_trees import leaves

if TYPE_CHECKING:
    from runner.plugin.configs import (
        CallbackConfig,
        LearnerConfig,
        SourceConfig,
        StageConfig,
    )
    from runner.plugin.contract import Objective
    from runner.plugin.lr_scheduler import ScheduleConfig
    from runner.plugin.optimizer import OptimizerSettings
    from runner.plugin.tuning import Setup

Count = Annotated[int, Field(ge=1)]


class TrainConfig(Config):
    """Length of the training and intervals of its reports.

    A training is counted in exactly one unit; every interval here is in that unit.
    """

    updates: Count | None = None
    """Updates to train for."""
    epochs: Count | None = None
    """Epochs to train for; needs data that have epochs."""
    samples: Count | None = None
    """Samples to train on, repeated ones included."""
    tokens: Count | None = None
    """Tokens to train on, repeated ones included; needs data that are counted in tokens."""
    env_steps: Count | None = None
    """Environment steps to train for; needs data that come from a simulator."""
    batch_size: Count = 128
    """Samples of one update; a stage may cut them into micro-batches."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of the average of the parameters that is evaluated instead of them; null evaluates them
    as they are.
    """
    evaluate_every: Count | None = None
    """Between two evaluations; null evaluates at the end only."""
    checkpoint_every: Count | None = None
    """Between two checkpoints; null saves at the end, and whenever an evaluation is the best so
    far.
    """
    keep: KeepConfig | None = None
    """Checkpoints that stay; null keeps the two newest and the one with the best objective."""
    preemptible: bool = False
    """Whether SIGTERM and SIGINT end the run with exit code 75, so that a scheduler resumes it."""
    stall_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds without an update or a finished evaluation after which the run fails; null only
    reports it.
    """
    memory_budget: Annotated[
        MemoryBudgetConfig | None,
        BeforeValidator(
            budget_of, json_schema_input_type=str | MemoryBudgetConfig | None
        ),
    ] = None
    """Memory that an update may take: a size, or a section with ``size`` and ``fit``; null sets no
    limit.
    """
    overfit_batches: Count | None = None
    """Number of batches that are repeated for the whole training, whose loss should become almost
    zero; null trains on all data.
    """
    smoke: bool = False
    """Whether this is a smoke test (runner run --smoke), whose model cannot be registered."""
    on_nonfinite: Annotated[
        NonfiniteConfig,
        BeforeValidator(nonfinite_of, json_schema_input_type=str | NonfiniteConfig),
    ] = NonfiniteConfig()
    """Reaction to a loss or gradients that are not finite: stop, skip, or a section with ``action``
    and ``at_most``.
    """
    stop: StopConfig | None = None
    """Condition that ends the training before its length; null trains to the end."""
    sentinel: SentinelConfig | None = None
    """Repeats some updates with the baseline meanwhile and compares; null repeats none."""
    log_every: Count | None = None
    """Between two points of a training metric; null is 1,000 updates or environment steps, or 1 %
    of the training.
    """

    @property
    def length(self) -> tuple[Unit, int]:
        """The unit that the training is counted in, and how many of it."""
        lengths = ((unit, getattr(self, unit)) for unit in UNITS)
        return next((unit, count) for unit, count in lengths if count is not None)

    @property
    def log_interval(self) -> int:
        """Returns ``log_every``, or its default for this unit and length."""
        if self.log_every:
            return self.log_every
        unit, length = self.length
        return 1000 if unit in ("updates", "env_steps") else max(1, length // 100)


MLFLOW = "mlflow"
"""The sink that is no plugin."""


class TrackingConfig(Config):
    """The experiment of the run in MLflow, and the metrics of the system."""

    experiment: Annotated[str, Field(min_length=1)] = "default"
    """The MLflow experiment that the run belongs to."""
    system_metrics: bool = True
    """Whether processor, memory and GPU use are sampled while training."""
    render_every: Count | None = None
    """Evaluations from one picture of what they measure to the next; null draws none."""
    sinks: list[str] = Field(default_factory=list)
    """Where metrics go in addition to MLflow: csv, tensorboard, wandb, or the kind of a plugin.

    mlflow may be in the list, and is there without it.
    """
    second_copy: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+]*://.+")] | None = None
    """URL of a folder for second copies of runs, as fsspec names it (s3://bucket/runs,
    file:///mnt/runs): checkpoints and what a resumed run needs; null makes none.
    """

    @property
    def plugin_sinks(self) -> list[str]:
        """Returns the sinks without MLflow, which every run has."""
        return [sink for sink in self.sinks if sink != MLFLOW]


class SystemConfig(Config):
    """Use of the machine by a computation."""

    threads: Literal["auto"] | Count = "auto"
    """Threads of one computation; auto takes as many as torch does, at most the cores that are
    allowed.
    """
    wait: Literal["auto", "active", "passive"] = "auto"
    """How threads wait for each other: active spins, passive sleeps, auto sleeps under load."""
    deterministic: bool = False
    """Use only GPU kernels that have the same result every time; an operator without one is an
    error.
    """

    @field_validator("threads", mode="wrap")
    @classmethod
    def _auto_or_count(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Reports one problem instead of one for each alternative."""
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(
                f"should be auto or an integer of at least 1, got {value!r}"
            ) from None


HostName = Annotated[str, Field(pattern=r"^(\*|[A-Za-z0-9._:-]+)$", max_length=253)]
"""A name or an address, without a port."""


class ServeConfig(Config):
    """Settings of a model served over HTTP."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address to listen on. Requests need no password, so use other addresses than 127.0.0.1
    only in trusted networks.
    """
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    """The port; 0 takes a free one."""
    hosts: list[HostName] = Field(default_factory=list)
    """Further names under which clients reach the server, besides ``host`` and names without a dot;
    "*" allows all.
    """
    max_batch: Count = 32
    """Requests that are answered together, at most."""
    parallel: Count = 1
    """Batches that are computed at the same time, each by a copy of the model in a thread of its
    own, and on a GPU in a stream of its own. The threads of torch are divided among them;
    parameters are in memory once. A batch takes all requests that wait, up to ``max_batch``, which
    should leave some for the other copies.
    """
    bit_exact: bool = False
    """Whether every request is computed alone, so that its answer is the same to the bit whatever
    else is requested.
    """
    wait_ms: Annotated[float, Field(ge=0)] = 20.0
    """How long a request waits for others to be answered with, as long as there are clients that do
    not wait, too.
    """
    queue: Count = 256
    """Requests that may wait; to more the answer is 503."""
    deadline_s: Annotated[float, Field(gt=0)] = 30.0
    """After which the answer is 504."""
    max_body_bytes: Count = 2**21
    """Of a request; to more the answer is 413. Larger ones than 64 KiB are received 16 at a time.
    """
    client_s: Annotated[float, Field(gt=0)] = 10.0
    """How long a client may take to send a request, or to read an answer."""
    connections: Count = 1024
    """Connections; idle ones end for new ones, and then the answer is 503. /health and /ready have
    64 more.
    """
    drain_s: Count = 30
    """How long requests are still answered after SIGTERM."""


class Head(Config):
    """The keys of a recipe that no plugin has to validate."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the run in MLflow and its folder: letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Every random number of the run follows from it."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """Where to train: auto (the first GPU, or else the CPU), cpu, cuda, or cuda:N."""
    tracking: TrackingConfig = TrackingConfig()
    system: SystemConfig = SystemConfig()
    serve: ServeConfig = ServeConfig()


@dataclass(frozen=True)
class Recipe:
    """The values of a run, with the place where each was written.

    Attributes:
        path: The requested file.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        optimizer: Settings of optimizers, by role.
        stages: Stages of the training that are on, in the order in which they attach.
        off: Stages that the recipe switches off.
        inference: Stages of the trained model that are on, in the order in which they attach.
        callbacks: Callbacks that are on, in the order in which they are called.
        origins: The place of every value, by dotted path.
        tuning: Choices of the lock from which the recipe was loaded.
    """

    path: Path
    name: str
    seed: int
    device: str
    model: LearnerConfig
    data: SourceConfig
    optimizer: Mapping[str, OptimizerSettings]
    lr_scheduler: ScheduleConfig
    train: TrainConfig
    tracking: TrackingConfig
    system: SystemConfig
    serve: ServeConfig
    stages: Mapping[str, StageConfig]
    off: tuple[str, ...]
    inference: Mapping[str, StageConfig]
    callbacks: Mapping[str, CallbackConfig]
    origins: Mapping[str, Place]
    tuning: Setup | None = None

    def plugins(self) -> Iterator[PluginConfig]:
        """Yields the settings of every plugin that is on, in the order of the sections."""
        # All fields, so that a new section cannot be forgotten.
        for field in fields(self):
            value = getattr(self, field.name)
            configs = value.values() if isinstance(value, Mapping) else [value]
            yield from (item for item in configs if isinstance(item, PluginConfig))

    def values(self, *, masked: bool = True) -> dict[str, Any]:
        """The recipe with nothing left to defaults, as plain values that JSON can hold.

        A stage is ``off``, ``on``, or its settings. Unmasked, the values may go to a child process
        and nowhere else.
        """

        def dumped(config: Config) -> dict[str, Any]:
            return plain_values(config, masked=masked)

        optimizers = {
            role: optimizer.values() for role, optimizer in self.optimizer.items()
        }
        stages = {kind: dumped(stage) or "on" for kind, stage in self.stages.items()}
        inference_stages = {
            kind: dumped(stage) or "on" for kind, stage in self.inference.items()
        }
        model = {"kind": self.model.kind}
        if self.model.init_from is not None:
            model["init_from"] = self.model.init_from
        values = {
            "name": self.name,
            "seed": self.seed,
            "device": self.device,
            "model": {**model, **dumped(self.model)},
            "data": {"kind": self.data.kind, **dumped(self.data)},
            "optimizer": optimizers
            if len(optimizers) > 1
            else next(iter(optimizers.values()), {}),
            "lr_scheduler": {
                "kind": self.lr_scheduler.kind,
                **dumped(self.lr_scheduler),
            },
            "train": self.train.model_dump(mode="json", exclude=self._unset()),
            "optimization": stages | dict.fromkeys(self.off, "off"),
            "tracking": self.tracking.model_dump(mode="json"),
        }
        if inference_stages:
            values["inference"] = inference_stages
        if self.callbacks:
            values["callbacks"] = {
                kind: dumped(callback) or "on"
                for kind, callback in self.callbacks.items()
            }
        # Sections that are left out if nothing in them is set: their defaults then change no
        # digest.
        system = self.system.model_dump(mode="json", exclude_defaults=True)
        if system:
            values["system"] = system
        serve = self.serve.model_dump(mode="json", exclude_defaults=True)
        if serve:
            values["serve"] = serve
        return dict(redact_values(values)) if masked else values

    def _unset(self) -> set[str]:
        """Settings of the training that are left out of its values."""
        unset = set[str](UNITS) - {self.length[0]}
        # Without them, digests are those of recipes that never had them.
        optional = ("stall_s", "memory_budget", "sentinel", "overfit_batches", "smoke")
        unset |= {name for name in optional if not getattr(self.train, name)}
        is_stopped = self.train.on_nonfinite.action == "stop"
        return unset | ({"on_nonfinite"} if is_stopped else set())

    def printable(self) -> dict[str, Any]:
        """The values as commands print them for other commands to read.

        A masked secret that is a default is left out, because a plugin finds it again (in the
        environment).
        """
        # Imported here to keep the chain of imports below this module short.
        from runner.recipe.environment import escape_references

        values = self.values()
        for path, value in flatten(self.values()):
            if MASK in str(value) and self.origins.get(path) == DEFAULT:
                *sections, key = path.split(".")
                reduce(getitem, sections, values).pop(key)
        return dict(escape_references(values))

    @property
    def overrides(self) -> dict[str, Any]:
        """Returns the values that were assigned, for example with ``--set``, and are in no file, by
        dotted path; a stage that was switched on is ``on``.
        """
        assigned_paths = [
            path
            for path, origin in self.origins.items()
            if isinstance(origin.source, str)
            and origin.source not in (DEFAULT.source, MAPPING)
        ]
        flat = dict(flatten(self.values()))
        overrides = {}
        for path in assigned_paths:
            # The settings of a stage show that it was switched on.
            has_settings = any(
                assigned.startswith(f"{path}.") for assigned in assigned_paths
            )
            is_switch = path.startswith(("optimization.", "inference.", "callbacks."))
            if path in flat or (is_switch and not has_settings):
                overrides[path] = flat.get(path, "on")
        return overrides

    @property
    def length(self) -> tuple[Unit, int]:
        """Returns the unit in which the training is counted, and its length."""
        return self.train.length

    @property
    def declared_objective(self) -> Objective | None:
        """The objective that the source declares, or else the learner; every evaluation must
        measure it.
        """
        return self.data.objective or self.model.objective

    @property
    def objective(self) -> Objective | None:
        """Returns the declared objective, or the default one of this learner and source."""
        return self.declared_objective or self.model.default_objective(self.data)

    @property
    def headline(self) -> tuple[str, ...]:
        """The evaluation metrics that a person looks at first."""
        return self.data.headline or self.model.headline

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of everything that determines the training; a stage that is off
        equals one that is not named.
        """
        values = self.values()
        # These sections count only when the model is trained.
        for section in ("inference", "serve"):
            values.pop(section, None)
        # Neither of them changes a digit.
        values.get("system", {}).pop("wait", None)
        values["train"].pop("sentinel", None)
        if not values["train"].get("stop"):
            values["train"].pop("stop", None)
        if not values.get("system"):
            values.pop("system", None)
        stages = values["optimization"]
        values["optimization"] = {
            kind: stage for kind, stage in stages.items() if stage != "off"
        }
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def plain_values(config: Config, *, masked: bool) -> dict[str, Any]:
    """Returns the values of a section in the only form in which they are stored, sent and compared.

    It consists of mappings, lists, text, numbers, booleans and null. Unmasked secrets are
    registered.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            # The order of a set differs from process to process.
            return sorted(value, key=str)
        if masked or not isinstance(value, SecretStr | SecretBytes):
            return to_jsonable_python(value)
        secret = value.get_secret_value()
        text = secret if isinstance(secret, str) else secret.decode(errors="replace")
        register(text)
        return text

    # Numbers that are not finite survive Python's JSON, and would be null in that of pydantic.
    return dict(json.loads(json.dumps(config.model_dump(), default=plain)))


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings with their dotted paths.

    A list or an empty mapping is a leaf.
    """
    if not values:
        return iter(())

    def children(value: Any) -> Mapping[Any, Any] | None:
        return value if isinstance(value, Mapping) and value else None

    return leaves(values, prefix, children)
