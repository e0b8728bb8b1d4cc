"""Creates settings from nodes, and reports every mistake with the place where the
value was written.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from runner.plugin.config import Config
from runner.plugin.files import Anchor
from runner.plugin.static_checks import lacking
from runner.recipe.scalars import resolve
from runner.recipe.yaml_nodes import Node, Problem
from runner.system.errors import RunnerError
from runner.system.secrets import register
from runner.system.suggestions import nearest, suggestion

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from runner.plugin.configs import LearnerConfig
    from runner.plugin.registry import Registry, Section
    from runner.recipe.recipe import Recipe

Model = TypeVar("Model", bound=Config)

_PLUGIN_HINT = "; --plugin FILE adds the plugins of a file"
_SWITCH: dict[Any, bool] = {"on": True, True: True, "off": False, False: False}
_WORDING = (
    ("Input should be", "should be"),
    ("String should", "should"),
    ("a valid number", "a number"),
    ("a valid integer", "an integer"),
    ("a valid string", "text"),
    ("Input is not a valid path for <class 'pathlib.Path'>", "should be text"),
    ("Input is not a valid path", "should be text"),
    ("a valid boolean", "true or false"),
    ("a valid array", "a list"),
    ("a valid tuple", "a list"),
    ("a valid dictionary", "a mapping"),
    ("an object", "a mapping"),
)
"""Replacements in messages of pydantic: terms of JSON and of Python, and the terms of YAML."""
# Messages of pydantic contain names in the form "'a', 'b' or 'c'".
_QUOTED = re.compile(r"'([^']*)'")


def fill(
    model: type[Model],
    node: Node,
    path: str,
    problems: list[Problem],
    others: Iterable[str] = (),
    useless: Mapping[str, str] | None = None,
) -> Model | None:
    """Validates a mapping strictly; its paths are made absolute, each from the file that it is
    written in.

    Mistakes are added to ``problems``, with their dotted paths below ``path``; the result is then
    None. ``others`` are keys that are allowed in addition to the model's, for suggestions.
    ``useless`` are keys that would be refused in this recipe, each with what is suggested instead.
    """
    # Registered before a message can quote it, whether or not it is valid.
    for leaf in secret_nodes([model], node):
        register(str(leaf.value), leaf.spelled.strip("\"'"))

    plain = node.plain()
    for name, field in model.model_fields.items():
        anchor = _anchor_of(field)
        child = node.get(name)
        if anchor is None or child is None or not isinstance(child.value, str):
            continue
        # Values of another process are written in no line of a file, and are as that process has
        # them.
        if child.place.line:
            plain[name] = anchor.absolute(child.value, child.place.source)

    while True:
        try:
            # In JSON a list may fill a tuple, and nothing else is coerced.
            return model.model_validate_json(json.dumps(plain), strict=True)
        except ValidationError as validation_error:
            errors = validation_error.errors(include_url=False)
        leftovers = list(_leftover_keys(errors, node))
        if not leftovers:
            problems.extend(
                _problem(error, model, node, path, others, useless or {})
                for error in errors
            )
            return None
        # They are in no list, because lists are not merged.
        for *sections, key in leftovers:
            reduce(getitem, sections, plain).pop(key, None)


def _leftover_keys(errors: Iterable[ErrorDetails], node: Node) -> Iterator[list[str]]:
    """The keys of unknown settings that were inherited from another kind."""
    for error in errors:
        if error["type"] == "extra_forbidden":
            keys, unknown, _ = _walk(node, error["loc"])
            if unknown.leftover:
                yield keys


def _anchor_of(field: FieldInfo) -> Anchor | None:
    """Returns the mark of a setting that is a path, also where it is optional."""
    members = [
        getattr(member, "__metadata__", ()) for member in get_args(field.annotation)
    ]
    marks = itertools.chain(field.metadata, *members)
    return next((mark for mark in marks if isinstance(mark, Anchor)), None)


def plugin_section(
    root: Node, section: Section, catalog: Registry, problems: list[Problem]
) -> Any:
    """The settings of a section with a ``kind``: an instance of the kind's face, or None if
    anything is wrong with it.

    Those of an unknown kind are validated only if its name is similar to that of another one.
    """
    kinds = catalog.kinds(section)
    node = root.get(section) or replace(root, value={})
    import_hint = _import_hint(node, section, catalog)
    kind_and_settings = split_kind(
        node,
        section,
        kinds,
        problems,
        hint=import_hint or _PLUGIN_HINT,
        is_misspelt=not import_hint,
    )
    if kind_and_settings is None:
        return None
    kind, settings = kind_and_settings
    if str(kind.value) not in kinds:
        misspelled = None if import_hint else _misspelled(node, section, catalog)
        if misspelled is not None:
            fill(misspelled, settings, section, problems)
        return None

    try:
        face = catalog.get(section, str(kind.value))
    except RunnerError as error:
        problems.append(Problem(kind.place, section, str(error)))
        return None
    missing = lacking(face)
    if missing:
        problems.append(Problem(kind.place, f"{section}.kind", missing))
    return fill(face, settings, section, problems)


def _import_hint(node: Node, section: Section, catalog: Registry) -> str:
    """Returns the hint about a kind whose settings a plugin file imports; empty for others."""
    kind = node.get("kind")
    return "" if kind is None else catalog.import_hint(section, str(kind.value))


def _misspelled(node: Node, section: Section, catalog: Registry) -> Any:
    """Returns the face whose kind was misspelled: of a similar name, and with at least half of the
    keys.
    """
    kind = node.get("kind")
    if kind is None:
        return None
    similar = nearest(str(kind.value), catalog.kinds(section))
    if similar is None:
        return None
    face = face_of(catalog, section, similar)
    if face is None:
        return None
    keys = node.children.keys() - {"kind"}
    common_keys = keys & face.model_fields.keys()
    return face if 2 * len(common_keys) >= len(keys) else None


def face_of(catalog: Registry, section: Section, kind: str) -> Any:
    """The face of a kind; None if it cannot be imported."""
    with suppress(RunnerError):
        return catalog.get(section, kind)
    return None


def stages(
    root: Node,
    name: Section,
    catalog: Registry,
    problems: list[Problem],
    model: LearnerConfig | None = None,
) -> dict[str, Any]:
    """The stages or callbacks of a section that are on, in the order of attaching or calling; None
    instead of settings that are not valid. Stages that cannot work with ``model`` are not
    suggested.
    """
    switched_on: dict[str, Any] = {}
    noun = "callback" if name == "callbacks" else "stage"
    section = root.get(name) or replace(root, value={})
    if not isinstance(section.value, dict):
        problems.append(
            Problem(
                section.place,
                name,
                f"should be a mapping of {noun}s, got {section.shown}",
            )
        )
        return switched_on
    kinds = catalog.kinds(name)
    for kind, node in section.value.items():
        path = f"{name}.{kind}"
        is_switch = isinstance(node.value, bool | str) and node.value in _SWITCH
        has_settings = isinstance(node.value, dict) and bool(node.value)
        if kind not in kinds:
            hint = catalog.import_hint(name, kind)
            if not hint:
                candidates = _candidates(kind, name, catalog, model)
                plugin_hint = "" if nearest(kind, list(kinds)) else _PLUGIN_HINT
                hint = f"{suggestion(kind, candidates)}{plugin_hint}"
            problems.append(Problem(node.anchor, path, f"unknown {noun}{hint}"))
        elif not is_switch and not has_settings:
            value = "an empty mapping" if node.value == {} else node.shown
            problems.append(
                Problem(
                    node.place, path, f"should be on, off or its settings, got {value}"
                )
            )
        elif not is_switch or _SWITCH[node.value]:
            settings = replace(node, value={}) if is_switch else node
            switched_on[kind] = _stage(
                settings,
                name,
                kind,
                catalog,
                problems,
            )

    def attachment_order(kind: str) -> tuple[int, str]:
        # Callbacks have no phase, and are called in the order of their names.
        return getattr(switched_on[kind], "phase", 0), kind

    return {
        kind: switched_on[kind] for kind in sorted(switched_on, key=attachment_order)
    }


def _candidates(
    kind: str, section: Section, catalog: Registry, model: LearnerConfig | None
) -> list[str]:
    """Returns the kinds of a section from which one is suggested for an unknown kind: the nearest
    one can work with the model, or all can.
    """
    candidates = list(catalog.kinds(section))
    # Plugins with a similar name are read first, and the others only if none of these works.
    while (similar := nearest(kind, candidates)) is not None:
        if _offers_slots(model, face_of(catalog, section, similar)):
            return candidates
        candidates.remove(similar)
    return [
        candidate
        for candidate in candidates
        if _offers_slots(model, face_of(catalog, section, candidate))
    ]


def _offers_slots(model: LearnerConfig | None, face: Any) -> bool:
    """Returns whether a model has all slots of a stage; callbacks have none."""
    if model is None:
        return True
    empty: frozenset[str] = frozenset()
    slots = getattr(face, "claims", empty) | getattr(face, "wraps", empty)
    return not any(map(model.lacks, slots))


def _stage(
    settings: Node,
    section: Section,
    kind: str,
    catalog: Registry,
    problems: list[Problem],
) -> Any:
    """The settings of a stage or callback that is on; None if they are not valid."""
    path = f"{section}.{kind}"
    try:
        face = catalog.get(section, kind)
    except RunnerError as error:
        problems.append(Problem(settings.anchor, path, str(error)))
        return None
    missing = lacking(face)
    if missing:
        problems.append(Problem(settings.anchor, path, missing))
    return fill(face, settings, path, problems)


def split_kind(
    node: Node,
    path: str,
    kinds: Collection[str],
    problems: list[Problem],
    default: str | None = None,
    hint: str = "",
    *,
    is_misspelt: bool = True,
) -> tuple[Node, Node] | None:
    """Returns the kind that a section names, registered or not, and its other settings; None if it
    names none.

    The hint follows the message about an unknown kind, which suggests others if it is misspelt.
    """
    if not isinstance(node.value, dict):
        problems.append(
            Problem(
                node.place, path, f"should be a mapping with a kind, got {node.shown}"
            )
        )
        return None
    settings = dict(node.value)
    default_node = None if default is None else Node(default, node.place)
    kind = settings.pop("kind", default_node)
    if kind is None:
        problems.append(
            Problem(
                node.anchor, f"{path}.kind", f"is missing: one of {', '.join(kinds)}"
            )
        )
        return None
    if str(kind.value) not in kinds:
        similar = suggestion(str(kind.value), kinds) if is_misspelt else ""
        message = f"unknown kind {kind.shown}{similar}{hint}"
        problems.append(Problem(kind.place, f"{path}.kind", message))
    return kind, replace(node, value=settings)


def secrets_of(recipe: Recipe, document: Node) -> Iterator[Node]:
    """The scalars in a document that are written where a recipe's plugins declare secrets."""
    switches = document.get("optimization") or document
    sections: list[tuple[Config, Node | None]] = [
        (recipe.model, document.get("model")),
        (recipe.data, document.get("data")),
        (recipe.lr_scheduler, document.get("lr_scheduler")),
    ]
    sections += [(stage, switches.get(kind)) for kind, stage in recipe.stages.items()]
    sections += [
        (stage, document.get("inference", kind))
        for kind, stage in recipe.inference.items()
    ]
    sections += [
        (callback, document.get("callbacks", kind))
        for kind, callback in recipe.callbacks.items()
    ]
    for config, node in sections:
        if node is not None:
            yield from secret_nodes([type(config)], node)


