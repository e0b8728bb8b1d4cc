"""Fills settings from nodes, and says what is wrong at the place where it was written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from runner.plugin.files import Anchor
from runner.plugin.lr_scheduler import ConstantConfig, LrSchedulerConfig
from runner.system.errors import RunnerError
from runner.system.names import nearest, suggestion
from runner.system.secrets import register

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from runner.plugin.stage import StageConfig
    from runner.recipe.catalog import Catalog, Section
    from runner.recipe.document import Node, Problem
    from runner.recipe.recipe import Recipe

Model = TypeVar("Model", bound=BaseModel)

SCHEDULES = {model.model_fields["kind"].default: model for model in get_args(get_args(LrSchedulerConfig)[0])}
"""By kind."""
_SWITCH: dict[Any, bool] = {"on": True, True: True, "off": False, False: False}
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


def fill(
    model: type[Model], node: Node, path: str, problems: list[Problem], others: Iterable[str] = ()
) -> Model | None:
    """Validates a mapping strictly; its paths are made absolute, each from the file that it is written in.

    What is wrong is added to ``problems``, at its dotted path below ``path``; the result is None then. ``others`` are
    keys that may stand beside the model's own, for suggestions.
    """
    for leaf in secret_nodes(model, node):  # before a message can quote it, whether or not it is valid
        register(str(leaf.value), leaf.spelled.strip("\"'"))
    for name, field in model.model_fields.items():
        anchor = next((each for each in field.metadata if isinstance(each, Anchor)), None)
        child = node.get(name)
        if anchor is not None and child is not None and isinstance(child.value, str):
            absolute = replace(child, value=anchor.absolute(child.value, child.place.source))
            node = replace(node, value={**_mapping(node), name: absolute})
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


def plugin_section(root: Node, section: Section, catalog: Catalog, problems: list[Problem]) -> Any:
    """The settings of a section with a ``kind``: an instance of the kind's face, or None if anything is wrong with it.

    Those of an unknown kind are judged by the kind that was probably meant; or else, as far as the keys are the same,
    by the one that has most keys in common.
    """
    node, known = root.get(section), catalog.kinds(section)
    if node is not None and not isinstance(node.value, dict):
        problems.append(node.problem(section, f"should be a mapping with a kind, got {node.shown}"))
        return None
    written = dict(_mapping(node))
    kind = written.pop("kind", None)
    if node is None or kind is None:
        problems.append((node or root).key_problem(f"{section}.kind", f"is missing: one of {', '.join(known)}"))
        return None
    name = str(kind.value)
    if kind.value in known:
        try:
            face = catalog.get(section, name)
        except RunnerError as error:
            problems.append(kind.problem(section, str(error)))
            return None
        return fill(face, replace(node, value=written), section, problems)
    problems.append(kind.problem(f"{section}.kind", f"unknown kind {kind.shown}{suggestion(name, known)}"))
    meant = nearest(name, known)
    faces = [found for each in ([meant] if meant else known) if (found := face_of(catalog, section, each))]
    likely = max(faces, key=lambda face: len(written.keys() & face.model_fields.keys()), default=None)
    if likely is not None and meant is None:
        written = {key: child for key, child in written.items() if key in likely.model_fields}
    if likely is not None and written:
        fill(likely, replace(node, value=written), section, problems)
    return None


def face_of(catalog: Catalog, section: Section, kind: str) -> Any:
    """The face of a kind; None if it cannot be imported."""
    with suppress(RunnerError):
        return catalog.get(section, kind)
    return None


def stages(root: Node, catalog: Catalog, problems: list[Problem]) -> tuple[dict[str, StageConfig], dict[str, bool]]:
    """The stages that a recipe names.

    Returns:
        Those that are on and valid, in the order in which they attach; and whether each is on, be it valid or not.
    """
    found: dict[str, StageConfig] = {}
    switched: dict[str, bool] = {}
    section, known = root.get("optimization"), catalog.kinds("optimization")
    if section is not None and not isinstance(section.value, dict):
        problems.append(section.problem("optimization", f"should be a mapping of stages, got {section.shown}"))
        return found, switched
    for kind, node in _mapping(section).items():
        path = f"optimization.{kind}"
        is_switch = isinstance(node.value, bool | str) and node.value in _SWITCH
        if kind not in known:
            problems.append(node.key_problem(path, f"unknown stage{suggestion(kind, known)}"))
        elif not is_switch and not _mapping(node):
            given = "an empty mapping" if node.value == {} else node.shown
            problems.append(node.problem(path, f"should be on, off or its settings, got {given}"))
        else:
            switched[kind] = _SWITCH[node.value] if is_switch else True
        if not switched.get(kind):
            continue
        try:
            face = catalog.get("optimization", kind)
        except RunnerError as error:
            problems.append(node.key_problem(path, str(error)))
            continue
        stage = fill(face, replace(node, value={}) if is_switch else node, path, problems)
        if stage is not None:
            found[kind] = stage
    return dict(sorted(found.items(), key=lambda item: (item[1].phase, item[0]))), switched


def lr_scheduler(root: Node, problems: list[Problem]) -> Any:
    """How learning rates move; constant if the recipe does not say."""
    node, kind = root.get("lr_scheduler"), root.get("lr_scheduler", "kind")
    if node is None:
        return ConstantConfig()
    if kind is None:
        one_of = ", ".join(SCHEDULES)
        problems.append(node.key_problem("lr_scheduler", f"should be a mapping with a kind: one of {one_of}"))
    elif kind.value not in SCHEDULES:
        hint = suggestion(str(kind.value), SCHEDULES)
        problems.append(kind.problem("lr_scheduler.kind", f"unknown kind {kind.shown}{hint}"))
    else:
        return fill(SCHEDULES[str(kind.value)], node, "lr_scheduler", problems)
    return None


def secrets_of(recipe: Recipe, document: Node) -> Iterator[Node]:
    """The scalars in a document that are written where a recipe's plugins declare secrets."""
    switches = document.get("optimization") or document
    sections = [(recipe.model, document.get("model")), (recipe.data, document.get("data"))]
    for config, node in sections + [(stage, switches.get(kind)) for kind, stage in recipe.stages.items()]:
        if node is not None:
            yield from secret_nodes(type(config), node)


