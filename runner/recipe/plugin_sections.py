"""The sections of a recipe that plugins define."""

from dataclasses import replace
from typing import Any

from runner.api import Config, StageConfig
from runner.plugin.files import Anchor, anchored
from runner.recipe.catalog import Catalog, Section
from runner.recipe.constraints import Draft
from runner.recipe.errors import Place, Problem, nearest, suggestion
from runner.recipe.fill import display, fill
from runner.recipe.yaml_nodes import Node
from runner.system.errors import RunnerError

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