def secret_nodes(declared: Sequence[Any], node: Node) -> Iterator[Node]:
    """The scalars in a node of one of these types that are written where one of them has a
    ``SecretStr``.
    """
    if node.spelled and any(type_ in (SecretStr, SecretBytes) for type_ in declared):
        yield node
    for key, child in node.children.items():
        yield from secret_nodes(_types_at(declared, key) or declared, child)


def _problem(
    error: ErrorDetails,
    model: type[Config],
    node: Node,
    path: str,
    others: Iterable[str],
    useless: Mapping[str, str],
) -> Problem:
    keys, innermost, missing = _walk(node, error["loc"])
    dotted = ".".join([path, *keys] if path else keys)
    error_type = error["type"]
    if error_type == "extra_forbidden":
        known_keys = _keys_at(model, error["loc"][:-1])
        hint = None
        if len(keys) == 1:
            known_keys = known_keys.union(others)
            # The nearest key of all is what was meant.
            hint = useless.get(nearest(keys[-1], known_keys) or "")
            known_keys -= useless.keys()
        message = f"unknown key{hint or suggestion(keys[-1], known_keys)}"
        return Problem(innermost.anchor, dotted, model.elsewhere.get(keys[-1], message))
    if error_type == "missing" and isinstance(missing, int):
        return Problem(innermost.place, dotted, f"needs at least {missing + 1} items")
    if error_type == "missing" and missing is not None:
        missing_path = f"{dotted}.{missing}" if dotted else str(missing)
        is_outermost = len(error["loc"]) == 1
        field = model.model_fields.get(str(missing)) if is_outermost else None
        examples = (field and field.examples) or []
        hints = [f", such as {missing}: {json.dumps(example)}" for example in examples]
        return Problem(
            innermost.anchor, missing_path, "is missing" + "".join(hints[:1])
        )
    if error_type not in ("union_tag_invalid", "union_tag_not_found"):
        return Problem(innermost.place, dotted, _message(error, innermost))

    discriminator = error["ctx"]["discriminator"].strip("'")
    tag_path = f"{dotted}.{discriminator}"
    tag = innermost.get(discriminator)
    if tag is None:
        return Problem(
            innermost.anchor, tag_path, "is missing: it determines the other settings"
        )
    hint = suggestion(str(tag.value), _QUOTED.findall(error["ctx"]["expected_tags"]))
    return Problem(tag.place, tag_path, f"unknown {discriminator} {tag.shown}{hint}")


