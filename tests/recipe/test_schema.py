import re
from pathlib import Path

import pytest
from faces import FakeCatalog

from runner.ablation.experiment import AblationConfig
from runner.plugin.lr_scheduler import SCHEDULES
from runner.plugin.optimizer import kinds, settings_of
from runner.plugin.progress import UNITS
from runner.recipe.schema import DIALECT, experiment_schema, schema
from runner.study.config import StudyConfig

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


def test_one_optimizer_is_for_all_roles_or_one_for_each_role_of_any_learner():
    one, by_role = SCHEMA["properties"]["optimizer"]["anyOf"]
    assert one == {"$ref": "#/$defs/optimizer"}
    roles = ["discriminator", "generator", "model"]
    assert list(by_role["properties"]) == roles
    assert [role["$ref"] for role in by_role["properties"].values()] == [one["$ref"]] * len(roles)
    assert by_role["additionalProperties"] is False


def test_every_optimizer_offers_the_settings_of_its_signature():
    forms = {form["properties"]["kind"]["const"]: form for form in SCHEMA["$defs"]["optimizer"]["anyOf"]}
    assert forms.keys() == set(kinds())
    for kind, form in forms.items():
        assert form["properties"].keys() == {"kind", *settings_of(kind).model_fields}
        assert form["additionalProperties"] is False
    adam = forms["adam"]["properties"]
    assert adam["betas"]["default"] == [0.9, 0.999]
    assert (adam["betas"]["minItems"], adam["betas"]["maxItems"]) == (2, 2)
    assert (adam["amsgrad"]["type"], adam["amsgrad"]["default"]) == ("boolean", False)
    assert adam["lr"]["type"] == ["number", "string"]  # digits in groups


def test_schedules_are_told_apart_by_their_kind():
    forms = SCHEMA["properties"]["lr_scheduler"]["anyOf"]
    assert [form["properties"]["kind"]["const"] for form in forms] == sorted(SCHEDULES)
    assert all(form["additionalProperties"] is False for form in forms)


def test_a_training_may_be_counted_in_every_unit():
    assert SCHEMA["properties"]["train"]["properties"].keys() >= set(UNITS)


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


@pytest.mark.parametrize(("model", "page"), [(StudyConfig, "study"), (AblationConfig, "ablation")])
def test_files_of_experiments_have_schemas_with_all_that_their_page_explains(model, page):
    found = experiment_schema(model, page.title())
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    (example,) = re.findall(r"```yaml\n(kind: .*?)```", text, re.DOTALL)
    keys = re.findall(r"^(\w+):", example, re.MULTILINE)
    assert set(keys) <= found["properties"].keys()
    assert set(found["required"]) <= set(keys)
    assert found["properties"]["kind"]["const"] == page
    assert found["additionalProperties"] is False
    described = found["properties"] | found["$defs"]
    assert [name for name, each in described.items() if not each.keys() & {"description", "$ref"}] == []


def test_a_study_may_spell_an_objective_as_its_direction_and_group_digits():
    found = experiment_schema(StudyConfig, "Study")
    short, long = found["properties"]["objectives"]["additionalProperties"]["anyOf"]
    assert short["enum"] == ["maximize", "minimize"]
    assert long == {"$ref": "#/$defs/Study.ObjectiveConfig"}
    assert found["$defs"]["Study.BudgetConfig"]["properties"]["trials"]["type"] == ["integer", "string"]
