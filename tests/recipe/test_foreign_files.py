"""What a recipe names is read only if it is named as a recipe, and no line of anything else is quoted."""

import pytest
from faces import RECIPE, write_recipe
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runner.recipe.dumping import dump
from runner.recipe.loader import layers
from runner.recipe.lock import read_lock
from runner.recipe.yaml_nodes import RecipeError, read

SECRET = "root:Tr0ub4dor:19000"
CONTENTS = st.sampled_from([
    f"{SECRET}:0:99999:7:::\n{SECRET}\n", f"*{SECRET}\n", f"a: [{SECRET}\n", f"- {SECRET}\n", f"'{SECRET}\n",
    f"!{SECRET} x\n", f"&{SECRET} a\n", f"\t{SECRET}\n", f"{SECRET}: a: b\n", f"{{{SECRET}\n", f"%{SECRET}\n",
    f"@{SECRET}\n", f"---\n{SECRET}\n---\n{SECRET}\n", f"? [{SECRET}]\n: x\n", f"\ufeff{SECRET}\n", f"{SECRET}\x01\n",
    f"[{SECRET}]: 1\n", f"{SECRET}", f"{SECRET}\n" * 3000,
])  # fmt: skip
NAMES = st.sampled_from([
    "shadow", ".env", "config", "key.pem", "a.yaml.txt", "yaml", ".yaml", "a.YAML", "a.json", "a.ini", "a b", "a.yml~",
    "é", "a.py", "x.yaml.lock", "id_rsa",
])  # fmt: skip
per_example = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refusal(path):
    with pytest.raises(RecipeError) as caught:
        layers(path, (), [])
    return str(caught.value)


@per_example
@given(NAMES, CONTENTS, st.booleans())
def test_extends_reads_no_file_that_is_not_named_as_a_recipe(tmp_path, name, content, is_link):
    target = tmp_path / name
    target.write_text(content)
    named = target
    if is_link:
        named = tmp_path / "base.yaml"
        named.unlink(missing_ok=True)
        named.symlink_to(target)
    message = refusal(write_recipe(tmp_path, dump({"name": "x", "extends": named.name})))
    assert "extends: " in message
    assert "names of recipe files end in .yaml or .yml" in message
    assert "Tr0ub4dor" not in message


@per_example
@given(CONTENTS)
def test_no_line_of_a_file_that_is_extended_is_quoted_unless_it_is_a_mapping(tmp_path, content):
    (tmp_path / "base.yaml").write_text(content)
    message = refusal(write_recipe(tmp_path, "name: x\nextends: base.yaml\n"))
    assert "base.yaml:" in message
    assert "is not a YAML mapping" in message
    assert "Tr0ub4dor" not in message


@per_example
@given(NAMES, CONTENTS)
@example("recipe.lock.yaml", f"{SECRET}\n")
def test_no_line_of_a_file_that_is_named_otherwise_is_quoted(tmp_path, name, content):
    secret = tmp_path / name
    secret.write_text(content)
    link = tmp_path / "link.yaml"
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    for path in (link, *[secret] * (secret.suffix not in (".yaml", ".yml"))):
        for reads in (lambda path: read(path, []), read_lock):
            with pytest.raises(RecipeError) as caught:
                reads(path)
            if path is secret or secret.suffix != ".yaml":
                assert "Tr0ub4dor" not in str(caught.value)


def test_a_recipe_with_an_error_is_quoted_where_it_was_named_itself(tmp_path):
    path = write_recipe(tmp_path, "name: x\nmodel: net: a\n")
    assert "    model: net: a\n" in refusal(path)


@pytest.mark.parametrize("name", ["base.yaml", "base.yml"])
def test_both_suffixes_of_recipes_are_read(tmp_path, name):
    write_recipe(tmp_path, RECIPE, name)
    (tmp_path / "link.yaml").symlink_to(tmp_path / name)
    for extended in (name, "link.yaml"):
        assert len(layers(write_recipe(tmp_path, f"name: x\nextends: {extended}\n"), (), [])) == 2