def _message(error: ErrorDetails, node: Node) -> str:
    message = error["msg"]
    if error["type"] in ("value_error", "assertion_error"):
        return message.partition(", ")[2]
    for pydantic_term, yaml_term in _WORDING:
        message = message.replace(pydantic_term, yaml_term)
    if not message.startswith("should"):
        return message[0].lower() + message[1:]

    message += f", got {node.shown}"
    if not isinstance(node.value, str):
        return message
    is_quoted_number = isinstance(resolve(node.value), int | float)
    if error["type"] in ("int_type", "float_type") and is_quoted_number:
        return f"{message} - remove the quotes"
    if error["type"] == "literal_error":
        choices = _QUOTED.findall(error["ctx"]["expected"])
        similar = nearest(node.value, choices)
        return f"{message} - did you mean '{similar}'?" if similar else message
    return message


def _walk(
    node: Node, loc: tuple[int | str, ...]
) -> tuple[list[str], Node, int | str | None]:
    """The keys of a location that are in the document, the node they lead to, and the last one if
    it leads nowhere.

    Names of union members are skipped, because they are not part of the document.
    """
    keys: list[str] = []
    missing: int | str | None = None
    for key in loc:
        child = node.children.get(key)
        missing = key if child is None else None
        if child is not None:
            node = child
            keys.append(str(key))
    return keys, node, missing


