"""A validated recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, SecretBytes, SecretStr

from runner.system.secrets import redact_values, register

if TYPE_CHECKING:
    from runner.plugin.config import Config
    from runner.plugin.contract import Objective
    from runner.plugin.learner import LearnerConfig
    from runner.plugin.lr_scheduler import LrSchedulerConfig
    from runner.plugin.optimizer import OptimizerSettings
    from runner.plugin.progress import Unit
    from runner.plugin.source import SourceConfig
    from runner.plugin.stage import StageConfig
    from runner.recipe.document import Place
    from runner.recipe.sections import TrackingConfig, TrainConfig


@dataclass(frozen=True)
class Recipe:
    """Everything that one run is made from, with the place where each value was written."""

    path: Path
    """The file that was asked for."""
    name: str
    seed: int
    device: str
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    model: LearnerConfig
    data: SourceConfig
    optimizer: Mapping[str, OptimizerSettings]
    """By role."""
    lr_scheduler: LrSchedulerConfig
    train: TrainConfig
    tracking: TrackingConfig
    stages: Mapping[str, StageConfig]
    """The stages that are on, in the order in which they attach."""
    off: tuple[str, ...]
    """The stages that the recipe names and switches off."""
    origins: Mapping[str, Place]
    """Where every value came from, by dotted path."""

    def values(self, *, masked: bool = True) -> dict[str, Any]:
        """The recipe with nothing left to defaults, as plain values that JSON can hold.

        A stage is ``off``, ``on``, or its settings. Unmasked, the values may go to a child process and nowhere else.
        """

        def dumped(config: Config) -> dict[str, Any]:
            plain = config.model_dump(mode="json")
            return plain if masked else dict(_revealed(config, plain))

        by_role = {role: optimizer.values() for role, optimizer in self.optimizer.items()}
        stages = {kind: dumped(stage) or "on" for kind, stage in self.stages.items()}
        values = {
            "name": self.name,
            "seed": self.seed,
            "device": self.device,
            "model": {"kind": self.model.kind, **dumped(self.model)},
            "data": {"kind": self.data.kind, **dumped(self.data)},
            "optimizer": by_role if len(by_role) > 1 else next(iter(by_role.values()), {}),
            "lr_scheduler": self.lr_scheduler.model_dump(mode="json"),
            "train": self.train.values(),
            "optimization": stages | dict.fromkeys(self.off, "off"),
            "tracking": self.tracking.model_dump(mode="json"),
        }
        return dict(redact_values(values)) if masked else values

    @property
    def length(self) -> tuple[Unit, int]:
        """What the training is counted in, and how many of it."""
        return self.train.length

    @property
    def objective(self) -> Objective | None:
        """By what its model is judged: the source's word, or else the learner's."""
        return self.data.objective or self.model.objective

    @property
    def headline(self) -> tuple[str, ...]:
        """The evaluation metrics that a person looks at first."""
        return self.data.headline or self.model.headline

    @property
    def digest(self) -> str:
        """SHA-256 of the values; a stage that is off and one that is not named are the same."""
        values = self.values()
        values["optimization"] = {kind: stage for kind, stage in values["optimization"].items() if stage != "off"}
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _revealed(value: Any, dumped: Any) -> Any:
    """What was dumped of a value, with the secrets in it, which are known as such from now on."""
    if isinstance(value, SecretStr | SecretBytes):
        secret = value.get_secret_value()
        text = secret if isinstance(secret, str) else secret.decode(errors="replace")
        register(text)
        return text
    fields = value.__dict__ if isinstance(value, BaseModel) else value  # so read, they do not count as read
    if isinstance(fields, Mapping) and isinstance(dumped, dict):
        named = {str(name): each for name, each in fields.items()}
        return {name: _revealed(named.get(name), each) for name, each in dumped.items()}
    if isinstance(fields, list | tuple) and isinstance(dumped, list):
        return [_revealed(*pair) for pair in zip(fields, dumped, strict=True)]
    return dumped


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted paths; a list or an empty mapping is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
