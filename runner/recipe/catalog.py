"""What a recipe needs to know about plugins, whoever keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Section = Literal["model", "data", "optimization"]
SECTIONS: tuple[Section, ...] = ("model", "data", "optimization")


@dataclass(frozen=True)
class Provider:
    """Who brought a plugin."""

    name: str
    """A distribution, or the path of a local file."""
    version: str
    """Of the distribution; of a file, the first digits of its SHA-256."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Catalog(Protocol):
    """Plugins by section and kind."""

    def kinds(self, section: Section) -> Sequence[str]:
        """The kinds that a section may name, sorted; imports nothing."""

    def get(self, section: Section, kind: str) -> type[Any]:
        """The face of a kind; a ``RunnerError`` if it cannot be imported, or is not what it should be."""

    def provider(self, section: Section, kind: str) -> Provider:
        """Who brought it."""