def secret_nodes(declared: Any, node: Node) -> Iterator[Node]:
    """The scalars in a node that are written where a model, or the annotation of a field, has a ``SecretStr``."""
    if isinstance(declared, type) and issubclass(declared, BaseModel):
        for name, field in declared.model_fields.items():
            child = node.get(name)
            if child is not None:
                yield from secret_nodes(field.annotation, child)
        return
    parts = [*_mapping(node).values(), *node.items()]
    if declared in (SecretStr, SecretBytes):
        if node.spelled:
            yield node
        for part in parts:
            yield from secret_nodes(declared, part)
    for inner in get_args(declared):
        for part in (node, *parts):
            yield from secret_nodes(inner, part)


def _mapping(node: Node | None) -> dict[str, Node]:
    return node.value if node is not None and isinstance(node.value, dict) else {}


def _problem(error: ErrorDetails, model: type[BaseModel], node: Node, path: str, others: Iterable[str]) -> Problem:
    parts, found, missing = _walk(node, error["loc"])
    dotted = ".".join([path, *parts] if path else parts)
    kind = error["type"]
    if kind == "extra_forbidden":
        known = {name for each in _models_at(model, error["loc"][:-1]) for name in each.model_fields}
        siblings = known.union(others) if len(parts) == 1 else known
        return found.key_problem(dotted, f"unknown key{suggestion(parts[-1], siblings)}")
    if kind == "missing" and isinstance(missing, int):
        return found.problem(dotted, f"needs at least {missing + 1} items")
    if kind == "missing" and missing is not None:
        return found.key_problem(f"{dotted}.{missing}" if dotted else str(missing), "is missing")
    if kind not in ("union_tag_invalid", "union_tag_not_found"):
        return found.problem(dotted, _message(error, found))
    discriminator = error["ctx"]["discriminator"].strip("'")
    tag = found.get(discriminator)
    if tag is None:
        return found.key_problem(f"{dotted}.{discriminator}", "is missing: it says which settings follow")
    hint = suggestion(str(tag.value), _quoted(error["ctx"]["expected_tags"]))
    return tag.problem(f"{dotted}.{discriminator}", f"unknown {discriminator} {tag.shown}{hint}")


def _message(error: ErrorDetails, found: Node) -> str:
    message = error["msg"]
    if error["type"] in ("value_error", "assertion_error"):
        return message.partition(", ")[2]
    for theirs, ours in _WORDING:
        message = message.replace(theirs, ours)
    if not message.startswith("should"):
        return message[0].lower() + message[1:]
    message += f", got {found.shown}"
    if error["type"] in ("int_type", "float_type") and found.is_quoted_number:
        return f"{message} - remove the quotes"
    is_choice = error["type"] == "literal_error" and isinstance(found.value, str)
    near = nearest(str(found.value), _quoted(error["ctx"]["expected"])) if is_choice else None
    return f"{message} - did you mean '{near}'?" if near else message


def _quoted(text: str) -> list[str]:
    """The names in pydantic's ``'a', 'b' or 'c'``."""
    return re.findall(r"'([^']*)'", text)


def _walk(node: Node, loc: tuple[int | str, ...]) -> tuple[list[str], Node, int | str | None]:
    """Where a location leads, without what is no part of the document (names of union members).

    Returns:
        The keys that are in the document, the node they lead to, and the last part if it leads nowhere.
    """
    parts: list[str] = []
    missing: int | str | None = None
    for part in loc:
        child = node.get(part) if isinstance(part, str) else dict(enumerate(node.items())).get(part)
        missing = part if child is None else None
        if child is not None:
            node = child
            parts.append(str(part))
    return parts, node, missing


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
        fields = [field for each in models if (field := each.model_fields.get(str(part)))]
        inner = [found for field in fields for found in _models_in(field.annotation)]
        models = inner if fields else [each for each in models if part in _tags(each)] or models
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _tags(model: type[BaseModel]) -> set[Any]:
    return {model.__name__, *(tag for field in model.model_fields.values() for tag in get_args(field.annotation))}
