import pytest
from faces import RECIPE, FakeCatalog, write_recipe

from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError


def complaint(folder, text=RECIPE, *sets):
    """The first lines of all problems."""
    with pytest.raises(RecipeError) as caught:
        load(write_recipe(folder, text), sets, FakeCatalog())
    return [str(problem).partition("\n")[0] for problem in caught.value.problems]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_required_stage_that_is_off_is_said_where_the_other_was_asked_for(tmp_path):
    text = RECIPE + "  stack: on\n"
    assert complaint(tmp_path, text, "optimization.merge=off") == [
        "recipe.yaml:10:3: optimization.stack: requires 'merge', which is switched off "
        "(override optimization.merge=off): switch it on, or 'stack' off"
    ]


def test_a_required_stage_that_nobody_names(tmp_path):
    text = RECIPE.replace("merge: on", "stack: on")
    assert complaint(tmp_path, text) == [
        "recipe.yaml:8:3: optimization.stack: requires 'merge', which is not switched on: switch it on, or 'stack' off"
    ]


def test_a_required_stage_with_wrong_settings_is_on(tmp_path):
    assert complaint(tmp_path, RECIPE.replace("merge: on", "merge: {x: 1}") + "  stack: on\n") == [
        "recipe.yaml:8:11: optimization.merge.x: unknown key - none is known"
    ]


def test_two_stages_that_claim_one_slot(tmp_path):
    assert complaint(tmp_path, RECIPE, "optimization.rival=on") == [
        "recipe.yaml:9:3: optimization.cache: replaces 'loss', and so does 'rival' (override optimization.rival=on): "
        "switch one of them off"
    ]


def test_a_slot_that_the_learner_lacks_is_refused_with_its_reason(tmp_path):
    assert complaint(tmp_path, RECIPE, "model.order=backward") == [
        "recipe.yaml:9:3: optimization.cache: cannot work here: backwards there is no 'loss'"
    ]


def test_a_source_that_does_not_fit_the_learner(tmp_path):
    text = RECIPE.replace("{kind: sim, envs: 4}", "{kind: words}").replace("env_steps", "updates")
    assert complaint(tmp_path, text) == [
        "recipe.yaml:4:8: data.kind: 'words' provides words data, but model 'net' (recipe.yaml:3:9) learns from "
        "numbers data"
    ]


@pytest.mark.parametrize(
    ("data", "train", "expected"),
    [
        (
            "{kind: sim, envs: 1}", "{}",
            ["5:1: train: has no length: set one of train.updates, train.samples, train.env_steps"],
        ),
        (
            "{kind: sim, envs: 1}", "{env_steps: 5000, updates: 5}",
            [
                "5:9: train.env_steps: set either train.updates or train.env_steps, not both"
            ],
        ),
        (
            "{kind: sim, envs: 1}", "{epochs: 5}",
            ["5:9: train.epochs: has no effect here: 'sim' counts updates, samples, env_steps"],
        ),
        (
            "{kind: sim, envs: 1}", "{tokens: 5, updates: 5, samples: 5}",
            [
                f"{place}: set either train.updates or {place.split()[-1]}, not both"
                for place in ("5:9: train.tokens", "5:32: train.samples")
            ],
        ),
        (
            "{kind: table}", "{}",
            ["5:1: train: has no length: set one of train.updates, train.epochs, train.samples"],
        ),
        (
            "{kind: table}", "{env_steps: 5}",
            ["5:9: train.env_steps: has no effect here: 'table' counts updates, epochs, samples"],
        ),
    ],
)  # fmt: skip
def test_training_is_counted_in_exactly_one_unit_that_the_source_counts(tmp_path, data, train, expected):
    text = f"name: x\nseed: 1\nmodel: {{kind: net}}\ndata: {data}\ntrain: {train}\n"
    assert complaint(tmp_path, text) == [f"recipe.yaml:{line}" for line in expected]


def test_what_the_source_finds_wrong_with_the_length_is_said_at_its_key(tmp_path):
    assert complaint(tmp_path, RECIPE.replace("envs: 4", "envs: 4, warmup: 60_000")) == [
        "recipe.yaml:4:28: data.warmup: 60000 leaves nothing of 60000 env_steps"
    ]
    assert complaint(tmp_path, RECIPE.replace("envs: 4", "envs: 4, warmup: 5"), "train.env_steps=5") == [
        "recipe.yaml:4:28: data.warmup: 5 leaves nothing of 5 env_steps"
    ]


def test_a_batch_that_the_source_cannot_give(tmp_path):
    assert complaint(tmp_path, RECIPE, "train.batch_size=513") == [
        "override: train.batch_size: 513 exceeds the largest batch of 'sim' (512)"
    ]


def test_null_takes_back_what_a_recipe_extends(tmp_path):
    sets = ("data.kind=table", "train.env_steps=null", "train.updates=5")
    recipe = load(write_recipe(tmp_path), sets, FakeCatalog())
    assert recipe.length == ("updates", 5)
    assert "env_steps" not in recipe.values()["train"]


def test_problems_of_values_and_across_sections_come_together(tmp_path):
    text = RECIPE.replace("seed: 7", "seed: x").replace("merge: on", "merge: off") + "  stack: on\n"
    assert [line.split(": ")[1] for line in complaint(tmp_path, text)] == ["seed", "optimization.stack"]
