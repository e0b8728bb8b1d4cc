from faces import FakeCatalog

from runner.recipe.schema import DIALECT, schema

SCHEMA = schema(FakeCatalog())


def test_sections_offer_their_kinds():
    assert SCHEMA["$schema"] == DIALECT
    assert SCHEMA["additionalProperties"] is False
    data = SCHEMA["properties"]["data"]["anyOf"]
    assert [form["properties"]["kind"] for form in data] == [{"const": "sim"}, {"const": "table"}, {"const": "words"}]
    assert data[0]["description"] == "A simulator."
    assert data[0]["additionalProperties"] is False


def test_fields_carry_their_docstrings():
    assert SCHEMA["properties"]["model"]["anyOf"][0]["properties"]["hidden"]["description"] == "Widths."
    assert "MLflow" in SCHEMA["properties"]["tracking"]["properties"]["experiment"]["description"]


def test_stages_are_switches_or_settings():
    stages = SCHEMA["properties"]["optimization"]["properties"]
    assert stages["merge"] == {"description": "Merges.", "enum": ["on", "off", True, False]}
    switch, settings = stages["cache"]["anyOf"]
    assert switch == {"enum": ["on", "off", True, False]}
    assert settings["properties"]["size"]["minimum"] == 1
    assert settings["minProperties"] == 1


def test_a_plugin_that_cannot_be_imported_accepts_anything():
    assert SCHEMA["properties"]["optimization"]["properties"]["broken"]["anyOf"][1]["type"] == "object"


def test_every_reference_leads_somewhere_and_nothing_is_required():
    def walk(node):
        if isinstance(node, dict):
            assert not isinstance(node.get("required"), list)
            assert "oneOf" not in node
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/$defs/") in SCHEMA["$defs"]
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(SCHEMA)


def test_grouped_digits_are_numbers_for_editors_too():
    size = SCHEMA["properties"]["train"]["properties"]["batch_size"]
    assert size["type"] == ["integer", "string"]
    assert size["pattern"]
