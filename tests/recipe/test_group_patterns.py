"""Parameter groups in recipes: how they are written, their order, mistakes, and what records contain."""

import json

import pytest
from faces import RECIPE, FakeCatalog, write_recipe
from hypothesis import given
from hypothesis import strategies as st

from runner.recipe.dumping import dump
from runner.recipe.loader import assignments, load
from runner.recipe.yaml_nodes import RecipeError

PAIR = RECIPE.replace("kind: net", "kind: pair")
GROUPS = "{encoder.*: {lr: 0.1}, head: {weight_decay: 0}}"


def loaded(folder, section, *sets, text=RECIPE):
    return load(write_recipe(folder, f"{text}optimizer: {section}\n"), sets, FakeCatalog())


def groups(recipe, role="model"):
    """Returns the settings of every pattern, in their order."""
    return [(pattern, group.settings) for pattern, group in recipe.optimizer[role].groups.items()]


EXPECTED = [("encoder.*", {"lr": 0.1}), ("head", {"weight_decay": 0})]


@pytest.mark.parametrize(
    ("section", "sets"),
    [
        (f"{{groups: {GROUPS}}}", ()),
        ("{groups: {encoder: {'*': {lr: 0.1}}, head: {weight_decay: 0}}}", ()),
        ("{groups: [{encoder.*: {lr: 0.1}}, {head: {weight_decay: 0}}]}", ()),
        ("{}", (f"optimizer.groups={GROUPS}",)),
        ("{}", ("optimizer.groups.encoder.*.lr=0.1", "optimizer.groups.head.weight_decay=0")),
        (
            "{groups: {encoder.*: {lr: 0.5}, head: {}}}",
            ("optimizer.groups.head.weight_decay=0", "optimizer.groups.encoder.*.lr=0.1"),
        ),
        ("{groups: [{encoder.*: {lr: 0.5}}, {head: {weight_decay: 0}}]}", ("optimizer.groups.encoder.*.lr=0.1",)),
    ],
)  # fmt: skip
def test_groups_have_several_forms_with_one_meaning(section, sets, tmp_path):
    recipe = loaded(tmp_path, section, *sets)
    assert groups(recipe) == EXPECTED
    assert recipe.digest == loaded(tmp_path, f"{{groups: {GROUPS}}}").digest


def test_a_role_has_its_groups(tmp_path):
    recipe = loaded(tmp_path, f"{{discriminator: {{groups: {GROUPS}}}}}", text=PAIR)
    assert groups(recipe, "generator") == []
    assert groups(recipe, "discriminator") == EXPECTED
    origin = recipe.origins["optimizer.discriminator.groups.head"]
    assert (origin.line, origin.text[origin.column - 1 :][:4]) == (PAIR.count("\n") + 1, "head")


def test_without_groups_records_are_as_before(tmp_path):
    values = loaded(tmp_path, "{lr: 0.5}").values()["optimizer"]
    assert not values.keys() & {"groups", "layer_decay"}


NAMES = st.text("ab.*?[]", min_size=1, max_size=5).filter(lambda name: name.strip("."))
SETTINGS = st.fixed_dictionaries({}, optional={"lr": st.floats(0, 1), "weight_decay": st.integers(0, 2)})


@given(st.dictionaries(NAMES, SETTINGS, min_size=2, max_size=5))
def test_records_keep_the_order_of_any_patterns(tmp_path_factory, patterns):
    folder = tmp_path_factory.mktemp("groups")
    recipe = loaded(folder, json.dumps({"groups": patterns}))
    assert groups(recipe) == list(patterns.items())
    lock = load(write_recipe(folder, dump(recipe.values()), "again.yaml"), (), FakeCatalog())
    assert groups(lock) == groups(recipe)
    assert lock.digest == recipe.digest

    reverse = dict(reversed(patterns.items()))
    assert loaded(folder, json.dumps({"groups": reverse})).digest != recipe.digest
    overridden = loaded(folder, "{}", *assignments({"optimizer.groups": [{k: v} for k, v in patterns.items()]}))
    assert groups(overridden) == groups(recipe)
    repeated = loaded(folder, "{}", *assignments(overridden.overrides))
    assert repeated.digest == recipe.digest


def test_an_override_of_one_pattern_is_recorded_with_all_of_them(tmp_path):
    recipe = loaded(tmp_path, f"{{groups: {GROUPS}}}", "optimizer.groups.head.lr=0.5", "train.batch_size=3")
    assert recipe.overrides == {
        "optimizer.groups": [{"encoder.*": {"lr": 0.1}}, {"head": {"lr": 0.5, "weight_decay": 0}}],
        "train.batch_size": 3,
    }


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{groups: 3}", "21 optimizer.groups: should be a mapping, got 3"),
        ("{groups: {head: 3}}", "28 optimizer.groups.head: should be a mapping, got 3"),
        ("{groups: [head]}", "21 optimizer.groups: should be a mapping, got a list"),
        ("{groups: {a.*: {lrr: 1}}}", "28 optimizer.groups.a.*.lrr: unknown key - did you mean 'lr'?"),
        ("{groups: {a.*: {lr: x}}}", "32 optimizer.groups.a.*.lr: should be a number, got 'x'"),
        ("{groups: {a.*: {lr: -1}}}", "32 optimizer.groups.a.*.lr: should not be below 0"),
        ("{groups: {a: {b: {lr: x}}}}", "34 optimizer.groups.a.b.lr: should be a number, got 'x'"),
        (
            "{groups: {a: {kind: sgd}}}",
            "26 optimizer.groups.a.kind: is a setting of the optimizer, for all of its groups",
        ),
        ("{groups: {a: {spare: [w]}}}",
         "34 optimizer.groups.a.spare.0: should be 'biases', 'norms' or 'embeddings', got 'w'"),
        ("{kind: sgd, groups: {a: {betas: [0.9, 0.9]}}}", "37 optimizer.groups.a.betas: unknown key"),
        ("{layer_decay: 0}", "26 optimizer.layer_decay: should be greater than 0, got 0"),
        ("{layer_decay: 1.5}", "26 optimizer.layer_decay: should be less than or equal to 1, got 1.5"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_points_at_it(section, expected, tmp_path):
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, section)
    (problem,) = caught.value.problems
    assert f"{problem.place.column} {problem.path}: {problem.message}".startswith(expected)


@pytest.mark.parametrize("setting", ["groups: {head: {lr: 1}}", "layer_decay: 0.5"])
def test_names_of_parameters_belong_to_one_role(setting, tmp_path):
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, f"{{{setting}}}", text=PAIR)
    name = setting.partition(":")[0]
    paths = f"optimizer.generator.{name}, optimizer.discriminator.{name}"
    assert f"optimizer.{name}: concerns the parameters of one role; write {paths}" in str(caught.value)
