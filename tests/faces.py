"""Plugins that exist for the tests of recipes alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator

from runner.api import Config, Contract, Exact, LearnerConfig, Setting, SourceConfig, StageConfig, Unit, UsageError
from runner.plugin.lr_scheduler import SCHEDULES
from runner.plugin.registry import Provider, Section

Positive = Annotated[float, Field(gt=0)]


class Uniform(Config):
    kind: Literal["uniform"] = "uniform"
    capacity: int = 100


class Prioritized(Config):
    kind: Literal["prioritized"] = "prioritized"
    capacity: int = 100
    alpha: float = 0.6
    beta: tuple[float, float] = (0.4, 1.0)


class Net(LearnerConfig):
    """A net."""

    kind: ClassVar[str] = "net"
    implementation = "Missing"
    learns_from: ClassVar[str] = "numbers"
    slots: ClassVar[frozenset[str]] = frozenset({"loss"})
    moved: ClassVar[Mapping[str, str]] = {"model.width": "model.hidden", "train.speed": "model.lr"}

    hidden: Annotated[list[int], Field(min_length=1)] = Field([8])
    """Widths."""
    lr: Positive = 1e-3
    order: Literal["forward", "backward"] = "forward"
    password: SecretStr | None = None

    @field_validator("hidden")
    @classmethod
    def narrow(cls, value: list[int]) -> list[int]:
        if sum(value) > 1000:
            raise ValueError("wider than 1000 in all")
        return value

    def lacks(self, slot: str) -> str | None:
        return f"backwards there is no '{slot}'" if (self.order, slot) == ("backward", "loss") else super().lacks(slot)


class Pair(Net):
    """Two nets against each other."""

    kind: ClassVar[str] = "pair"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "generator": {"kind": "adam", "lr": 2e-4, "betas": (0.5, 0.999)},
        "discriminator": {"kind": "sgd", "lr": 0.1, "max_grad_norm": 1.0},
    }


class Sim(SourceConfig):
    """A simulator."""

    kind: ClassVar[str] = "sim"
    implementation = "Missing"
    provides: ClassVar[str] = "numbers"
    units: ClassVar[frozenset[Unit]] = frozenset({"updates", "samples", "env_steps"})

    envs: int
    replay: Annotated[Uniform | Prioritized, Field(discriminator="kind")] = Uniform()
    warmup: int = 0

    def largest_batch(self) -> int:
        return 512

    def contradictions(self, unit: Unit, length: int) -> Iterator[tuple[str, str]]:
        if self.warmup >= length:
            yield "warmup", f"{self.warmup} leaves nothing of {length} {unit}"


class Table(SourceConfig):
    """A dataset."""

    kind: ClassVar[str] = "table"
    implementation = "Missing"
    provides: ClassVar[str] = "numbers"
    units: ClassVar[frozenset[Unit]] = frozenset({"updates", "samples", "epochs"})
    rows: int = 10


class Words(Table):
    """A dataset of words."""

    kind: ClassVar[str] = "words"
    provides: ClassVar[str] = "words"


class _Silent(StageConfig):
    phase: ClassVar[int] = 1

    def contract(self, setting: Setting) -> Contract:
        return Exact()

    implementation = "Missing"


class Cache(_Silent):
    """Remembers."""

    kind: ClassVar[str] = "cache"
    phase: ClassVar[int] = 2
    claims: ClassVar[frozenset[str]] = frozenset({"loss"})

    size: Annotated[int, Field(ge=1)] = 3
    """Entries."""


class Merge(_Silent):
    """Merges."""

    kind: ClassVar[str] = "merge"
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})


class Stack(_Silent):
    """Stacks."""

    kind: ClassVar[str] = "stack"
    requires: ClassVar[tuple[str, ...]] = ("merge",)


class Rival(_Silent):
    """Wants what the cache has."""

    kind: ClassVar[str] = "rival"
    claims: ClassVar[frozenset[str]] = frozenset({"loss"})


class FakeCatalog:
    """The plugins above, and a broken one."""

    faces: ClassVar[dict[str, tuple[type[Any], ...]]] = {
        "model": (Net, Pair),
        "data": (Sim, Table, Words),
        "optimization": (Cache, Merge, Stack, Rival),
        "inference": (Cache, Merge),
        "lr_scheduler": tuple(SCHEDULES.values()),
        "callbacks": (),
    }

    def kinds(self, section: Section) -> Sequence[str]:
        broken = ["broken"] if section == "optimization" else []
        return sorted([face.kind for face in self.faces[section]] + broken)

    def import_hint(self, section: Section, kind: str) -> str:
        return ""

    def get(self, section: Section, kind: str) -> type[Any]:
        for face in self.faces[section]:
            if face.kind == kind:
                return face
        raise UsageError(f"{section}.{kind} of nobody 1.0 cannot be imported: no torch")

    def provider(self, section: Section, kind: str) -> Provider:
        return Provider("proven-runner", "0.1.0")


RECIPE = """\
name: example
seed: 7
model: {kind: net, lr: 1e-3}
data: {kind: sim, envs: 4}
train:
  env_steps: 60_000
optimization:
  merge: on
  cache: {size: 5}
"""


def write_recipe(folder: Path, text: str = RECIPE, name: str = "recipe.yaml") -> Path:
    """Writes a recipe into a folder."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
