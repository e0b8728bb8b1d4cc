"""Fills a pydantic model from nodes, and says what is wrong at the place where it was written."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from runner.plugin.config import Config
from runner.plugin.files import Anchor, anchored
from runner.plugin.stage import StageConfig
from runner.recipe.catalog import Catalog, Section
from runner.recipe.constraints import Draft
from runner.recipe.document import Node, Place, Problem, resolve
from runner.system.errors import RunnerError
from runner.system.names import nearest, suggestion
from runner.system.secrets import redact, register

Model = TypeVar("Model", bound=BaseModel)

_WORDING = (
    ("Input should be", "should be"),
    ("String should", "should"),
    ("a valid number", "a number"),
    ("a valid integer", "a whole number"),
    ("a valid string", "text"),
    ("a valid boolean", "true or false"),
    ("a valid array", "a list"),
    ("a valid tuple", "a list"),
    ("a valid dictionary", "a mapping"),
    ("an object", "a mapping"),
)
"""What pydantic says about JSON, in the words of YAML."""
_LONGEST_VALUE = 60


def fill(
    model: type[Model], node: Node, path: str, problems: list[Problem], others: Iterable[str] = ()
) -> Model | None:
    """Validates a mapping strictly.

    Args:
        model: what the mapping should be.
        node: the mapping.
        path: its dotted path, for messages; empty for the document.
        problems: receives everything that is wrong with it.
        others: keys that may stand beside the model's own, for suggestions.

    Returns:
        The filled model, or None if anything is wrong.
    """
    for leaf in secret_nodes(model, node):  # before a message can quote it, whether or not it is valid
        register(str(leaf.value))
        register(leaf.spelled.strip("\"'"))
    while True:
        try:
            # In JSON a list may fill a tuple, and nothing else is coerced.
            return model.model_validate_json(json.dumps(node.plain()), strict=True)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        unknown = [_walk(node, found["loc"])[1] for found in errors if found["type"] == "extra_forbidden"]
        leftovers = {id(each) for each in unknown if each.leftover}
        if not leftovers:
            problems += [_problem(found, model, node, path, others) for found in errors]
            return None
        node = _without(node, leftovers)


def secret_nodes(declared: Any, node: Node) -> Iterator[Node]:
    """The scalars that are written where a ``SecretStr`` is declared.

    Args:
        declared: a model, or the annotation of a field.
        node: what is written there.
    """
    if isinstance(declared, type) and issubclass(declared, BaseModel):
        for name, field in declared.model_fields.items():
            child = node.get(name)
            if child is not None:
                yield from secret_nodes(field.annotation, child)
        return
    parts = node.value.values() if isinstance(node.value, dict) else node.value if isinstance(node.value, list) else ()
    if declared in (SecretStr, SecretBytes):
        if node.spelled:
            yield node
        for part in parts:
            yield from secret_nodes(declared, part)
    for inner in get_args(declared):
        for part in (node, *parts):
            yield from secret_nodes(inner, part)


def display(value: Any) -> str:
    """A value as it would be written in a recipe, short enough for a message."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = f"'{redact(value)}'" if isinstance(value, str) else "nothing" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _problem(error: ErrorDetails, model: type[BaseModel], node: Node, path: str, others: Iterable[str]) -> Problem:
    parts, found, missing = _walk(node, error["loc"])
    keys = [path] if path else []
    dotted = ".".join(keys + parts)
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        known = {name for each in _models_at(model, error["loc"][:-1]) for name in each.model_fields}
        siblings = known.union(others) if len(parts) == 1 else known
        return Problem(found.anchor, dotted, f"unknown key{suggestion(parts[-1], siblings)}")
    if kind == "missing" and missing is not None:
        if isinstance(missing, int):
            return Problem(found.place, dotted, f"needs at least {missing + 1} items")
        return Problem(found.anchor, ".".join(filter(None, (dotted, missing))), "is missing")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _tag_problem(context, found, dotted)
    return Problem(found.place, dotted, _message(error, found))


