"""Validation that stops at the first errors, so that a wrong request costs no more than a right one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, SchemaValidator, core_schema

CONTAINERS = {"list", "tuple", "set", "frozenset", "deque", "dict"}
"""Types of pydantic's schemas that hold items."""
MODELS = {"model", "dataclass", "typed-dict"}
"""Types of pydantic's schemas that do not inherit the settings of the schema that contains them."""
FIELDS = {"model-fields", "typed-dict", "dataclass-args"}
"""Types of pydantic's schemas that hold named fields."""
OPAQUE = {"cls", "metadata", "default", "config", "serialization", "expected"}
"""Entries of pydantic's schemas that are not schemas, or not for validation."""


def first_error_validator(model: type[BaseModel]) -> SchemaValidator:
    """Returns a validator of the model that constructs few errors, however many there are.

    A container is refused at its first wrong item, and before its items if it is too long. Fields with unknown names
    are refused before the values if there are more names than fields. What is accepted is the same as by the model.
    """
    schema = _with_limits(TypeAdapter(model).core_schema, forbids_unknown=False)
    # Validators that pydantic has built before for nested models do not stop.
    return SchemaValidator(schema, _use_prebuilt=False)


def _with_limits(node: Any, forbids_unknown: bool) -> Any:
    """Returns a copy of a schema, or of a part of it, with the limits."""
    if isinstance(node, Mapping):
        config = node.get("config") or {}
        if "extra_fields_behavior" in config or node.get("type") in MODELS:
            forbids_unknown = config.get("extra_fields_behavior") == "forbid"
        copy = {key: value if key in OPAQUE else _with_limits(value, forbids_unknown) for key, value in node.items()}
        return _limited(copy, forbids_unknown)
    if isinstance(node, list | tuple):
        return type(node)(_with_limits(item, forbids_unknown) for item in node)
    return node


def _limited(schema: dict[str, Any], forbids_unknown: bool) -> Any:
    kind = schema.get("type")
    if kind in CONTAINERS:
        schema["fail_fast"] = True
        longest = schema.get("max_length")
        if longest is not None:
            return _before(schema, _length_check(longest))
    if kind in FIELDS and schema.get("extra_behavior", "forbid" if forbids_unknown else None) == "forbid":
        return _before(schema, _names_check(_names(schema["fields"])))
    return schema


def _before(schema: dict[str, Any], check: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns a schema that calls a check before it validates; a reference to it stays one."""
    reference = schema.pop("ref", None)
    return {**core_schema.no_info_before_validator_function(check, schema, ref=reference)}


def _length_check(longest: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > longest:
            details = {"longest": longest, "length": len(value)}
            raise PydanticCustomError("too_long", "should have at most {longest} items, got {length}", details)
        return value

    return check


def _names_check(names: Collection[str]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        # With more names than fields, at least one is unknown.
        if isinstance(value, dict) and len(value) > len(names):
            unknown = next(name for name in value if name not in names)
            raise ValidationError.from_exception_data(
                "request", [{"type": "extra_forbidden", "loc": (unknown,), "input": None}]
            )
        return value

    return check


def _names(fields: Mapping[str, Any] | Sequence[Any]) -> set[str]:
    """Returns the names and aliases of fields."""
    by_name = fields.items() if isinstance(fields, Mapping) else [(field["name"], field) for field in fields]
    names: set[str] = set()
    for name, field in by_name:
        names.add(name)
        names.update(_aliases(field.get("validation_alias")))
    return names


def _aliases(alias: Any) -> set[str]:
    """Returns the first keys of an alias: a name, a path, or several paths."""
    if alias is None:
        return set()
    if isinstance(alias, str):
        return {alias}
    paths = [alias] if alias and not isinstance(alias[0], list) else alias
    return {path[0] for path in paths if isinstance(path[0], str)}
