"""Values of recipes that come from environment variables: ``${env:NAME}`` and
``${env:NAME:default}``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runner.recipe.scalars import resolve
from runner.recipe.yaml_nodes import Node, Problem

BEGINNING = "${env:"
_REFERENCE = re.compile(r"(\$?)\$\{env:([A-Za-z_][A-Za-z0-9_]*)(?::([^}]*))?\}")
_FORM = "should be ${env:NAME} or ${env:NAME:default}, with a closing brace"


def with_environment(
    node: Node,
    problems: list[Problem],
    path: str = "",
    environment: Mapping[str, str] = os.environ,
) -> Node:
    """Returns a document in which references are replaced by the values of variables.

    A plain scalar is then read as YAML, so that a number is a number; a quoted one is text.
    ``$${env:NAME}`` stands for the text ``${env:NAME}``.

    Args:
        node: The document, or a part of it.
        problems: Receives variables that are not set, and references that cannot be read.
        path: Dotted path of the part.
        environment: The variables.
    """
    if isinstance(node.value, dict):
        children = {
            key: with_environment(child, problems, _joined(path, key), environment)
            for key, child in node.value.items()
        }
        return replace(node, value=children)
    if isinstance(node.value, list):
        items = [
            with_environment(item, problems, _joined(path, number), environment)
            for number, item in enumerate(node.value)
        ]
        return replace(node, value=items)
    if not isinstance(node.value, str) or BEGINNING not in node.value:
        return node
    return _replaced(node, node.value, problems, path, environment)


def escape_references(values: Any) -> Any:
    """Returns plain values whose text ``with_environment`` restores instead of replacing it."""
    if isinstance(values, Mapping):
        return {key: escape_references(child) for key, child in values.items()}
    if isinstance(values, list):
        return [escape_references(item) for item in values]
    if not isinstance(values, str):
        return values
    return _REFERENCE.sub(lambda match: f"${match[0]}", values)


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _replaced(
    node: Node,
    text: str,
    problems: list[Problem],
    path: str,
    environment: Mapping[str, str],
) -> Node:
    """Returns a scalar with the values of the variables that its text names."""
    pieces = []
    end = 0
    for match in _REFERENCE.finditer(text):
        name = match[2]
        default: str | None = match[3]
        pieces.append(text[end : match.start()])
        end = match.end()
        if match[1]:
            pieces.append(match[0].removeprefix("$"))
            continue
        value = environment.get(name, default)
        if value is None:
            message = (
                f"the environment variable {name} is not set; set it, or write "
                f"${{env:{name}:default}}"
            )
            problems.append(Problem(node.place, path, message))
            # The remaining references of this text are checked as well.
            value = ""
        pieces.append(value)
    # What is left looks like a reference, and would otherwise be taken for text.
    if BEGINNING in _REFERENCE.sub("", text):
        problems.append(Problem(node.place, path, _FORM))
    result = "".join([*pieces, text[end:]])
    # As in YAML, quotes make a number text.
    is_quoted = node.spelled[:1] in ("'", '"', "|", ">")
    return replace(node, value=result if is_quoted else resolve(result), spelled=result)
