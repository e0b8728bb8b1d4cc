"""Values of environment variables in recipes, and recipes that extend several others."""

import pytest
from faces import RECIPE, FakeCatalog, write_recipe
from hypothesis import given
from hypothesis import strategies as st

from runner.recipe.dumping import dump
from runner.recipe.environment import with_environment
from runner.recipe.loader import layers, load
from runner.recipe.scalars import resolve
from runner.recipe.yaml_nodes import RecipeError, parse
from runner.system.secrets import MASK


def loaded(folder, text=RECIPE, *sets):
    return load(write_recipe(folder, text), sets, FakeCatalog())


def failure(folder, text, *sets):
    with pytest.raises(RecipeError) as caught:
        loaded(folder, text, *sets)
    return str(caught.value)


# --- variables --------------------------------------------------------------------------------------------------------


def test_plain_values_are_read_as_yaml_and_quoted_ones_as_text(tmp_path, monkeypatch):
    monkeypatch.setenv("RATE", "1e-2")
    monkeypatch.setenv("WIDTH", "16")
    text = RECIPE.replace(
        "model: {kind: net, lr: 1e-3}", "model:\n  kind: net\n  lr: ${env:RATE}\n  hidden: ['${env:NO:1}']"
    )
    assert "model.hidden.0: should be an integer, got '1' - remove the quotes" in failure(tmp_path, text)
    recipe = loaded(tmp_path, text, "model.hidden=[8]", "seed=${env:SEED:7}", "train.batch_size=${env:WIDTH}")
    assert (recipe.model.lr, recipe.seed, recipe.train.batch_size) == (0.01, 7, 16)
    assert recipe.overrides["train.batch_size"] == 16


