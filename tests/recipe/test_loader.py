import json
import random

import pytest
from faces import RECIPE, Cache, FakeCatalog, Net, Sim, Table, write_recipe
from hypothesis import given
from hypothesis import strategies as st

from runner.plugin.progress import UNITS
from runner.plugin.registry import Registry
from runner.recipe.dumping import dump
from runner.recipe.loader import load
from runner.recipe.recipe import flatten
from runner.recipe.yaml_nodes import OVERRIDE, RecipeError


def loaded(folder, text=RECIPE, *sets):
    return load(write_recipe(folder, text), sets, FakeCatalog())


def problems(folder, text=RECIPE, *sets):
    """Lines ``line:column path: message``; those of the command line start with 0."""
    with pytest.raises(RecipeError) as caught:
        loaded(folder, text, *sets)
    places = [(0 if p.place.source == OVERRIDE else p.place.line, p) for p in caught.value.problems]
    return [f"{line}:{p.place.column} {p.path}: {p.message}" for line, p in places]


def test_a_recipe_becomes_configs_and_stages(tmp_path):
    recipe = loaded(tmp_path)
    assert (recipe.name, recipe.seed, recipe.device) == ("example", 7, "auto")
    assert isinstance(recipe.model, Net)
    assert isinstance(recipe.data, Sim)
    assert recipe.train.env_steps == 60_000
    assert list(recipe.stages) == ["merge", "cache"]  # phase 1 before phase 2
    assert isinstance(recipe.stages["cache"], Cache)
    assert recipe.stages["cache"].size == 5
    assert recipe.tracking.experiment == "default"


def test_validation_does_not_count_as_reading(tmp_path):
    recipe = loaded(tmp_path)
    recipe.values()
    assert recipe.model.recorded().unread() == ["hidden", "lr", "order", "password"]
    assert recipe.stages["cache"].recorded().unread() == ["size"]


def test_a_section_that_is_left_out_is_made_of_defaults(tmp_path):
    recipe = loaded(tmp_path)
    assert recipe.length == ("env_steps", 60_000)
    assert recipe.lr_scheduler.kind == "constant"
    assert list(recipe.optimizer) == ["model"]
    assert recipe.optimizer["model"].kind == "adamw"


def test_values_have_no_defaults_left_and_load_again(tmp_path):
    recipe = loaded(tmp_path, RECIPE, "optimization.stack=off")
    values = recipe.values()
    assert values["optimization"] == {"merge": "on", "cache": {"size": 5}, "stack": "off"}
    assert values["data"]["replay"] == {"kind": "uniform", "capacity": 100}
    assert "updates" not in values["train"]
    again = loaded(tmp_path, json.dumps(values))
    assert again.values() == values
    assert again.digest == recipe.digest


def test_the_digest_follows_the_values_alone(tmp_path):
    digest = loaded(tmp_path).digest
    assert loaded(tmp_path, RECIPE.replace("60_000", "60000") + "# comment\n").digest == digest
    assert loaded(tmp_path, RECIPE, "optimization.stack=off").digest == digest
    assert loaded(tmp_path, RECIPE, "seed=8").digest != digest


def test_every_leaf_has_an_origin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, RECIPE, "base.yaml")
    recipe = loaded(tmp_path, "extends: base.yaml\nmodel:\n  lr: 0.5\n", "seed=8")
    leaves = {path for path, _ in flatten(recipe.values())}
    assert leaves <= recipe.origins.keys()
    shown = {path: str(recipe.origins[path]) for path in recipe.origins}
    assert shown["model.lr"] == "recipe.yaml:3:7"
    assert shown["model.kind"] == "base.yaml:3:15"
    assert shown["seed"] == "override"
    assert shown["data.replay.capacity"] == "default"
    assert shown["optimization.cache.size"] == "base.yaml:9:17"


def test_five_mistakes_are_reported_together(tmp_path):
    text = """\
name: example
model: {kind: net, lr: "1e-3"}
data: {kind: simm, envs: 4}
train:
  env_steps: many
  batchsize: 128
  log_every: 1
  log_every: 2
"""
    assert problems(tmp_path, text) == [
        "2:24 model.lr: should be a number, got '1e-3' - remove the quotes",
        "3:14 data.kind: unknown kind 'simm' - did you mean 'sim'?; --plugin FILE adds the plugins of a file",
        "5:14 train.env_steps: should be an integer, got 'many'",
        "6:3 train.batchsize: unknown key - did you mean 'batch_size'?",
        "8:3 train.log_every: duplicate key - the first is on line 7",
    ]


