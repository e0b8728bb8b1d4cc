"""Creates settings from nodes, and reports every mistake with the place where the
value was written.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from runner.plugin.config import Config
from runner.plugin.files import Anchor
from runner.plugin.optimizer import OWN, OptimizerSettings, kinds, settings_of
from runner.plugin.works import lacking
from runner.recipe.document import Node, Problem, parse, resolve
from runner.system.errors import RunnerError
from runner.system.names import nearest, suggestion
from runner.system.secrets import register

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from runner.plugin.faces import LearnerConfig, StageConfig
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
_QUOTED = re.compile(r"'([^']*)'")  # the names in pydantic's "'a', 'b' or 'c'"


def fill(
    model: type[Model], node: Node, path: str, problems: list[Problem], others: Iterable[str] = ()
) -> Model | None:
    """Validates a mapping strictly; its paths are made absolute, each from the file that it is written in.

    Mistakes are added to ``problems``, with their dotted paths below ``path``; the result is then
    None. ``others`` are keys that are allowed in addition to the model's, for suggestions.
    """
    for leaf in secret_nodes([model], node):  # before a message can quote it, whether or not it is valid
        register(str(leaf.value), leaf.spelled.strip("\"'"))
    plain = node.plain()
    for name, field in model.model_fields.items():
        anchor = _anchor_of(field)
        child = node.get(name)
        if anchor is not None and child is not None and isinstance(child.value, str):
            plain[name] = anchor.absolute(child.value, child.place.source)
    while True:
        try:
            # In JSON a list may fill a tuple, and nothing else is coerced.
            return model.model_validate_json(json.dumps(plain), strict=True)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        unknown = [_walk(node, each["loc"]) for each in errors if each["type"] == "extra_forbidden"]
        leftovers = [keys for keys, found, _ in unknown if found.leftover]
        if not leftovers:
            problems += [_problem(each, model, node, path, others) for each in errors]
            return None
        for *above, key in leftovers:  # in no list, because lists are not merged
            reduce(getitem, above, plain).pop(key, None)


def _anchor_of(field: FieldInfo) -> Anchor | None:
    """Returns the mark of a setting that is a path, also where it is optional."""
    members = [getattr(member, "__metadata__", ()) for member in get_args(field.annotation)]
    marks = itertools.chain(field.metadata, *members)
    return next((mark for mark in marks if isinstance(mark, Anchor)), None)


def plugin_section(root: Node, section: Section, catalog: Registry, problems: list[Problem]) -> Any:
    """The settings of a section with a ``kind``: an instance of the kind's face, or None if anything is wrong with it.

    Those of an unknown kind are judged only if it is a known one with another spelling.
    """
    known = catalog.kinds(section)
    node = root.get(section) or replace(root, value={})
    named = _kind_of(node, section, known, problems, hint=_PLUGIN_HINT)
    if named is None:
        return None
    kind, rest = named
    if str(kind.value) in known:
        try:
            face = catalog.get(section, str(kind.value))
        except RunnerError as error:
            problems.append(Problem(kind.place, section, str(error)))
            return None
        if missing := lacking(face):
            problems.append(Problem(kind.place, f"{section}.kind", missing))
        return fill(face, rest, section, problems)
    misspelled = _misspelled(node, section, catalog)
    if misspelled is not None:
        fill(misspelled, rest, section, problems)
    return None


def _misspelled(node: Node, section: Section, catalog: Registry) -> Any:
    """Returns the face whose kind was misspelled: of a similar name, and with at least half of the keys."""
    kind = node.get("kind")
    similar = None if kind is None else nearest(str(kind.value), catalog.kinds(section))
    face = None if similar is None else face_of(catalog, section, similar)
    if face is None:
        return None
    written = node.children.keys() - {"kind"}
    return face if 2 * len(written & face.model_fields.keys()) >= len(written) else None


def face_of(catalog: Registry, section: Section, kind: str) -> Any:
    """The face of a kind; None if it cannot be imported."""
    with suppress(RunnerError):
        return catalog.get(section, kind)
    return None


def stages(root: Node, name: Section, catalog: Registry, problems: list[Problem]) -> dict[str, StageConfig | None]:
    """The stages of a section that are on, in the order of attaching; None instead of settings that are not valid."""
    found: dict[str, StageConfig | None] = {}
    section, known = root.get(name) or replace(root, value={}), catalog.kinds(name)
    if not isinstance(section.value, dict):
        problems.append(Problem(section.place, name, f"should be a mapping of stages, got {section.shown}"))
        return found
    for kind, node in section.value.items():
        path = f"{name}.{kind}"
        is_switch = isinstance(node.value, bool | str) and node.value in _SWITCH
        if kind not in known:
            hint = "" if nearest(kind, known) else _PLUGIN_HINT
            problems.append(Problem(node.anchor, path, f"unknown stage{suggestion(kind, known)}{hint}"))
        elif not is_switch and not (isinstance(node.value, dict) and node.value):
            given = "an empty mapping" if node.value == {} else node.shown
            problems.append(Problem(node.place, path, f"should be on, off or its settings, got {given}"))
        elif not is_switch or _SWITCH[node.value]:
            found[kind] = None
            try:
                face = catalog.get(name, kind)
            except RunnerError as error:
                problems.append(Problem(node.anchor, path, str(error)))
            else:
                if missing := lacking(face):
                    problems.append(Problem(node.anchor, path, missing))
                found[kind] = fill(face, replace(node, value={}) if is_switch else node, path, problems)
    return dict(sorted(found.items(), key=lambda item: (item[1].phase if item[1] else 0, item[0])))


def optimizers(
    root: Node, model: LearnerConfig | None, catalog: Registry, problems: list[Problem]
) -> dict[str, OptimizerSettings]:
    """Returns the optimizer of every role of a learner, from one section for all roles or one for each.

    Without a valid learner, the section is validated for the learner that was probably meant.
    """
    if model is None:
        guess = _face_meant(root, catalog)
        if guess is None:
            _validate_unknown_roles(root, problems)
            return {}
    found: dict[str, OptimizerSettings] = {}
    nothing = replace(root, value={})
    section, roles = root.get("optimizer") or nothing, model.roles if model is not None else guess.roles
    mixed = [key for key in section.children if key not in roles]
    by_role = len(mixed) < len(section.children)
    if by_role and mixed:
        keys = ", ".join(f"optimizer.{role}.{mixed[0]}" for role in roles)
        message = f"settings are given for each role here; write {keys}"
        problems.append(Problem(section.children[mixed[0]].anchor, f"optimizer.{mixed[0]}", message))
        return found
    for role, default in roles.items():
        node, path = (section.get(role) or nothing, f"optimizer.{role}") if by_role else (section, "optimizer")
        usual = default.get("kind", "adamw")
        named = _kind_of(node, path, kinds(), problems, usual)
        if named is None or str(named[0].value) not in kinds():
            continue
        kind, rest = named
        # Another optimizer has other scales.
        kept = {key: value for key, value in default.items() if key in OWN or (kind.value == usual and key != "kind")}
        base = parse(json.dumps(kept), f"default of role {role}", problems)
        filled = replace(rest, value={**base.children, **rest.children})
        settings = fill(settings_of(str(kind.value)), filled, path, problems)
        if settings is not None:
            found[role] = settings
    return found


def _face_meant(root: Node, catalog: Registry) -> Any:
    """Returns the face of the learner that a recipe names or misspells; None without a similar name."""
    kind = root.get("model", "kind")
    known = catalog.kinds("model")
    name = "" if kind is None else str(kind.value)
    meant = name if name in known else nearest(name, known)
    return None if meant is None else face_of(catalog, "model", meant)


def _validate_unknown_roles(root: Node, problems: list[Problem]) -> None:
    """Validates the optimizers of a learner that is unknown, as far as that is possible without it."""
    section = root.get("optimizer")
    if section is None:
        return
    known = {key for kind in kinds() for key in settings_of(kind).model_fields}
    is_by_role = bool(section.children) and not section.children.keys() & (known | {"kind"})
    parts = {f"optimizer.{role}": node for role, node in section.children.items()} if is_by_role else {}
    certain: list[Problem] = []
    for path, node in (parts or {"optimizer": section}).items():
        named = _kind_of(node, path, kinds(), certain, "adamw")
        if named is not None and str(named[0].value) in kinds():
            fill(settings_of(str(named[0].value)), named[1], path, certain)
            # The learner's default may be another optimizer, which has other settings.
            if "kind" not in node.children:
                certain = [item for item in certain if item.path.rpartition(".")[2] not in known or _is_value(item)]
    problems += certain


def _is_value(problem: Problem) -> bool:
    """Returns whether a problem is about a value and not about an unknown key."""
    return not problem.message.startswith("unknown key")


def _kind_of(
    node: Node, path: str, known: Collection[str], problems: list[Problem], default: str | None = None, hint: str = ""
) -> tuple[Node, Node] | None:
    """Returns the kind that a section names, known or not, and the rest of it; None if it names none.

    The hint follows the message about an unknown kind.
    """
    if not isinstance(node.value, dict):
        problems.append(Problem(node.place, path, f"should be a mapping with a kind, got {node.shown}"))
        return None
    rest = dict(node.value)
    kind = rest.pop("kind", None if default is None else Node(default, node.place))
    if kind is None:
        problems.append(Problem(node.anchor, f"{path}.kind", f"is missing: one of {', '.join(known)}"))
        return None
    if str(kind.value) not in known:
        message = f"unknown kind {kind.shown}{suggestion(str(kind.value), known)}"
        message += hint
        problems.append(Problem(kind.place, f"{path}.kind", message))
    return kind, replace(node, value=rest)


def secrets_of(recipe: Recipe, document: Node) -> Iterator[Node]:
    """The scalars in a document that are written where a recipe's plugins declare secrets."""
    switches = document.get("optimization") or document
    sections: list[tuple[Config, Node | None]] = [
        (recipe.model, document.get("model")),
        (recipe.data, document.get("data")),
    ]
    sections += [(stage, switches.get(kind)) for kind, stage in recipe.stages.items()]
    sections += [(stage, document.get("inference", kind)) for kind, stage in recipe.inference.items()]
    for config, node in sections:
        if node is not None:
            yield from secret_nodes([type(config)], node)


