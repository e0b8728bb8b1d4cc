"""Fills the reference pages of the site from the program: a hook of mkdocs.

A page that contains the line ``<!-- reference: NAME -->`` has it replaced by the output of the
generator of that name. The hook also ranks reports of measurements low in the search.
"""

import json
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from runner.cli import app

MARKER = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)
SEARCH_BOOST = {
    "docs/recipe_keys.md": 3,
    "docs/resume.md": 0.3,
    "experiments/": 0.05,
    "CHANGELOG.md": 0.05,
    "docs/security.md": 0.5,
}
"""Rank in the search, by the beginning of a page's path; other pages have 1."""
SECTIONS = {
    "model": "Models",
    "data": "Data sources",
    "lr_scheduler": "Schedules of learning rates",
    "optimization": "Stages of a training",
    "inference": "Stages of a trained model",
    "callbacks": "Callbacks",
}
FACTS = {
    "learns_from": "learns from",
    "provides": "provides",
    "units": "counted in",
    "roles": "roles",
    "phase": "phase",
    "contract": "contract",
    "promise": "promise",
    "requires": "requires",
    "replaces": "replaces the slots",
    "wraps": "wraps the slots",
}
"""Facts that a card shows above the settings, with their titles."""

Json = dict[str, Any]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the marker of a page and sets its rank in the search."""
    for beginning, boost in SEARCH_BOOST.items():
        if page.file.src_uri.startswith(beginning):
            page.meta.setdefault("search", {"boost": boost})
    return MARKER.sub(lambda marker: GENERATORS[marker[1]](), markdown)


def commands() -> str:
    """Returns every command with its help, arguments and options."""
    lines: list[str] = []
    for name, command in walk_commands(get_command(app), "runner"):
        if name == "runner":
            continue
        lines += [f"## {name}", "", markdown_of(command.help or ""), ""]
        lines += [examples_block(command.examples), ""] if command.examples else []
        if getattr(command, "commands", None):
            continue
        rows = [parameter_row(parameter) for parameter in command.params]
        lines += [table(("argument or option", "default", "description"), rows), ""]
    return "\n".join(lines)


def walk_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields every command with its full name, groups before their members."""
    yield name, command
    for word, child in getattr(command, "commands", {}).items():
        yield from walk_commands(child, f"{name} {word}")


