"""Base class of all sections of a recipe: strict and closed."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Config(BaseModel):
    """A section of a recipe: unknown keys are errors, and values are never coerced (``"1e-3"`` is
    not a number).

    A ``recorded`` copy records which of its fields were read; a dump or a copy of it
    reads them all.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        # By default a dump to JSON replaces infinities and NaN by null: another setting.
        ser_json_inf_nan="constants",
    )

    moved: ClassVar[Mapping[str, str]] = {}
    """Settings of a plugin that have moved in the recipe: dotted paths, from the old to the new."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Hints for keys that belong elsewhere."""
    omitted: ClassVar[frozenset[str]] = frozenset()
    """Settings that a dump leaves out while they have their defaults."""
    implied: ClassVar[frozenset[str]] = frozenset()
    """Settings that follow from others: a validator compares them, and no other code reads them."""

    _read: set[str] | None = PrivateAttr(default=None)
    """Names of the fields that were read, in a copy that keeps a record; None in all others."""

    def __getattribute__(self, name: str) -> Any:
        # The cheapest test is first: most attributes that are read are private ones of pydantic.
        if (
            name[0] != "_"
            and name in type(self).__pydantic_fields__
            and self._read is not None
        ):
            self._read.add(name)
        return super().__getattribute__(name)

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]  # pydantic's is a generator, too
        for name, field in type(self).__pydantic_fields__.items():
            # A plugin receives only its settings; the runner reads the excluded fields.
            if not field.exclude:
                yield name, getattr(self, name)

    @model_serializer(mode="wrap")
    def _dumped(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A dump reads every field.
        tuple(self)
        # A computed field is not a setting: a recipe that contained it could not be read again.
        hidden = set(type(self).model_computed_fields)
        hidden |= {name for name in self.omitted if self.is_default(name)}
        return {name: value for name, value in dump(self).items() if name not in hidden}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # Few commands make a schema, and only a schema has descriptions.
        from runner.plugin.descriptions import setting_descriptions

        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in setting_descriptions(cls).items():
            if name in properties:
                properties[name]["description"] = text
        return schema

    def model_copy(self, **settings: Any) -> Self:
        """Returns a copy like pydantic's method."""
        # A dump reads every field, those of nested sections, too.
        self.model_dump()
        return super().model_copy(**settings)

    def recorded(self) -> Self:
        """Returns a copy that records which of its fields are read, for an implementation."""
        sections = {}
        for name, value in self.__dict__.items():
            if isinstance(value, Config):
                sections[name] = value.recorded()
        copy = self.model_copy(update=sections)
        copy.__pydantic_private__ = {
            **(copy.__pydantic_private__ or {}),
            "_read": set(),
        }
        return copy

    def unread(self, prefix: str = "") -> list[str]:
        """Returns the dotted paths of leaves that were not read since the record started; none
        without a record.
        """
        if self._read is None:
            return []
        paths = []
        for name, value in self.__dict__.items():
            if type(self).__pydantic_fields__[name].exclude:
                continue
            if isinstance(value, Config):
                paths += value.unread(f"{prefix}{name}.")
            elif name not in self._read | self.implied:
                paths.append(prefix + name)
        return paths

    def is_default(self, path: str) -> bool:
        """Returns whether the value at a dotted path equals that of a recipe without it."""
        config = self
        keys = path.split(".")
        baseline: Any = None
        for depth, key in enumerate(keys, start=1):
            # A section has the defaults that its owner chose for it, as long as both are of one
            # class.
            if type(baseline) is not type(config):
                baseline = None
            field = type(config).__pydantic_fields__[key]
            default = field.get_default(
                call_default_factory=True, validated_data=config.__dict__
            )
            if baseline is not None:
                default = baseline.__dict__[key]
            value = config.__dict__[key]
            if depth < len(keys):
                config = value
                baseline = default
        return bool(value == default)