def secret_nodes(declared: Sequence[Any], node: Node) -> Iterator[Node]:
    """The scalars in a node of one of these types that are written where one of them has a ``SecretStr``."""
    if node.spelled and any(each in (SecretStr, SecretBytes) for each in declared):
        yield node
    for key, child in node.children.items():
        yield from secret_nodes(_types_at(declared, key) or declared, child)


def _problem(error: ErrorDetails, model: type[Config], node: Node, path: str, others: Iterable[str]) -> Problem:
    parts, found, missing = _walk(node, error["loc"])
    dotted = ".".join([path, *parts] if path else parts)
    kind = error["type"]
    if kind == "extra_forbidden":
        known = _keys_at(model, error["loc"][:-1])
        hint = suggestion(parts[-1], known.union(others) if len(parts) == 1 else known)
        return Problem(found.anchor, dotted, model.elsewhere.get(parts[-1], f"unknown key{hint}"))
    if kind == "missing" and isinstance(missing, int):
        return Problem(found.place, dotted, f"needs at least {missing + 1} items")
    if kind == "missing" and missing is not None:
        return Problem(found.anchor, f"{dotted}.{missing}" if dotted else str(missing), "is missing")
    if kind not in ("union_tag_invalid", "union_tag_not_found"):
        return Problem(found.place, dotted, _message(error, found))
    discriminator = error["ctx"]["discriminator"].strip("'")
    tag = found.get(discriminator)
    if tag is None:
        return Problem(found.anchor, f"{dotted}.{discriminator}", "is missing: it determines the other settings")
    hint = suggestion(str(tag.value), _QUOTED.findall(error["ctx"]["expected_tags"]))
    return Problem(tag.place, f"{dotted}.{discriminator}", f"unknown {discriminator} {tag.shown}{hint}")