def test_the_settings_of_an_unknown_kind_are_checked_as_far_as_they_can_be(tmp_path):
    assert problems(tmp_path, RECIPE.replace("{kind: sim, envs: 4}", "{kind: sin, envs: x, y: 1}")) == [
        "4:14 data.kind: unknown kind 'sin' - did you mean 'sim'?; --plugin FILE adds the plugins of a file",
        "4:25 data.envs: should be an integer, got 'x'",
        "4:28 data.y: unknown key - known: envs, replay, warmup",
    ]


@pytest.mark.parametrize(
    ("kind", "suggestion"),
    [
        ("qqq, lr: '1', y: 1", "'qqq' - known: net, pair"),
        ("qqq, lr: 1, hidden: [x]", "'qqq' - known: net, pair"),
        ("my_net, depth: 3, width: 8, lr: 1e-3", "'my_net' - did you mean 'net'?"),
    ],
)
def test_a_forgotten_plugin_file_is_the_only_problem(kind, suggestion, tmp_path):
    text = RECIPE.replace("{kind: net, lr: 1e-3}", f"{{kind: {kind}}}")
    message = f"3:15 model.kind: unknown kind {suggestion}; --plugin FILE adds the plugins of a file"
    assert problems(tmp_path, text) == [message]


def test_an_unknown_stage_that_resembles_no_other_may_come_from_a_file(tmp_path):
    (message,) = problems(tmp_path, RECIPE, "optimization.qqq=on")
    assert message.endswith("; --plugin FILE adds the plugins of a file")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seed: 7", "sede: 7", "2:1 sede: unknown key - did you mean 'seed'?"),
        ("seed: 7", "optimisation: {}", "2:1 optimisation: unknown key - did you mean 'optimization'?"),
        ("seed: 7", "seed: -1", "2:7 seed: should be greater than or equal to 0, got -1"),
        ("seed: 7", "seed: 7.0", "2:7 seed: should be an integer, got 7.0"),
        ("seed: 7", "device: gpu", "2:9 device: should match pattern '^(auto|cpu|cuda(:[0-9]+)?)$', got 'gpu'"),
        ("name: example\n", "", "0:0 name: is missing"),
        ("lr: 1e-3", "lr: 0", "3:24 model.lr: should be greater than 0, got 0"),
        ("lr: 1e-3", "lr:", "3:23 model.lr: should be a number, got nothing"),
        ("lr: 1e-3", "lr: {a: 1}", "3:24 model.lr: should be a number, got a mapping"),
        ("lr: 1e-3", "lr: yes", "3:24 model.lr: should be a number, got 'yes'"),
        ("lr: 1e-3", "hidden: 3", "3:28 model.hidden: should be a list, got 3"),
        ("lr: 1e-3", "hidden: [1, x]", "3:32 model.hidden.1: should be an integer, got 'x'"),
        ("lr: 1e-3", "hidden: []", "3:28 model.hidden: list should have at least 1 item after validation, not 0"),
        ("lr: 1e-3", "hidden: [2000]", "3:28 model.hidden: wider than 1000 in all"),
        (
            "lr: 1e-3", "order: forwards",
            "3:27 model.order: should be 'forward' or 'backward', got 'forwards' - did you mean 'forward'?",
        ),
        ("kind: net, ", "", "3:1 model.kind: is missing: one of net, pair"),
        ("{kind: net, lr: 1e-3}", "net", "3:8 model: should be a mapping with a kind, got 'net'"),
        ("{kind: net, lr: 1e-3}", "", "3:7 model: should be a mapping with a kind, got nothing"),
        ("model: {kind: net, lr: 1e-3}\n", "", "0:0 model.kind: is missing: one of net, pair"),
        (", envs: 4", "", "4:1 data.envs: is missing"),
        (
            "envs: 4", "envs: 4, replay: {kind: unifrm}",
            "4:43 data.replay.kind: unknown kind 'unifrm' - did you mean 'uniform'?",
        ),
        ("envs: 4", "envs: 4, replay: {}", "4:28 data.replay.kind: is missing: it determines the other settings"),
        ("envs: 4", "envs: 4, replay: 3", "4:36 data.replay: should be a mapping, got 3"),
        (
            "envs: 4", "envs: 4, replay: {kind: uniform, alpha: 1}",
            "4:52 data.replay.alpha: unknown key - known: capacity, kind",
        ),
        (
            "envs: 4", "envs: 4, replay: {kind: prioritized, alhpa: 1}",
            "4:56 data.replay.alhpa: unknown key - did you mean 'alpha'?",
        ),
        ("envs: 4", "envs: 4, replay: {kind: prioritized, beta: [1]}", "4:62 data.replay.beta: needs at least 2 items"),
        ("merge: on", "merg: on", "8:3 optimization.merg: unknown stage - did you mean 'merge'?"),
        ("merge: on", "merge: yes", "8:10 optimization.merge: should be on, off or its settings, got 'yes'"),
        ("merge: on", "merge:", "8:9 optimization.merge: should be on, off or its settings, got nothing"),
        ("merge: on", "merge: {}", "8:10 optimization.merge: should be on, off or its settings, got an empty mapping"),
        ("merge: on", "merge: 1", "8:10 optimization.merge: should be on, off or its settings, got 1"),
        ("merge: on", "merge: {x: 1}", "8:11 optimization.merge.x: unknown key - none is known"),
        ("size: 5", "size: 0", "9:17 optimization.cache.size: should be greater than or equal to 1, got 0"),
        (
            "merge: on", "broken: on",
            "8:3 optimization.broken: optimization.broken of nobody 1.0 cannot be imported: no torch",
        ),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_that_points_at_it(tmp_path, old, new, expected):
    assert old in RECIPE
    assert problems(tmp_path, RECIPE.replace(old, new)) == [expected]


