"""Fills the settings of the optimizers of a recipe, one for every role of its learner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner.plugin.optimizer import (
    ROLE_SETTINGS,
    RUNNER_SETTINGS,
    OptimizerSettings,
    kinds,
    settings_of,
)
from runner.recipe.plain_nodes import plain_node
from runner.recipe.validation import face_of, fill, split_kind
from runner.recipe.yaml_nodes import Node, Place, Problem
from runner.system.suggestions import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.plugin.configs import LearnerConfig
    from runner.plugin.registry import Registry

_USUAL_KIND = "adamw"


def optimizers(
    root: Node, model: LearnerConfig | None, catalog: Registry, problems: list[Problem]
) -> dict[str, OptimizerSettings]:
    """Returns the optimizer of every role of a learner, from one section for all roles or one for
    each.

    Without a valid learner, the section is validated for the learner that was probably meant.
    """
    learner: Any = model if model is not None else _face_meant(root, catalog)
    if learner is None:
        _validate_unknown_roles(root, problems)
        return {}

    roles: Mapping[str, Any] = learner.roles
    empty = replace(root, value={})
    section = root.get("optimizer") or empty
    settings_of_all = [key for key in section.children if key not in roles]
    has_roles = len(settings_of_all) < len(section.children)
    if has_roles and settings_of_all:
        key = settings_of_all[0]
        paths = ", ".join(f"optimizer.{role}.{key}" for role in roles)
        message = f"settings are given for each role here; write {paths}"
        problems.append(
            Problem(section.children[key].anchor, f"optimizer.{key}", message)
        )
        return {}
    shared = [key for key in ROLE_SETTINGS if key in section.children]
    if shared and not has_roles and len(roles) > 1:
        key = shared[0]
        paths = ", ".join(f"optimizer.{role}.{key}" for role in roles)
        message = f"concerns the parameters of one role; write {paths}"
        problems.append(
            Problem(section.children[key].anchor, f"optimizer.{key}", message)
        )
        return {}

    result: dict[str, OptimizerSettings] = {}
    for role, default in roles.items():
        node = section.get(role) or empty if has_roles else section
        path = f"optimizer.{role}" if has_roles else "optimizer"
        settings = _optimizer(
            node,
            path,
            role,
            default,
            problems,
        )
        if settings is not None:
            result[role] = settings
    return result


def _optimizer(
    node: Node,
    path: str,
    role: str,
    default: Mapping[str, Any],
    problems: list[Problem],
) -> OptimizerSettings | None:
    """Returns the optimizer of one role, with the learner's defaults; None if it is not valid."""
    default_kind = default.get("kind", _USUAL_KIND)
    kind_and_settings = split_kind(node, path, kinds(), problems, default_kind)
    if kind_and_settings is None:
        return None
    kind, settings = kind_and_settings
    if str(kind.value) not in kinds():
        return None
    # Another optimizer has other scales, so it does not get the default learning rates.
    is_default_kind = kind.value == default_kind
    inherited = set(RUNNER_SETTINGS) - {"groups"}
    defaults = {
        key: value
        for key, value in default.items()
        if key in inherited or (is_default_kind and key != "kind")
    }
    base = plain_node(defaults, Place(f"default of role {role}"))
    complete = replace(settings, value={**base.children, **settings.children})
    return fill(settings_of(str(kind.value)), complete, path, problems)


def _face_meant(root: Node, catalog: Registry) -> Any:
    """Returns the face of the learner that a recipe names or misspells; None without a similar
    name.
    """
    kind = root.get("model", "kind")
    name = "" if kind is None else str(kind.value)
    model_kinds = catalog.kinds("model")
    meant = name if name in model_kinds else nearest(name, model_kinds)
    return None if meant is None else face_of(catalog, "model", meant)


def _validate_unknown_roles(root: Node, problems: list[Problem]) -> None:
    """Validates the optimizers of an unknown learner, as far as that is possible."""
    section = root.get("optimizer")
    if section is None:
        return
    known_keys = {key for kind in kinds() for key in settings_of(kind).model_fields}
    has_roles = bool(section.children) and not section.children.keys() & (
        known_keys | {"kind"}
    )
    nodes = {"optimizer": section}
    if has_roles:
        nodes = {f"optimizer.{role}": node for role, node in section.children.items()}

    certain: list[Problem] = []
    for path, node in nodes.items():
        kind_and_settings = split_kind(
            node,
            path,
            kinds(),
            certain,
            _USUAL_KIND,
        )
        if kind_and_settings is None:
            continue
        kind, settings = kind_and_settings
        if str(kind.value) not in kinds():
            continue
        fill(settings_of(str(kind.value)), settings, path, certain)
        # The learner's default may be another optimizer, which has other settings.
        if "kind" not in node.children:
            certain = [
                problem for problem in certain if _is_certain(problem, known_keys)
            ]
    problems += certain


def _is_certain(problem: Problem, known_keys: set[str]) -> bool:
    """Returns whether a problem does not depend on the kind: a wrong value, or a key that no
    optimizer has.
    """
    key = problem.path.rpartition(".")[2]
    return key not in known_keys or not problem.message.startswith("unknown key")
