"""The command ``plugins``: the registered plugins and their cards."""

import inspect
import json
import re
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from typer import Argument

from runner.cli import completion
from runner.cli.common import AsJson, Plugins, print_json, registry_of, tell
from runner.cli.results import results
from runner.system.errors import RunnerError, UsageError
from runner.system.suggestions import suggestion

if TYPE_CHECKING:
    from runner.plugin.registry import Registry, Section

Kind = Annotated[
    str | None,
    Argument(metavar="[KIND]", help="Print the card of this plugin.", autocompletion=completion.kinds),
]
# Facts that a card shows above the settings.
_FACTS = (
    "learns_from",
    "roles",
    "provides",
    "units",
    "phase",
    "contract",
    "promise",
    "replaces",
    "wraps",
    "requires",
)
# Next to the modules of stages: speed-ups that their authors measured.
MEASURED = "measured.json"


def plugins(kind: Kind = None, plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the plugins, or print the card of one: purpose, when it helps, when it hurts, settings.

    [bold]runner plugins amp[/]
    """
    from runner.plugin.registry import SECTIONS

    registry = registry_of(plugin)
    names = [(section, name) for section in SECTIONS for name in registry.kinds(section)]
    cards = [_card(section, name, registry) for section, name in names if kind in (None, name)]
    if not cards and kind is not None:
        raise UsageError(f"unknown plugin '{kind}'{suggestion(kind, [name for _, name in names])}")
    if as_json:
        print_json({"plugins": cards})
        return
    if kind is None:
        _list(cards)
        return
    for title, card in _merged(cards):
        _print(title, card)


def _list(cards: list[dict[str, Any]]) -> None:
    """Prints a line for every plugin: on a terminal in groups with headings, elsewhere with all columns."""
    sections = list(dict.fromkeys(card["section"] for card in cards))
    width = max((len(card["kind"]) for card in cards), default=0)
    heading = ""
    ordered = sorted(cards, key=lambda card: (sections.index(card["section"]), card.get("phase", 0)))
    for card in ordered:
        summary = card["error"] if "error" in card else first_sentence(card["card"])
        phase = f"phase {card['phase']}" if "phase" in card else ""
        # Programs that read the list expect one line for each plugin.
        if not results.stream.isatty():
            tell(f"{card['section']:12}  {card['kind']:{width}}  {phase:7}  {_plain(summary)}".rstrip())
            continue
        group = ", ".join(filter(None, (card["section"], phase)))
        if group != heading:
            tell(f"{'' if not heading else chr(10)}{group}")
            heading = group
        tell(f"  {card['kind']:{width}}  {_plain(summary)}", hang=width + 2)


def first_sentence(card: str) -> str:
    """Returns the first sentence of a docstring on one line."""
    paragraph = " ".join(card.partition("\n\n")[0].split())
    # A period in an abbreviation is followed by a year or a lower-case letter.
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def _merged(cards: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the cards with all their names; a plugin that is registered in two sections has one card."""
    names: list[list[str]] = []
    merged: list[dict[str, Any]] = []
    for card in cards:
        position = _position_of_same(card, merged)
        if position is None:
            position = len(merged)
            merged.append(card)
            names.append([])
        names[position].append(f"{card['section']}.{card['kind']}")
    return [(", ".join(card_names), card) for card_names, card in zip(names, merged, strict=True)]


def _position_of_same(card: dict[str, Any], cards: list[dict[str, Any]]) -> int | None:
    """Returns the index of the card that differs in the section only."""
    facts = {**card, "section": ""}
    for position, candidate in enumerate(cards):
        if {**candidate, "section": ""} == facts:
            return position
    return None


def _plain(text: str) -> str:
    """Returns a docstring without the marks of code, which nothing renders here."""
    return text.replace("``", "")


def _card(section: "Section", kind: str, registry: "Registry") -> dict[str, Any]:
    """Returns everything about a plugin that can be read without running it."""
    card = {"section": section, "kind": kind, "provider": str(registry.provider(section, kind))}
    try:
        face = registry.get(section, kind)
    except RunnerError as error:
        return card | {"error": str(error)}
    return {
        **card,
        "card": inspect.getdoc(face) or "",
        **_facts(section, face),
        "settings": _settings(face),
    }


def _facts(section: "Section", face: Any) -> dict[str, Any]:
    """Returns the facts about a plugin of this section, without its settings."""
    from runner.plugin.contract import Contract
    from runner.plugin.progress import UNITS

    if section == "model":
        roles = {role: dict(defaults) for role, defaults in face.roles.items()}
        return {"learns_from": face.learns_from, "roles": roles}
    if section == "data":
        return {"provides": face.provides, "units": [unit for unit in UNITS if unit in face.units]}
    # Which methods a callback has, only its implementation shows; a schedule has its settings.
    if section in ("callbacks", "lr_scheduler"):
        return {}
    # The annotation names the possible contracts of a stage whose contract depends on recipe and
    # device.
    annotation = str(inspect.signature(face.contract).return_annotation)
    contracts = [contract.__name__ for contract in get_args(Contract)]
    possible_contracts = [name for name in contracts if re.search(rf"\b{name}\b", annotation)]
    promise = re.sub(r"^Returns (``\w+``: )?", "", inspect.getdoc(face.contract) or "")
    figures = Path(inspect.getfile(face)).with_name(MEASURED)
    return {
        "phase": face.phase,
        "contract": possible_contracts or contracts,
        "promise": " ".join(promise.split()),
        "replaces": sorted(face.claims),
        "wraps": sorted(face.wraps),
        "requires": list(face.requires),
        "measured": json.loads(figures.read_text()).get(face.kind, []) if figures.exists() else [],
    }


def _settings(model: Any) -> list[dict[str, Any]]:
    """The settings of a plugin: name, type, default and what they mean."""
    from pydantic_core import to_jsonable_python

    from runner.plugin.descriptions import setting_descriptions

    descriptions = setting_descriptions(model)
    settings = []
    for name, field in model.model_fields.items():
        setting = {"name": name, "type": _type(field.annotation), "required": field.is_required()}
        if not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
            setting["default"] = to_jsonable_python(default)
        setting["description"] = descriptions.get(name, "")
        settings.append(setting)
    return settings


def _type(annotation: Any) -> str:
    """``list[int]`` or ``Literal['bf16', 'fp16']``, without the modules' names and without bounds."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_type, arguments))
    if isinstance(origin, type):
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", name).replace("NoneType", "None").replace("Ellipsis", "...")


def _print(names: str, card: dict[str, Any]) -> None:
    """Prints the card of a plugin."""
    from runner.recipe.dumping import dump_inline

    tell(f"{names} ({card['provider']})\n")
    if "error" in card:
        tell(card["error"])
        return
    tell(_flowing(card["card"]) + "\n")
    for fact in filter(card.get, _FACTS):
        value = card[fact]
        if isinstance(value, dict):
            value = [f"{name} {dump_inline(default)}" for name, default in value.items()]
        text = ", ".join(value) if isinstance(value, list) else _flowing(str(value))
        tell(f"{fact.replace('_', ' ')}: {text}", hang=4)
    for measurement in card.get("measured", ()):
        tell(f"measured: {_worth(measurement)}", hang=4)
    for setting in card["settings"]:
        default = "required" if setting["required"] else f"default {dump_inline(setting['default'])}"
        tell(f"\n{setting['name']}: {setting['type']}, {default}", hang=4)
        if setting["description"]:
            tell("    " + _flowing(setting["description"]))


def _flowing(text: str) -> str:
    """Returns a docstring without marks; on a terminal, paragraphs and list items are single lines."""
    if not results.stream.isatty():
        return _plain(text)
    return _plain(re.sub(r"(?<=\S)\n(?!\s|- |[A-Z][a-z ]+: )", " ", text))


def _worth(measured: dict[str, Any]) -> str:
    """Formats a measured speed-up with case, machine, method, date and experiment."""
    labels = {"alone": "alone", "together": "with all others"}
    gains = []
    for key, label in labels.items():
        if key in measured:
            ratio, low, high = measured[key]
            gains.append(f"{label} {ratio:.2f}x [{low:.2f}, {high:.2f}]")
    facts = ("case", "machine", "method", "date")
    conditions = ", ".join(measured[name] for name in facts if measured[name])
    return f"{', '.join(gains)}; {conditions} ({measured['experiment']})"
