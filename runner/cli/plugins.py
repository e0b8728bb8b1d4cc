"""Verbs that look at the registry: ``plugins`` and ``schema``."""

import inspect
import json
import re
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer

from runner.cli.common import JsonOption, PluginOption, open_registry, print_json
from runner.system.errors import RunnerError, UsageError

if TYPE_CHECKING:
    from runner.plugin.registry import Registry
    from runner.recipe.catalog import Section

_FACTS = ("learns_from", "roles", "provides", "units", "phase", "contract", "promise", "replaces", "wraps", "requires")
"""What a card shows above the settings."""
MEASURED = "measured.json"

KindArgument = Annotated[str | None, typer.Argument(metavar="[KIND]", help="Show the card of this plugin.")]


def add_to(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command()(plugins)
    app.command()(schema)


def plugins(kind: KindArgument = None, plugin: PluginOption = None, as_json: JsonOption = False) -> None:
    """List the plugins, or show the card of one: what it does, when it helps, when it hurts, its settings.

    [bold]runner plugins amp[/]
    """
    from runner.recipe.catalog import SECTIONS
    from runner.system.names import suggestion

    registry = open_registry(plugin)
    names = [(section, each) for section in SECTIONS for each in registry.kinds(section)]
    cards = [_card(section, each, registry) for section, each in names if kind in (None, each)]
    if not cards and kind is not None:
        raise UsageError(f"no plugin is called '{kind}'{suggestion(kind, [each for _, each in names])}")
    if as_json:
        print_json({"plugins": cards})
    elif kind is None:
        _print_list(cards)
    else:
        for card in cards:
            _print_card(card)


def schema(plugin: PluginOption = None) -> None:
    """Print the JSON Schema of recipes, from the plugins that are registered.

    [bold]runner schema > recipe.schema.json[/]
    """
    from runner.recipe.schema import schema as recipe_schema

    typer.echo(json.dumps(recipe_schema(open_registry(plugin)), indent=2, ensure_ascii=False))


def _card(section: "Section", kind: str, registry: "Registry") -> dict[str, Any]:
    """Everything that is known about a plugin without running it."""
    card = {"section": section, "kind": kind, "provider": str(registry.provider(section, kind))}
    try:
        face = registry.get(section, kind)
    except RunnerError as error:
        return card | {"error": str(error)}
    card["card"] = inspect.getdoc(face) or ""
    return card | _facts(section, face) | {"settings": _settings(face)}


def _facts(section: "Section", face: Any) -> dict[str, Any]:
    """What a sort of plugin has beside its settings."""
    from runner.plugin.progress import UNITS

    if section == "model":
        return {"learns_from": face.learns_from, "roles": {role: dict(own) for role, own in face.roles.items()}}
    if section == "data":
        return {"provides": face.provides, "units": [unit for unit in UNITS if unit in face.units]}
    return {
        "phase": face.phase,
        "contract": _contracts(face),
        "promise": inspect.getdoc(face.contract) or "",
        "replaces": sorted(face.claims),
        "wraps": sorted(face.wraps),
        "requires": list(face.requires),
        "measured": _measured(face),
    }


def _contracts(face: Any) -> list[str]:
    """What a stage may promise, from its signature: which of it depends on the recipe and the device."""
    from runner.plugin.contract import Contract

    written = str(inspect.signature(face.contract).return_annotation)
    names = [each.__name__ for each in get_args(Contract)]
    return [name for name in names if re.search(rf"\b{name}\b", written)] or names


def _measured(face: type) -> list[dict[str, Any]]:
    """What a stage was worth where its authors measured it: their ``measured.json`` beside its module."""
    figures = Path(inspect.getfile(face)).with_name(MEASURED)
    found: dict[str, list[dict[str, Any]]] = json.loads(figures.read_text()) if figures.exists() else {}
    return found.get(getattr(face, "kind", ""), [])


def _settings(model: Any) -> list[dict[str, Any]]:
    """The settings of a plugin: name, type, default and what they mean."""
    from pydantic_core import to_jsonable_python

    settings = []
    for name, field in model.model_fields.items():
        each = {"name": name, "type": _type(field.annotation), "required": field.is_required()}
        if not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
            each["default"] = to_jsonable_python(default)
        settings.append(each | {"description": field.description or ""})
    return settings


def _type(annotation: Any) -> str:
    """``list[int]`` or ``Literal['bf16', 'fp16']``, without the modules' names and without bounds."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inside[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_type, inside))
    if isinstance(origin, type):
        return f"{origin.__name__}[{', '.join(map(_type, inside))}]"
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", name).replace("NoneType", "None").replace("Ellipsis", "...")


def _worth(measured: dict[str, Any]) -> str:
    """``alone 1.22x [1.18, 1.27], beside all others 1.05x [1.02, 1.08]; CASE, MACHINE (EXPERIMENT)``."""
    ways = {"alone": "alone", "together": "beside all others"}
    gains = [f"{ways[way]} {value:.2f}x [{low:.2f}, {high:.2f}]" for way in ways if way in measured
             for value, low, high in [measured[way]]]  # fmt: skip
    where = ", ".join(filter(None, (measured["case"], measured["machine"])))
    return f"{', '.join(gains)}; {where} ({measured['experiment']})"


def _print_list(cards: list[dict[str, Any]]) -> None:
    width = max((len(card["kind"]) for card in cards), default=0)
    for card in cards:
        summary = card["error"] if "error" in card else card["card"].partition("\n")[0]
        phase = f"phase {card['phase']}" if "phase" in card else ""
        typer.echo(f"{card['section']:12}  {card['kind']:{width}}  {phase:7}  {summary}".rstrip())


def _fact(value: Any) -> str:
    from runner.recipe.document import dump_inline

    if isinstance(value, dict):
        return ", ".join(f"{name} {dump_inline(each)}" for name, each in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


def _print_card(card: dict[str, Any]) -> None:
    from runner.recipe.document import dump_inline

    typer.echo(f"{card['section']}.{card['kind']} ({card['provider']})\n")
    if "error" in card:
        typer.echo(card["error"])
        return
    typer.echo(card["card"] + "\n")
    for fact in _FACTS:
        if card.get(fact):
            typer.echo(f"{fact.replace('_', ' ')}: {_fact(card[fact])}")
    for each in card.get("measured", ()):
        typer.echo(f"measured: {_worth(each)}")
    for each in card["settings"]:
        default = "required" if each["required"] else f"default {dump_inline(each['default'])}"
        typer.echo(f"\n{each['name']}: {each['type']}, {default}\n    {each['description']}".rstrip())
