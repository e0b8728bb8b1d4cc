"""An example of a request: for the page of a model, and for the command that ``serve`` prints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from runner.plugin.configs import ServedRequest
from runner.plugin.learner import Learner

_LONGEST_INLINE = 600
"""Characters of a request that a command contains; a longer one is fetched from the server."""


def example_of(learner: Learner, request: type[ServedRequest]) -> dict[str, Any] | None:
    """Returns a request that the learner accepts; None if neither the learner nor the schema yields one."""
    schema = request.model_json_schema()
    example = learner.example_request()
    values = dict(_example(schema, schema)) if example is None else dict(example)
    try:
        accepted = learner.refused(request.model_validate(values)) is None
    except ValidationError:
        return None
    return values if accepted else None


def curl_command(address: str, example: Mapping[str, Any] | None) -> str:
    """Returns a command that sends the example to a server; without one, a command that prints the API."""
    if example is None:
        return f"curl -s {address}/openapi.json"
    header = "-H 'Content-Type: application/json'"
    body = json.dumps(example)
    if len(body) > _LONGEST_INLINE:
        # A command line of that length could not be copied from a terminal.
        return f"curl -s {address}/example | curl -s {address}/predict {header} -d @-"
    return f"curl -s {address}/predict {header} -d {shlex.quote(body)}"


def _example(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Returns a value for a JSON schema: its default, or the smallest value with only what is required."""
    if "$ref" in schema:
        return _example(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], root)
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            return {name: _example(properties[name], root) for name in schema.get("required", ())}
        case "array":
            items = schema.get("items", {})
            return [_example(items, root) for _ in range(max(1, schema.get("minItems", 1)))]
        case "string":
            return "example"[: schema.get("maxLength")].ljust(schema.get("minLength", 0), "e")
        case "integer":
            return schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        case "number":
            return _number(schema)
        case "boolean":
            return False
    return None


def _number(schema: Mapping[str, Any]) -> float:
    """Returns a number within the bounds of a schema."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None:
        return 0.0 if high is None or high > 0 else float(high - 1)
    return float(low + 1) if high is None else (low + high) / 2
