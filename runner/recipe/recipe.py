"""A validated recipe."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.api import LearnerConfig, SourceConfig, Stage
from runner.recipe.errors import Place
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
    train: TrainConfig
    tracking: TrackingConfig
    stages: Mapping[str, Stage]
    """The stages that are on, in the order in which they attach."""
    off: tuple[str, ...]
    """The stages that the recipe names and switches off."""
    origins: Mapping[str, Place]
    """Where every value came from, by dotted path."""

    def values(self) -> dict[str, Any]:
        """The recipe with nothing left to defaults, as plain values that JSON can hold.

        A stage is ``off``, ``on``, or its settings. Values of type ``SecretStr`` are masked.
        """
        train = self.train.model_dump(mode="json", exclude=set(TrainConfig.unused(self.data.simulates)))
        stages = {kind: stage.config.model_dump(mode="json") or "on" for kind, stage in self.stages.items()}
        return {
            "name": self.name,
            "seed": self.seed,
            "device": self.device,
            "model": {"kind": self.model.kind, **self.model.model_dump(mode="json")},
            "data": {"kind": self.data.kind, **self.data.model_dump(mode="json")},
            "train": train,
            "optimization": stages | dict.fromkeys(self.off, "off"),
            "tracking": self.tracking.model_dump(mode="json"),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the values; a stage that is off and one that is not named are the same."""
        values = self.values()
        values["optimization"] = {kind: stage for kind, stage in values["optimization"].items() if stage != "off"}
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted paths; a list or an empty mapping is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
