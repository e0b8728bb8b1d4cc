"""The reference pages contain every command, option, key, plugin and MLflow field of the program."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from running import train_here
from typer.main import get_command

from runner.ablation.experiment import AblationConfig
from runner.cli import app
from runner.plugin.registry import Registry
from runner.recipe.schema import experiment_schema, schema
from runner.study.config import StudyConfig

ROOT = Path(__file__).parents[1]
REFERENCE = runpy.run_path(str(ROOT / ".ci" / "reference.py"))
SCHEMAS = {
    "recipe": schema(Registry()),
    "study": experiment_schema(StudyConfig, "Study"),
    "ablation": experiment_schema(AblationConfig, "Ablation"),
}


def page_of(generator: str) -> str:
    text: str = REFERENCE["GENERATORS"][generator]()
    return text


def properties_of(node: Any, document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every property of a JSON Schema, at any depth; alternatives of one section count as one each."""
    if isinstance(node, list):
        for item in node:
            yield from properties_of(item, document)
    if not isinstance(node, dict):
        return
    for name, value in node.get("properties", {}).items():
        if "const" not in value:
            yield name, value
    for keyword, value in node.items():
        children = value.values() if keyword in ("properties", "$defs") else [value]
        if keyword not in ("const", "default", "enum", "examples"):
            yield from properties_of(list(children), document)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_property_of_a_schema_has_a_description(kind):
    document = SCHEMAS[kind]
    properties = list(properties_of(document, document))
    assert len(properties) > 10

    def description(value):
        # pydantic omits the description of a field that repeats the docstring of its section.
        inner = document["$defs"][value["$ref"].removeprefix("#/$defs/")] if "$ref" in value else {}
        return value.get("description") or inner.get("description")

    assert [name for name, value in properties if not description(value)] == []


def test_every_command_and_option_is_in_the_reference():
    text = page_of("commands")
    commands = list(REFERENCE["walk_commands"](get_command(app), "runner"))[1:]
    assert len(commands) > 25
    for name, command in commands:
        section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert section.strip(), name
        if getattr(command, "commands", None):
            continue
        for parameter in command.params:
            names = [option for option in parameter.opts if option.startswith("-")]
            assert all(f"`{option}`" in section for option in names), (name, names)
            assert parameter.help, (name, parameter.name)
        assert section.count("\n| `") == len(command.params), name


def test_every_key_is_in_the_reference():
    pages = {
        "recipe": page_of("recipe_keys") + page_of("cards"),
        "study": page_of("study_keys"),
        "ablation": page_of("ablation_keys"),
    }
    for kind, document in SCHEMAS.items():
        keys = {
            word for key in re.findall(r"^\| `([^`]+)`", pages[kind], re.MULTILINE) for word in re.split(r"\W+", key)
        }
        keys |= set(re.findall(r"^#+ (?:\w+\.)?(\w+)", pages[kind], re.MULTILINE))
        roles = {name for name, value in properties_of(document, document) if value.get("$ref") == "#/$defs/optimizer"}
        missing = {name for name, _ in properties_of(document, document)} - keys - roles
        assert missing == set(), kind


def test_every_plugin_has_a_card():
    text = page_of("cards")
    registry = Registry()
    names = [f"{section}.{kind}" for section in REFERENCE["SECTIONS"] for kind in registry.kinds(section)]
    assert len(names) > 50
    assert [name for name in names if f"### {name} {{#{name.replace('.', '')}}}" not in text] == []


def test_every_generator_fills_one_page():
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    markers = [name for page in pages for name in REFERENCE["MARKER"].findall(page)]
    assert sorted(markers) == sorted(REFERENCE["GENERATORS"])


def test_every_field_of_a_run_is_explained(migrated_workspace):
    listed = re.findall(r"`([\w./]+)`", (ROOT / "docs" / "mlflow_fields.md").read_text())
    patterns = [re.escape(name).replace(r"\.\.\.", r"\w+") for name in listed]
    result = train_here("digits_classifier", "train.epochs=1")
    run = mlflow.MlflowClient(result.tracking_uri).get_run(result.run_id)
    fields = [*run.data.metrics, *run.data.tags]
    assert len(fields) > 20
    unexplained = [name for name in fields if not any(re.fullmatch(pattern, name) for pattern in patterns)]
    assert [name for name in unexplained if not name.startswith("mlflow.")] == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "integer", "minimum": 1}, "whole number ≥ 1"),
        ({"type": ["number", "string"], "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "number > 0, < 1"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"enum": ["on", "off"]}, "`on` or `off`"),
        ({"type": "array", "items": {"type": "number"}}, "list of number"),
        ({"$ref": "#/$defs/Part"}, "section"),
    ],
)
def test_types_are_written_in_words(value, words):
    assert REFERENCE["type_of"](value, {"$defs": {"Part": {"type": "object"}}}) == words


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("One.\n\nTwo ``x``.", "One.\n\nTwo `x`."),
        ("The folder [bold].runner/runs[/] of a run.", "The folder `.runner/runs` of a run."),
        ("A list [1, 2].", "A list [1, 2]."),
    ],
)
def test_help_becomes_markdown(text, markdown):
    assert REFERENCE["markdown_of"](text) == markdown


def test_every_example_is_in_the_reference():
    text = page_of("commands")
    commands = list(REFERENCE["walk_commands"](get_command(app), "runner"))[1:]
    examples = [example for _, command in commands for example, _ in command.examples]
    assert len(examples) > 20
    assert [example for example in examples if f"$ {example}" not in text] == []