def _message(error: ErrorDetails, found: Node) -> str:
    message = error["msg"]
    if error["type"] in ("value_error", "assertion_error"):
        return message.partition(", ")[2]
    for theirs, ours in _WORDING:
        message = message.replace(theirs, ours)
    if not message.startswith("should"):
        return message[0].lower() + message[1:]
    message += f", got {found.shown}"
    is_quoted = isinstance(found.value, str) and isinstance(resolve(found.value), int | float)
    if error["type"] in ("int_type", "float_type") and is_quoted:
        return f"{message} - remove the quotes"
    is_choice = error["type"] == "literal_error" and isinstance(found.value, str)
    near = nearest(str(found.value), _QUOTED.findall(error["ctx"]["expected"])) if is_choice else None
    return f"{message} - did you mean '{near}'?" if near else message


def _walk(node: Node, loc: tuple[int | str, ...]) -> tuple[list[str], Node, int | str | None]:
    """The keys of a location that are in the document, the node they lead to, and the last one if it leads nowhere.

    Names of union members are skipped, because they are not part of the document.
    """
    parts: list[str] = []
    missing: int | str | None = None
    for part in loc:
        child = node.children.get(part)
        missing = part if child is None else None
        if child is not None:
            node = child
            parts.append(str(part))
    return parts, node, missing


def _keys_at(model: type[Config], loc: tuple[int | str, ...]) -> set[str]:
    """Returns the keys of the models at a location; the name of a union member selects one."""
    types: list[Any] = [model]
    for part in loc:
        types = _types_at(types, part) or [each for each in _models_in(types) if part in _tags(each)] or types
    return {name for each in _models_in(types) for name in each.model_fields}


def _types_at(types: Iterable[Any], part: int | str) -> list[Any]:
    """The types of a field of models among these types."""
    fields = [each.model_fields[str(part)] for each in _models_in(types) if part in each.model_fields]
    return [found for field in fields for found in _types_in(field.annotation)]


def _types_in(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [found for each in inner for found in _types_in(each)] if inner else [annotation]


def _models_in(types: Iterable[Any]) -> list[type[BaseModel]]:
    return [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]


def _tags(model: type[BaseModel]) -> set[Any]:
    return {model.__name__, *(tag for field in model.model_fields.values() for tag in get_args(field.annotation))}
