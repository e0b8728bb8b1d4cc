from __future__ import annotations

from typing import ClassVar

from pydantic import Field, create_model

from runner.plugin.config import Config
from runner.plugin.descriptions import setting_descriptions


class Base(Config):
    """A class with a description of every kind."""

    width: int = 1
    """Of the hidden
    layers."""
    unclear: int = 1
    explicit: int = Field(1, description="Described in its field.")
    """Described in the source."""
    note: str = ""
    kind: ClassVar[str] = "base"
    """No setting."""
    "Not below an annotated name."


class Derived(Base):
    width: int = 2
    unclear: int = 2
    """Described in the derived class."""
    note: str = ""
    """Text of a note."""

    class Inner(Config):
        depth: int = 1
        """Of a nested class."""

    inner: Inner = Inner()
    """A section."""


BASE = {"width": "Of the hidden\nlayers.", "explicit": "Described in its field."}
DERIVED = {**BASE, "unclear": "Described in the derived class.", "note": "Text of a note.", "inner": "A section."}


def test_descriptions_are_the_docstrings_below_fields_of_a_class_and_its_bases():
    assert setting_descriptions(Base) == BASE
    assert setting_descriptions(Derived) == DERIVED
    assert setting_descriptions(Derived.Inner) == {"depth": "Of a nested class."}


def test_a_class_in_a_function_or_a_branch_has_descriptions():
    if BASE:

        class Local(Base):
            rate: float = 0.1
            """Of a local class."""

    assert setting_descriptions(Local) == {**BASE, "rate": "Of a local class."}


def test_a_class_without_source_has_those_of_its_bases():
    made = create_model("Made", __base__=Derived, width=(int, 3), other=(int, 3))
    assert setting_descriptions(made) == DERIVED


def test_a_schema_has_the_descriptions_of_sections_and_their_settings():
    schema = Derived.model_json_schema()
    described = {name: form["description"] for name, form in schema["properties"].items() if "description" in form}
    assert described == DERIVED
    assert schema["$defs"]["Inner"]["properties"]["depth"]["description"] == "Of a nested class."