def test_text_may_contain_several_variables_and_none(tmp_path, monkeypatch):
    monkeypatch.setenv("WHO", "ada")
    recipe = loaded(tmp_path, RECIPE.replace("name: example", "name: ${env:WHO}-${env:WHAT:test}"))
    assert recipe.name == "ada-test"
    literal = loaded(tmp_path, RECIPE + "tracking:\n  experiment: $${env:WHO}\n")
    assert literal.tracking.experiment == "${env:WHO}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${env:ABSENT_7}",
         "model.lr: the environment variable ABSENT_7 is not set; set it, or write ${env:ABSENT_7:default}"),
        ("${env:}", "model.lr: should be ${env:NAME} or ${env:NAME:default}, with a closing brace"),
        ("${env:1a}", "model.lr: should be ${env:NAME} or ${env:NAME:default}, with a closing brace"),
        ("${env:RATE", "model.lr: should be ${env:NAME} or ${env:NAME:default}, with a closing brace"),
        ("${env:WORD:fast}", "model.lr: should be a number, got 'fast'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(value, expected, tmp_path):
    text = RECIPE.replace("model: {kind: net, lr: 1e-3}", f"model:\n  kind: net\n  lr: {value}")
    message = failure(tmp_path, text)
    assert f"recipe.yaml:5:7: error: {expected}".replace("error: ", "") in message
    assert "model.lr: the environment variable ABSENT_8 is not set" in failure(
        tmp_path, RECIPE, "model.lr=${env:ABSENT_8}"
    )


def test_a_lock_has_values_and_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("RATE", "0.5")
    monkeypatch.setenv("PASSWORD_7", "correct-horse-7")
    text = RECIPE.replace(
        "model: {kind: net, lr: 1e-3}", "model:\n  kind: net\n  lr: ${env:RATE}\n  password: ${env:PASSWORD_7}"
    )
    recipe = loaded(tmp_path, text)
    assert recipe.model.password.get_secret_value() == "correct-horse-7"
    values = dump(recipe.values())
    assert "correct-horse" not in values
    assert recipe.values()["model"] | {"hidden": [8]} == recipe.values()["model"]
    assert (recipe.values()["model"]["lr"], recipe.values()["model"]["password"]) == (0.5, MASK)
    # The origin cites the file, which has the name of the variable only.
    assert "correct-horse" not in str(recipe.origins)


TEXTS = st.text("ab1.:$ {}-", max_size=6)


@given(
    st.lists(st.one_of(TEXTS, st.sampled_from(["${env:A}", "${env:B:x}", "${env:MISSING:}", "$${env:A}"])), max_size=5)
)
def test_any_text_around_references_stays_as_it_is(pieces):
    values = {"${env:A}": "1", "${env:B:x}": "two", "${env:MISSING:}": "", "$${env:A}": "${env:A}"}
    # A dollar before a reference would escape it.
    pieces = [piece.rstrip("$") if piece not in values else piece for piece in pieces]
    problems = []
    node = parse(dump({"key": "".join(pieces)}), "test", problems)
    result = with_environment(node, problems, environment={"A": "1", "B": "two"})
    assert problems == []
    expected = "".join(values.get(piece, piece) for piece in pieces)
    if not any(piece in values for piece in pieces):
        assert result == node
        return
    is_quoted = node.get("key").spelled[:1] in ("'", '"')
    assert result.plain() == {"key": expected if is_quoted else resolve(expected)}


# --- several recipes below one ----------------------------------------------------------------------------------------


def merged(path):
    from functools import reduce

    from runner.recipe.loader import merge

    problems = []
    result = reduce(merge, layers(path, (), problems))
    assert problems == []
    return result.plain()


def test_later_recipes_win_and_the_file_wins_over_all(tmp_path):
    (tmp_path / "optimizer").mkdir()
    write_recipe(tmp_path, "a: 1\nb: 1\nc: {x: 1, y: 1}\n", "base.yaml")
    write_recipe(tmp_path / "optimizer", "b: 2\nc: {y: 2}\nd: 2\n", "adamw.yaml")
    path = write_recipe(tmp_path, "extends: [base.yaml, optimizer/adamw.yaml]\nd: 3\n")
    assert merged(path) == {"a": 1, "b": 2, "c": {"x": 1, "y": 2}, "d": 3}


def test_a_recipe_that_is_reached_twice_counts_once(tmp_path):
    write_recipe(tmp_path, "a: 1\nb: 1\n", "base.yaml")
    write_recipe(tmp_path, "extends: base.yaml\na: 2\n", "left.yaml")
    write_recipe(tmp_path, "extends: base.yaml\nb: 2\n", "right.yaml")
    path = write_recipe(tmp_path, "extends: [left.yaml, right.yaml]\n")
    assert merged(path) == {"a": 2, "b": 2}
    assert len(layers(path, (), [])) == 4


def test_many_recipes_that_extend_each_other_are_read_once(tmp_path):
    write_recipe(tmp_path, "a: 0\n", "r0.yaml")
    for number in range(1, 30):
        below = [f"r{number - 1}.yaml"] + ([f"r{number - 2}.yaml"] if number > 1 else [])
        write_recipe(tmp_path, f"extends: [{', '.join(below)}]\na: {number}\n", f"r{number}.yaml")
    assert len(layers(tmp_path / "r29.yaml", (), [])) == 30


@pytest.mark.parametrize(
    ("extends", "column", "message"),
    [
        ("[base.yaml, absent.yaml]", 22, "extends: 'absent.yaml': no such file"),
        (
            "[base.yaml, 3]",
            22,
            "extends: should be the path of a recipe or the name of one that ships, or a list of them",
        ),
        ("[]", 10, "extends: should be the path of a recipe or the name of one that ships, or a list of them"),
        ("[base.yaml, recipe.yaml]", 22, "extends: runs in a circle: recipe.yaml -> recipe.yaml"),
    ],
)
def test_a_mistake_in_a_list_has_its_place(extends, column, message, tmp_path):
    write_recipe(tmp_path, "a: 1\n", "base.yaml")
    path = write_recipe(tmp_path, f"extends: {extends}\n")
    with pytest.raises(RecipeError) as caught:
        layers(path, (), [])
    assert f":1:{column}: {message}" in str(caught.value)


@given(st.permutations(range(5)))
def test_lists_of_any_order_are_merged_in_that_order(tmp_path_factory, order):
    folder = tmp_path_factory.mktemp("order")
    for number in order:
        keys = "".join(f"k{key}: {number}\n" for key in range(number + 1))
        write_recipe(folder, keys, f"part{number}.yaml")
    path = write_recipe(folder, f"extends: [{', '.join(f'part{number}.yaml' for number in order)}]\n")
    expected = {}
    for number in order:
        expected |= {f"k{key}": number for key in range(number + 1)}
    assert merged(path) == expected
