"""The base of everything that a recipe can say: strict, closed and aware of what has been read."""

from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr


class Config(BaseModel):
    """A section of a recipe.

    Unknown keys are errors, values are never coerced (``"1e-3"`` is not a number), and every field remembers whether
    anybody read it, so that a setting which nothing consumes can be reported instead of being ignored.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    _read: set[str] = PrivateAttr(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        if name[0] != "_" and name in type(self).__pydantic_fields__:
            self._read.add(name)
        return super().__getattribute__(name)

    def unread(self, prefix: str = "") -> list[str]:
        """Dotted paths of the leaves that nobody has read since the config was made."""
        paths = []
        for name in type(self).__pydantic_fields__:
            value = self.__dict__[name]
            if isinstance(value, Config):
                paths += value.unread(f"{prefix}{name}.")
            elif name not in self._read:
                paths.append(prefix + name)
        return paths