def test_a_key_that_has_moved_is_said_with_its_new_place(tmp_path):
    text = RECIPE.replace("lr: 1e-3", "width: 3").replace("env_steps: 60_000", "env_steps: 60_000\n  speed: 1")
    assert problems(tmp_path, text) == [
        "3:20 model.width: unknown key - it is now model.hidden",
        "7:3 train.speed: unknown key - it is now model.lr",
    ]
    assert problems(tmp_path, RECIPE, "model.withd=3") == [
        "0:7 model.withd: unknown key - known: hidden, init_from, lr, order, password"
    ]


def test_settings_of_the_first_version_are_said_with_their_new_place():
    old = ("train.warmup_steps=5", "train.updates_per_step=1", "model.actor_lr=1.0", "model.critic_eps=1e-5")
    with pytest.raises(RecipeError) as caught:
        load("marl_baseline", old, Registry())
    assert [problem.message.removeprefix("unknown key - it is now ") for problem in caught.value.problems] == [
        "data.warmup", "data.updates_per_step", "optimizer.actor.lr", "optimizer.critic.eps",
    ]  # fmt: skip


def test_a_broken_plugin_that_is_off_does_not_matter(tmp_path):
    assert loaded(tmp_path, RECIPE, "optimization.broken=off").off == ("broken",)


def test_stages_are_switched_by_words_and_booleans(tmp_path):
    for on, off in (("on", "off"), ("true", "false"), ("'on'", "'off'")):
        recipe = loaded(
            tmp_path, RECIPE, f"optimization.merge={off}", f"optimization.rival={off}", f"optimization.cache={on}"
        )
        assert list(recipe.stages) == ["cache"]
        assert recipe.stages["cache"].size == 3
        assert recipe.off == ("merge", "rival")


def test_problems_of_the_command_line_point_into_its_text(tmp_path):
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, RECIPE, "train.env_stepz=3")
    assert str(caught.value) == (
        "override: train.env_stepz: unknown key - did you mean 'env_steps'?\n    train.env_stepz=3\n          ^"
    )