def markdown_of(markup: str) -> str:
    """Returns text in the markup of rich as Markdown: what is bold becomes code."""
    return without_rst(re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", markup))


def examples_block(examples: list[tuple[str, str]]) -> str:
    """Returns the examples of a command, each with its description as a comment."""
    lines = [f"$ {command}" + (f"   # {description}" if description else "") for command, description in examples]
    return "\n".join(["```console", *lines, "```"])


def parameter_row(parameter: Any) -> tuple[str, str, str]:
    """Returns names, default and description of an argument or option."""
    names = ", ".join(f"`{name}`" for name in parameter.opts if name.startswith("-"))
    if not names:
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    elif parameter.metavar:
        names += f" `{parameter.metavar}`"
    annotation = parameter.type_descriptor.annotation
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        names += ": " + ", ".join(f"`{choice.value}`" for choice in annotation)
    default = parameter.default
    if isinstance(default, Enum):
        default = default.value
    shown = "required" if parameter.required else ""
    if default not in (None, False, "", [], ()) and parameter.show_default:
        shown = f"`{default}`"
    return names, shown, markdown_of(parameter.help or "")


def recipe_keys() -> str:
    """Returns the keys of recipes; those of plugins are on their cards."""
    schema = json_of("schema")
    sections = schema["properties"]
    plain = {name: sections[name] for name in ("name", "extends", "seed", "device")}
    lines = ["## The whole recipe", "", keys_table(plain, schema), ""]
    for name in ("model", "data"):
        kinds = ", ".join(f"[`{kind}`](cards.md#{name}{kind})" for kind in kinds_of(sections[name]))
        lines += [f"## {name}", "", f"{sections[name]['description']} `{name}.kind` is one of {kinds}.", ""]
    for name in ("train", "tracking", "system", "serve"):
        lines += [f"## {name}", "", sections[name].get("description", ""), ""]
        lines += [keys_table(sections[name]["properties"], schema, f"{name}."), ""]
    lines += ["## lr_scheduler", "", sections["lr_scheduler"]["description"], ""]
    lines += forms("lr_scheduler", sections["lr_scheduler"]["anyOf"], schema)
    lines += ["## optimizer", "", sections["optimizer"]["description"], ""]
    lines += forms("optimizer", schema["$defs"]["optimizer"]["anyOf"], schema)
    for name in ("optimization", "inference"):
        stages = ", ".join(f"[`{kind}`](cards.md#{name}{kind})" for kind in sections[name]["properties"])
        lines += [f"## {name}", "", f"{sections[name]['description']} The stages: {stages}.", ""]
    lines += ["## callbacks", "", sections["callbacks"]["description"], ""]
    return "\n".join(lines)


def study_keys() -> str:
    """Returns the keys of files of studies."""
    return experiment_keys("study")


def ablation_keys() -> str:
    """Returns the keys of files of ablations."""
    return experiment_keys("ablation")


def experiment_keys(kind: str) -> str:
    """Returns the keys of one kind of file."""
    schema = json_of("schema", kind)
    return keys_table(schema["properties"], schema, required=schema["required"])


def cards() -> str:
    """Returns the cards of all plugins: what they are for, their promise, their settings."""
    schema = json_of("schema")
    lines: list[str] = []
    section = ""
    for card in json_of("plugins", "--json")["plugins"]:
        if card["section"] != section:
            section = card["section"]
            lines += [f"## {SECTIONS[section]}", ""]
        name = f"{section}.{card['kind']}"
        lines += [f"### {name} {{#{section}{card['kind']}}}", "", card_text(card["card"]), ""]
        lines += [table(("property", "value"), list(facts(card))), ""]
        settings = settings_of(schema, section, card["kind"])
        for setting in card["settings"]:
            if "default" in setting and setting["name"] in settings:
                settings[setting["name"]].setdefault("default", setting["default"])
        if settings:
            lines += [keys_table(settings, schema), ""]
    return "\n".join(lines)


def card_text(text: str) -> str:
    """Returns the text of a card; when it helps and when it hurts are paragraphs."""
    return without_rst(re.sub(r"\n(?=When it )", "\n\n", text))


def facts(card: Json) -> Iterator[tuple[str, str]]:
    """Yields title and value of everything that a card has above the settings."""
    for name, title in FACTS.items():
        value = card.get(name)
        if isinstance(value, dict):
            value = list(value)
        if isinstance(value, list):
            value = ", ".join(f"`{item}`" for item in value)
        if value:
            yield title, without_rst(str(value))
    for figure in card.get("measured", ()):
        gains = [
            "{} {:.2f}x [{:.2f}, {:.2f}]".format(name, *figure[key])
            for key, name in (("alone", "alone"), ("together", "in addition to all others"))
            if key in figure
        ]
        facts = ("case", "machine", "method", "date")
        circumstances = ", ".join(figure[name] for name in facts if figure[name])
        folder = figure["experiment"]
        yield "measured", f"{', '.join(gains)}; {circumstances} ([{folder}](../{folder}/README.md))"


def settings_of(schema: Json, section: str, kind: str) -> Json:
    """Returns the schema of a plugin's settings, by name."""
    part = schema["properties"][section]
    if "properties" in part:
        alternatives = part["properties"][kind].get("anyOf", [{}])
        settings: Json = alternatives[-1].get("properties", {})
        return settings
    form = next(form for form in part["anyOf"] if form["properties"]["kind"]["const"] == kind)
    return {name: value for name, value in form["properties"].items() if name != "kind"}


def kinds_of(section: Json) -> list[str]:
    """Returns the kinds that a section offers."""
    return [form["properties"]["kind"]["const"] for form in section["anyOf"]]


def forms(name: str, alternatives: list[Json], schema: Json) -> list[str]:
    """Returns one table for each kind of a section."""
    lines: list[str] = []
    for form in alternatives:
        kind = form["properties"]["kind"]["const"]
        lines += [f"### {name}: {kind}", "", form.get("description", ""), ""]
        settings = {key: value for key, value in form["properties"].items() if key != "kind"}
        lines += [keys_table(settings, schema, f"{name}."), ""]
    return lines


def keys_table(properties: Json, schema: Json, prefix: str = "", required: list[str] | None = None) -> str:
    """Returns a table of keys with type, default and meaning."""
    rows = list(key_rows(properties, schema, prefix, required or []))
    return table(("key", "type", "default", "meaning"), rows)


def key_rows(properties: Json, schema: Json, prefix: str, required: list[str]) -> Iterator[tuple[str, ...]]:
    """Yields a row for every key, followed by the keys inside its value."""
    for name, value in properties.items():
        default = f"`{json.dumps(value['default'])}`" if "default" in value else ""
        if name in required:
            default = "required"
        description = value.get("description") or next(
            (inner["description"] for inner in sections_in(value, schema) if "description" in inner), ""
        )
        yield f"`{prefix}{name}`", type_of(value, schema), default, without_rst(description)
        infix = ".NAME" if "additionalProperties" in value and "properties" not in value else ""
        for inner in sections_in(value, schema):
            yield from key_rows(
                inner["properties"],
                schema,
                f"{prefix}{name}{infix}{'[]' * ('items' in value)}.",
                inner.get("required", []),
            )


def sections_in(value: Json, schema: Json) -> Iterator[Json]:
    """Yields the schemas of the mappings that a value may be, or may contain as items."""
    if "$ref" in value:
        yield from sections_in(schema["$defs"][value["$ref"].removeprefix("#/$defs/")], schema)
    elif "properties" in value:
        yield value
    for alternative in value.get("anyOf", []):
        yield from sections_in(alternative, schema)
    for keyword in ("items", "additionalProperties"):
        if isinstance(value.get(keyword), dict) and "properties" not in value:
            yield from sections_in(value[keyword], schema)


def type_of(value: Json, schema: Json) -> str:
    """Returns a type in words: ``a number ≥ 1``, ``cpu or cuda``, ``a list of numbers``."""
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return " or ".join(f"`{json.dumps(choice).strip(chr(34))}`" for choice in value["enum"])
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(type_of(alternative, schema) for alternative in value["anyOf"]))
    if "$ref" in value:
        return type_of(schema["$defs"][value["$ref"].removeprefix("#/$defs/")], schema)
    types = value.get("type", "any")
    name = types[0] if isinstance(types, list) else types
    if name == "array":
        return f"list of {type_of(value.get('items', {}), schema)}"
    words = {"object": "section", "null": "null", "integer": "whole number", "boolean": "`true` or `false`"}
    bounds = [
        f"{sign} {value[keyword]:,}"
        for keyword, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if keyword in value
    ]
    return " ".join([words.get(name, name), ", ".join(bounds)]).strip()


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns a table in Markdown, or nothing without rows."""
    if not rows:
        return ""
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines)


def cell(text: str) -> str:
    """Returns text that fits into one cell of a table."""
    return re.sub(r"\s*\n\s*", " ", text).replace("|", "\\|")


def without_rst(text: str) -> str:
    """Returns a docstring as Markdown."""
    return text.replace("``", "`")


@cache
def json_of(*words: str) -> Json:
    """Returns what a command prints as JSON."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    document: Json = json.loads(result.stdout)
    return document


GENERATORS = {
    "commands": commands,
    "recipe_keys": recipe_keys,
    "study_keys": study_keys,
    "ablation_keys": ablation_keys,
    "cards": cards,
}