def _tag_problem(context: dict[str, Any], found: Node, dotted: str) -> Problem:
    discriminator = context["discriminator"].strip("'")
    dotted = f"{dotted}.{discriminator}"
    tag = found.get(discriminator)
    if tag is None:
        return Problem(found.anchor, dotted, "is missing: it says which settings follow")
    hint = suggestion(str(tag.value), _quoted(context["expected_tags"]))
    return Problem(tag.place, dotted, f"unknown {discriminator} {display(tag.value)}{hint}")


def _message(error: ErrorDetails, found: Node) -> str:
    message = error["msg"]
    if error["type"] in ("value_error", "assertion_error"):
        return message.partition(", ")[2]
    for theirs, ours in _WORDING:
        message = message.replace(theirs, ours)
    if not message.startswith("should"):
        return message[0].lower() + message[1:]
    message += f", got {display(found.value)}"
    if not isinstance(found.value, str):
        return message
    if error["type"] == "literal_error":
        near = nearest(found.value, _quoted(error["ctx"]["expected"]))
        return f"{message} - did you mean '{near}'?" if near else message
    # Text that reads as a number must have been quoted.
    is_number = error["type"] in ("int_type", "float_type") and isinstance(resolve(found.value), int | float)
    return f"{message} - remove the quotes" if is_number else message


def _quoted(text: str) -> list[str]:
    """The names in pydantic's ``'a', 'b' or 'c'``."""
    return re.findall(r"'([^']*)'", text)


def _walk(node: Node, loc: tuple[int | str, ...]) -> tuple[list[str], Node, int | str | None]:
    """Follows a location, passing over what is no part of the document (names of union members).

    Returns:
        The keys that are in the document, the node they lead to, and the last part if it leads nowhere.
    """
    parts: list[str] = []
    missing: int | str | None = None
    for part in loc:
        child = _child(node, part)
        missing = part if child is None else None
        if child is not None:
            node = child
            parts.append(str(part))
    return parts, node, missing


def _child(node: Node, part: int | str) -> Node | None:
    if isinstance(part, str):
        return node.get(part)
    return node.value[part] if isinstance(node.value, list) and part < len(node.value) else None


def _without(node: Node, dropped: set[int]) -> Node:
    """The same tree without the nodes of these identities; lists are never merged, so none is in a list."""
    if not isinstance(node.value, dict):
        return node
    children = {key: _without(child, dropped) for key, child in node.value.items() if id(child) not in dropped}
    return replace(node, value=children)


def _models_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[type[BaseModel]]:
    """The models that may stand at a location; a union member's name chooses between them."""
    models = [model]
    for part in loc:
        fields = [each.model_fields[part] for each in models if isinstance(part, str) and part in each.model_fields]
        if fields:
            models = [inner for field in fields for inner in _models_in(field.annotation)]
        else:
            models = [each for each in models if part in _tags(each)] or models
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _tags(model: type[BaseModel]) -> set[Any]:
    return {model.__name__, *(tag for field in model.model_fields.values() for tag in get_args(field.annotation))}


_SWITCH: dict[Any, bool] = {"on": True, True: True, "off": False, False: False}


def plugin_section(root: Node, section: Section, catalog: Catalog, problems: list[Problem]) -> Any:
    """The settings of a section with a ``kind``.

    Returns:
        An instance of the kind's face, or None if anything is wrong with it.
    """
    node = root.get(section)
    known = catalog.kinds(section)
    one_of = f"is missing: one of {', '.join(known)}"
    if node is None:
        problems.append(Problem(root.place, f"{section}.kind", one_of))
        return None
    if not isinstance(node.value, dict):
        problems.append(Problem(node.place, section, f"should be a mapping with a kind, got {display(node.value)}"))
        return None
    kind = node.value.get("kind")
    settings = replace(node, value={key: child for key, child in node.value.items() if key != "kind"})
    if kind is None:
        problems.append(Problem(node.anchor, f"{section}.kind", one_of))
    elif kind.value in known:
        face = _face(catalog, section, str(kind.value), kind.place, problems)
        return face and fill(face, _anchored(face, settings), section, problems)
    else:
        hint = suggestion(str(kind.value), known)
        problems.append(Problem(kind.place, f"{section}.kind", f"unknown kind {display(kind.value)}{hint}"))
        _check_as_if(nearest(str(kind.value), known), settings, section, catalog, problems)
    return None