def _keys_at(model: type[Config], loc: tuple[int | str, ...]) -> set[str]:
    """Returns the keys of the models at a location; the name of a union member selects one."""
    types: list[Any] = [model]
    for key in loc:
        union_members = [member for member in _models_in(types) if key in _tags(member)]
        types = _types_at(types, key) or union_members or types
    return {name for member in _models_in(types) for name in member.model_fields}


def _types_at(types: Iterable[Any], key: int | str) -> list[Any]:
    """The types of a field of models among these types."""
    fields = [
        model.model_fields[str(key)]
        for model in _models_in(types)
        if key in model.model_fields
    ]
    return [type_ for field in fields for type_ in _types_in(field.annotation)]


def _types_in(annotation: Any) -> list[Any]:
    arguments = get_args(annotation)
    if not arguments:
        return [annotation]
    return [type_ for argument in arguments for type_ in _types_in(argument)]


def _models_in(types: Iterable[Any]) -> list[type[BaseModel]]:
    return [
        type_
        for type_ in types
        if isinstance(type_, type) and issubclass(type_, BaseModel)
    ]


def _tags(model: type[BaseModel]) -> set[Any]:
    tags = {
        tag
        for field in model.model_fields.values()
        for tag in get_args(field.annotation)
    }
    return {model.__name__, *tags}