@pytest.mark.parametrize("key", ["env_step", "steps", "epoch", "token"])
@pytest.mark.parametrize(("data", "units"), [("{kind: sim, envs: 4}", Sim.units), ("{kind: table}", Table.units)])
def test_a_length_is_suggested_in_units_that_the_data_count(data, units, key, tmp_path):
    text = f"name: example\nmodel: {{kind: net}}\ndata: {data}\ntrain: {{{key}: 100}}\n"
    (message,) = [line for line in problems(tmp_path, text) if "unknown key" in line]
    meant = {"env_step": "env_steps", "steps": "env_steps", "epoch": "epochs", "token": "tokens"}[key]
    if meant in units:
        assert message.endswith(f"unknown key - did you mean '{meant}'?")
        return
    for unit in UNITS:
        assert (f"train.{unit}" in message) == (unit in units)
    assert "did you mean" not in message


@pytest.mark.parametrize("section", ["optimization", "inference"])
def test_a_stage_is_suggested_only_if_the_model_has_its_slots(section, tmp_path):
    (forward,) = problems(tmp_path, RECIPE, f"{section}.cach=on")
    assert forward.endswith("unknown stage - did you mean 'cache'?")
    backward = problems(tmp_path, RECIPE, f"{section}.cach=on", "model.order=backward", "optimization.cache=off")
    (message,) = [line for line in backward if "unknown stage" in line]
    assert "unknown stage - known: " in message
    assert "merge" in message
    assert "cache" not in message
    assert "rival" not in message


WORDS = ("lr", "epoch", "batchsize", "follower", "device", "kind")
SECTIONS = ("train", "model", "data", "optimization", "optimizer")


@pytest.mark.parametrize("seed", range(50))
def test_an_error_of_an_override_quotes_what_the_user_wrote(tmp_path, seed):
    draw = random.Random(seed)
    overrides = [f"{draw.choice(SECTIONS)}.{word}z={draw.randint(1, 99)}" for word in draw.sample(WORDS, 3)]
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, RECIPE, *overrides)
    text = str(caught.value)
    assert "--set" not in text
    assert "#" not in text
    for override in overrides:
        assert f"\n    {override}\n" in text
        assert f"override: {override.partition('=')[0]}: " in text


def test_another_kind_leaves_behind_what_it_does_not_know(tmp_path):
    text = RECIPE.replace("envs: 4", "envs: 4, replay: {kind: prioritized, capacity: 50, alpha: 1.0}")
    recipe = loaded(tmp_path, text, "data.replay.kind=uniform")
    assert recipe.values()["data"]["replay"] == {"kind": "uniform", "capacity": 50}
    assert problems(tmp_path, text, "data.replay.kind=uniform", "data.replay.alpha=0.5") == [
        "0:13 data.replay.alpha: unknown key - known: capacity, kind"
    ]
    assert loaded(tmp_path, text, "data.kind=table", "train.env_steps=null", "train.updates=5").data.kind == "table"


def test_a_secret_is_masked(tmp_path):
    recipe = loaded(tmp_path, RECIPE, "model.password=hunter2")
    assert recipe.model.password.get_secret_value() == "hunter2"
    assert "hunter2" not in json.dumps(recipe.values())


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["on", "net", "sim", "uniform", "x"])
keys = st.sampled_from(["kind", "replay", "beta", "hidden", "merge", "cache", "stack", "updates", "x"])
documents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner), max_leaves=12
)


@given(st.dictionaries(st.sampled_from(["model", "data", "train", "optimization", "tracking", "seed"]), documents))
def test_any_document_is_loaded_or_refused_with_a_place(tmp_path_factory, document):
    path = tmp_path_factory.mktemp("any") / "recipe.yaml"
    path.write_text(dump({"name": "x"} | document))
    with pytest.raises(RecipeError) as caught:  # there is never a length that every section agrees with
        load(path, (), FakeCatalog())
    assert all(problem.place.source == path for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("kind", "verb"), [("ablation", "runner ablate"), ("study", "runner study run")], ids=["ablation", "study"]
)
def test_a_file_of_another_kind_is_told_its_verb(tmp_path, monkeypatch, kind, verb):
    monkeypatch.chdir(tmp_path)
    text = f"name: x\nkind: {kind}\nrecipe: marl_phase1\n"
    assert problems(tmp_path, text) == [
        f"2:7 kind: '{kind}' is not a recipe; a file of that kind is for: {verb} recipe.yaml"
    ]
    write_recipe(tmp_path, text, "other.yaml")
    (said,) = problems(tmp_path, "name: y\nextends: other.yaml\n")
    assert said.endswith(f"for: {verb} other.yaml")