def _anchored(face: type[Config], settings: Node) -> Node:
    """Makes paths absolute, each from the file that it is written in."""
    assert isinstance(settings.value, dict)
    paths: dict[str, Node] = {}
    for name, field in face.model_fields.items():
        anchor = next((each for each in field.metadata if isinstance(each, Anchor)), None)
        node = settings.get(name)
        if anchor is not None and node is not None and isinstance(node.value, str):
            paths[name] = replace(node, value=anchored(node.value, node.place.source, anchor))
    return replace(settings, value={**settings.value, **paths})


def stages(draft: Draft, catalog: Catalog, problems: list[Problem]) -> None:
    """Fills in the stages that the recipe names, in the order in which they attach."""
    section = draft.root.get("optimization")
    if section is None:
        return
    if not isinstance(section.value, dict):
        message = f"should be a mapping of stages, got {display(section.value)}"
        problems.append(Problem(section.place, "optimization", message))
        return
    known = catalog.kinds("optimization")
    for kind, node in section.value.items():
        if kind not in known:
            message = f"unknown stage{suggestion(kind, known)}"
            problems.append(Problem(node.anchor, f"optimization.{kind}", message))
            continue
        stage = _stage(kind, node, draft, catalog, problems)
        if stage is not None:
            draft.stages[kind] = stage
    draft.stages = dict(sorted(draft.stages.items(), key=lambda item: (item[1].phase, item[0])))


def _stage(kind: str, node: Node, draft: Draft, catalog: Catalog, problems: list[Problem]) -> StageConfig | None:
    path = f"optimization.{kind}"
    settings = node
    if isinstance(node.value, bool | str) and node.value in _SWITCH:
        draft.switched[kind] = _SWITCH[node.value]
        settings = replace(node, value={})
    elif isinstance(node.value, dict) and node.value:
        draft.switched[kind] = True
    else:
        given = display(node.value) if node.value != {} else "an empty mapping"
        problems.append(Problem(node.place, path, f"should be on, off or its settings, got {given}"))
        return None
    if not draft.switched[kind]:
        return None
    face = _face(catalog, "optimization", kind, node.anchor, problems)
    return face and fill(face, settings, path, problems)


def _face(catalog: Catalog, section: Section, kind: str, place: Place, problems: list[Problem]) -> Any:
    try:
        return catalog.get(section, kind)
    except RunnerError as error:
        problems.append(Problem(place, f"{section}.{kind}" if section == "optimization" else section, str(error)))
        return None


def _check_as_if(
    meant: str | None, settings: Node, section: Section, catalog: Catalog, problems: list[Problem]
) -> None:
    """Says what else is wrong with the settings of an unknown kind.

    They are judged by the kind that was probably meant; or else, as far as the keys are the same, by the one that has
    most keys in common.
    """
    assert isinstance(settings.value, dict)
    written = settings.value
    unimportable: list[Problem] = []  # not asked for, so no concern of this recipe
    kinds = [meant] if meant is not None else catalog.kinds(section)
    faces = [face for kind in kinds if (face := _face(catalog, section, kind, settings.place, unimportable))]
    face = max(faces, key=lambda face: len(written.keys() & face.model_fields.keys()), default=None)
    if face is None:
        return
    if meant is None:
        settings = replace(settings, value={key: written[key] for key in written if key in face.model_fields})
    if settings.value:
        fill(face, settings, section, problems)
