from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from faces import RECIPE, FakeCatalog, Sim, write_recipe
from studies import AIMS, HEAD, SPACE, problems, read, study_text

from runner.plugin.registry import Registry
from runner.recipe.dumping import dump_inline
from runner.recipe.yaml_nodes import RecipeError
from runner.study.definition import load_study

SWITCH = "space: {optimization.cache: {choice: [off, on]}}\n"
STACKS = "space:\n  optimization.stack: {choice: [off, on]}\n  optimization.merge: {choice: [off, on]}\n"
CACHE = "space:\n  optimization.cache: {choice: [off, on]}\n  optimization.cache.size: {int: [1, 8]}\n"


def given(folder, space, *sets):
    return read(folder, study_text(space), *sets).as_given()


class OpenSim(Sim):
    """A simulator with settings of any type."""

    kind: ClassVar[str] = "open"
    envs: int = 1
    extra: Mapping[str, Any] = {}


class OpenCatalog(FakeCatalog):
    faces: ClassVar = {**FakeCatalog.faces, "data": (OpenSim,)}


def paths(definition):
    return [parameter.path for parameter in definition.space.parameters]


def test_a_study_is_a_recipe_with_the_assignments_of_the_file_and_of_the_command_line(tmp_path):
    found = read(tmp_path, study_text(more="set: [seed=5, data.envs=2]\n"), "data.envs=3")
    assert (found.recipe.seed, found.recipe.data.envs) == (5, 3)
    assert found.sets == ("seed=5", "data.envs=2", "data.envs=3")
    assert found.path == tmp_path / "study.yaml"
    assert paths(found) == ["model.lr"]


def test_the_recipe_of_a_trial_has_what_was_chosen_and_the_rest_as_it_was(tmp_path):
    found = read(tmp_path, study_text(more="set: [data.envs=2]\n"))
    trial = found.recipe_of({"model.lr": 5e-3, "optimization.cache": "off"}, seed=9)
    assert (trial.model.lr, trial.data.envs, trial.seed) == (5e-3, 2, 9)
    assert list(trial.stages) == ["merge"]
    assert found.recipe_of({"model.lr": 5e-3}).seed == found.recipe.seed == 7


def test_a_combination_that_is_impossible_is_refused_when_it_is_asked_for(tmp_path):
    with pytest.raises(RecipeError, match="requires 'merge'"):
        read(tmp_path).recipe_of({"optimization.merge": "off", "optimization.stack": "on"})


def test_seeds_begin_with_that_of_the_recipe(tmp_path):
    assert read(tmp_path, study_text(more="seeds: 3\n")).seeds == [7, 8, 9]
    assert read(tmp_path, None, "seed=40").seeds == [40]


@pytest.mark.parametrize(
    ("text", "line", "column", "path", "message"),
    [
        (study_text(more="budgett: 3\n"), 7, 1, "budgett", "unknown key - did you mean 'budget'?"),
        (study_text(more="budget: {trial: 3}\n"), 7, 10, "budget.trial", "unknown key - did you mean 'trials'?"),
        (study_text(more="name: twice\n"), 7, 1, "name", "duplicate key - the first is on line 2"),
        (study_text(aims="objectives: {eval/x: maximise}\n"), 6, 22, "objectives.eval/x", "did you mean 'maximize'?"),
        (
            study_text(aims="objectives: {return: maximize}\n"),
            *(6, 14, "objectives.return"),
            "is not a metric of a training; their names start with eval/, train/, perf/",
        ),
        (
            study_text(more="constraints: {verify: pass, loss: {max: 3}}\n"),
            *(7, 29, "constraints.loss"),
            "is not a metric of a training",
        ),
        (HEAD.replace("recipe.yaml", "reciep.yaml") + SPACE + AIMS, 3, 9, "recipe", "'reciep.yaml': no such file"),
        (HEAD.replace("recipe.yaml", "marl_phas2") + SPACE + AIMS, 3, 9, "recipe", "did you mean 'marl_phase2'?"),
        (study_text(more="set: [data.envs=2, model.lrr=1]\n"), 7, 26, "model.lrr", "unknown key - did you mean 'lr'?"),
        (study_text(more='set: ["seed=x"]\n'), 7, 13, "seed", "should be an integer, got 'x'"),
        (study_text(more="set: [seed]\n"), 7, 7, "", "should be a.b.c=VALUE"),
        (HEAD + SPACE, 1, 1, "objectives", 'is missing, such as objectives: {"eval/loss": "minimize"}'),
        (HEAD + AIMS, 1, 1, "space", 'is missing, such as space: {"optimizer.lr": {"float": '),
        ("kind: ablation\n", 1, 7, "kind", "'ablation' cannot be searched; should be 'study'; a file of "),
        ("name: x\nextends: marl_phase1\n", 1, 1, "kind", "this is a recipe, which is trained by: runner run "),
    ],
)
def test_a_mistake_beside_the_space_is_said_at_its_place(tmp_path, text, line, column, path, message):
    (found,) = problems(tmp_path, text)
    assert found[:3] == (line, column, path)
    assert message in found[3]
    assert found[4].endswith(f"study.yaml:{line}:{column}")


@pytest.mark.parametrize(
    ("parameter", "column", "path", "message"),
    [
        ("model.lr: {float: [1e-4, 1e-2], logg: true}", 35, "model.lr.logg", "unknown key - did you mean 'log'?"),
        ("model.lrr: {float: [1e-4, 1e-2]}", 3, "model.lrr", "unknown key - did you mean 'lr'?"),
        ("model.lr.rate: {float: [1, 2]}", 3, "model.lr.rate", "model.lr: should be a number, got a mapping"),
        ("model.lr: {float: [-1, 1e-2]}", 22, "model.lr", "should be greater than 0, got -1.0"),
        ("model.lr: {choice: [1e-3, 0, 1e-2]}", 29, "model.lr", "should be greater than 0, got 0"),
        ("model.lr: {choice: [1e-3, off]}", 29, "model.lr", "should be a number, got 'off'"),
        ("data.envs: {choice: [2, 2.5]}", 27, "data.envs", "should be an integer, got 2.5"),
        ("model.hidden: {choice: [[8], [900, 900]]}", 32, "model.hidden", "wider than 1000 in all"),
        ("model.order: {choice: [forward, sideways]}", 35, "model.order", "should be 'forward' or 'backward'"),
        ("train.batch_size: {int: [0, 100]}", 28, "train.batch_size", "should be greater than or equal to 1, got 0"),
        ("optimization.cache.size: {int: [0, 8]}", 35, "optimization.cache.size", "greater than or equal to 1, got 0"),
        ("optimization.cache: {choice: [off, {sizes: 3}]}", 38, "optimization.cache", "did you mean 'size'?"),
        ("optimization.cach: {choice: [off, on]}", 3, "optimization.cach", "unknown stage - did you mean 'cache'?"),
        ("optimization.cach.size: {int: [1, 2]}", 3, "optimization.cach.size", "unknown stage - did you mean 'cache'?"),
        (
            "optimization.stack.depth: {int: [1, 2]}",
            *(3, "optimization.stack.depth"),
            "never exists: 'stack' is off in the recipe, and the study does not switch it",
        ),
        ("lr: {float: [1e-4, 1e-2]}", 3, "lr", "should be the dotted path of a setting, like optimizer.lr"),
        ("seed: {int: [1, 9]}", 3, "seed", "cannot be searched: the study's 'seeds' determines the seeds"),
        ("name: {choice: [a, b]}", 3, "name", "cannot be searched: it names the runs"),
        ("tracking.experiment: {choice: [a, b]}", 3, "tracking.experiment", "it determines where runs are recorded"),
        ("extends: {choice: [a, b]}", 3, "extends", "it is only valid in a recipe"),
        ("model.password: {choice: [swordfish1, swordfish2]}", 3, "model.password", "it is a secret"),
    ],
)
def test_a_mistake_in_the_space_is_said_at_the_key_or_at_the_very_value(tmp_path, parameter, column, path, message):
    (found,) = problems(tmp_path, study_text(f"space:\n  {parameter}\n"))
    assert found[:3] == (5, column, f"space.{path}")
    assert message in found[3]


def test_a_stage_whose_plugin_is_broken_is_said_at_its_key(tmp_path):
    (found,) = problems(tmp_path, study_text("space:\n  optimization.broken: {choice: [off, on]}\n"))
    assert found[:2] == (5, 3)
    assert "cannot be imported: no torch" in found[3]


def test_every_wrong_value_of_a_space_is_said_at_once(tmp_path):
    text = study_text("space:\n  model.lr: {float: [-1, 0]}\n  data.envs: {choice: [2, many, 0.5]}\n")
    assert [(line, column) for line, column, *_ in problems(tmp_path, text)] == [(5, 22), (5, 26), (6, 27), (6, 33)]


def test_every_path_that_cannot_be_searched_is_said_at_once(tmp_path):
    text = study_text("space:\n  seed: {int: [1, 2]}\n  name: {choice: [a, b]}\n  optimization.x: {choice: [1, 2]}\n")
    assert [line for line, *_ in problems(tmp_path, text)] == [5, 6, 7]


@pytest.mark.parametrize(
    ("space", "line", "column", "message"),
    [
        (
            "  data.replay.capacity: {int: [64, 256]}\n  data.replay: {choice: [{kind: uniform}, {capacity: 9}]}\n",
            *(5, 3),
            "is part of 'data.replay', which is searched in one piece",
        ),
        (
            "  optimization.cache: {choice: [off, on]}\n  optimization.cache.size: {choice: [1, 2]}\n"
            "  optimization.cache.size.of: {choice: [1, 2]}\n",
            *(7, 3),
            "is part of 'optimization.cache.size', which is searched in one piece",
        ),
    ],
)
def test_a_setting_inside_another_that_is_searched_is_refused(tmp_path, space, line, column, message):
    found = problems(tmp_path, study_text(f"space:\n{space}"))
    assert (line, column, message) in [(each[0], each[1], each[3]) for each in found]


@pytest.mark.parametrize(
    ("space", "line", "column", "beginning", "end"),
    [
        (  # switches of stages come first
            "  model.order: {choice: [forward, backward]}\n  optimization.rival: {choice: [off, on]}\n",
            *(5, 35),
            "optimization.rival: cannot work here: backwards there is no 'loss'",
            ", with optimization.rival: on",
        ),
        (
            "  optimization.rival: {choice: [off, on]}\n  optimization.cache: {choice: [off, on]}\n",
            *(6, 38),
            "replaces 'loss', and so does 'rival'",
            ": switch one of them off, with optimization.rival: on",
        ),
        (
            "  data.warmup: {choice: [50, 200]}\n  train.env_steps: {int: [100, 5000]}\n",
            *(6, 27),
            "data.warmup: 200 leaves nothing of 100 env_steps",
            ", with data.warmup: 200",
        ),
    ],
)
def test_two_values_that_exclude_each_other_are_said_at_the_second(tmp_path, space, line, column, beginning, end):
    (found,) = problems(tmp_path, study_text(f"space:\n{space}"), "optimization.cache=off")
    assert found[:2] == (line, column)
    assert found[3].startswith(beginning)
    assert found[3].endswith(end)


@pytest.mark.parametrize(
    ("space", "sets", "given"),
    [
        ("optimizer.lr: {float: [1e-4, 1e-2], log: true}", ("optimizer.lr=2e-3",), {"optimizer.lr": 2e-3}),
        ("optimizer.weight_decay: {choice: [0.0, 0.1]}", ("optimizer.kind=adamw",), None),
        ("optimizer.kind: {choice: [adam, sgd]}", ("optimizer={kind: sgd, lr: 0.1}",), {"optimizer.kind": "sgd"}),
        ("optimizer.generator.lr: {float: [1e-4, 1e-2]}", ("model={kind: pair}",), {"optimizer.generator.lr": 2e-4}),
        ("lr_scheduler.kind: {choice: [constant, cosine]}", (), {"lr_scheduler.kind": "constant"}),
        (
            "lr_scheduler.warmup: {float: [0.0, 0.2]}",
            ("lr_scheduler={kind: cosine, warmup: 0.1}",),
            {"lr_scheduler.warmup": 0.1},
        ),
    ],
)
def test_optimizers_and_schedules_are_searched_like_any_other_setting(tmp_path, space, sets, given):
    found = read(tmp_path, study_text(f"space:\n  {space}\n"), *sets)
    (parameter,) = found.space.parameters
    for level in parameter.config.levels:
        trial = found.recipe_of({parameter.path: level}).values()
        for key in parameter.path.split("."):
            trial = trial[key]
        assert trial == level
    assert found.as_given() == given


def test_values_that_no_trial_can_have_together_exclude_nothing(tmp_path):
    space = "space:\n  optimization.cache: {choice: [off, {size: 5}]}\n  optimization.cache.size: {int: [3, 4]}\n"
    assert paths(read(tmp_path, study_text(space))) == ["optimization.cache", "optimization.cache.size"]


@pytest.mark.parametrize(
    ("space", "place"),
    [
        ("  optimization.cache: {choice: [off, on]}\n  optimization.cache.size: {int: [0, 8]}\n", (6, 35)),
        ("  optimization.stack: {choice: [off, {depth: 2}]}\n  optimization.merge: {choice: [off, on]}\n", (5, 38)),
        ("  optimization.stack.depth: {int: [1, 2]}\n" + STACKS.removeprefix("space:\n"), (5, 3)),
    ],
)
def test_values_are_tried_with_the_stages_on_that_they_need(tmp_path, space, place):
    off = ("optimization.cache=off", "optimization.merge=off")
    (found,) = problems(tmp_path, study_text(f"space:\n{space}"), *off)
    assert found[:2] == place


def test_a_stage_that_another_needs_may_be_off_where_that_one_is_switched_too(tmp_path):
    assert paths(read(tmp_path, study_text(STACKS))) == ["optimization.merge", "optimization.stack"]


def test_a_stage_that_another_needs_may_not_be_off_where_that_one_is_always_on(tmp_path):
    text = study_text("space:\n  optimization.merge: {choice: [on, off]}\n")
    (found,) = problems(tmp_path, text, "optimization.stack=on")
    assert found[:3] == (5, 37, "space.optimization.merge")
    assert "requires 'merge', which is switched off" in found[3]


def test_a_mistake_on_the_command_line_is_counted_there(tmp_path):
    (found,) = problems(tmp_path, study_text(more="set: [data.envs=2]\n"), "data.envs=3", "data.env=4")
    assert found[4] == "override"
    assert "did you mean 'envs'?" in found[3]


def test_a_message_shows_the_line_with_a_caret_and_no_secret(tmp_path):
    space = "space:\n  model.password: {choice: [swordfish1, swordfish2]}\n"
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, study_text(space))
    assert "swordfish" not in str(caught.value)
    with pytest.raises(RecipeError, match=r"(?s)5:22: space\.model\.lr: should be greater .*\n  +\^$"):
        read(tmp_path, study_text("space:\n  model.lr: {float: [-1, 1]}\n"))


def test_a_study_that_does_not_exist_is_said_so(tmp_path):
    with pytest.raises(RecipeError, match="no such file"):
        load_study(tmp_path / "absent.yaml", (), FakeCatalog())


def test_a_recipe_beside_the_study_comes_before_one_that_ships(tmp_path):
    write_recipe(tmp_path, RECIPE.replace("seed: 7", "seed: 11"), "marl_phase2.yaml")
    found = read(tmp_path, HEAD.replace("recipe.yaml", "marl_phase2.yaml") + SPACE + AIMS)
    assert found.recipe.seed == 11


@pytest.mark.parametrize("more", ["budget: {trials: 99, seconds: 5}", "limits: {seconds: 9}", "retries: 3"])
def test_budget_and_limits_may_change_while_a_study_goes_on(tmp_path, more):
    assert read(tmp_path, study_text(more=more)).digest == read(tmp_path).digest


def test_a_recipe_counts_by_what_it_comes_to_and_not_by_where_it_stands(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert read(elsewhere, study_text(more="set: [data.envs=4]\n")).digest == read(tmp_path).digest


@pytest.mark.parametrize(
    "text",
    [
        study_text(more="seed: 1\n"),
        study_text(more="seeds: 2\n"),
        study_text(more="set: [data.envs=2]\n"),
        study_text(more="sampler: {kind: random}\n"),
        study_text(more="pruner: {startup: 2}\n"),
        study_text(more="constraints: {eval/x: {max: 3}}\n"),
        study_text(aims="objectives: {eval/return: minimize}\n"),
        study_text(SPACE.replace("1e-2", "2e-2")),
        study_text(SPACE + "  data.envs: {int: [1, 4]}\n"),
        study_text().replace("name: mine", "name: yours"),
    ],
)
def test_whatever_decides_what_a_trial_comes_to_is_in_the_digest(tmp_path, text):
    assert read(tmp_path, text).digest != read(tmp_path).digest


@pytest.mark.parametrize(
    ("space", "sets", "expected"),
    [
        (SPACE, (), {"model.lr": 1e-3}),
        (SPACE, ("model.lr=2e-3",), {"model.lr": 2e-3}),
        ("space: {model.lr: {choice: [1e-4, 1e-3]}}\n", (), {"model.lr": 1e-3}),
        ("space: {model.lr: {choice: [1e-4, 1e-2]}}\n", (), None),
        ("space: {data.envs: {int: [2, 8], step: 2}}\n", (), {"data.envs": 4}),
        ("space: {data.envs: {int: [1, 9], step: 2}}\n", (), None),
        ("space: {model.hidden: {choice: [[4], [8]]}}\n", (), {"model.hidden": "[8]"}),
        (STACKS, (), {"optimization.merge": "on", "optimization.stack": "off"}),
        (STACKS, ("optimization.stack=on",), {"optimization.merge": "on", "optimization.stack": "on"}),
        (STACKS, ("optimization.merge=off",), {"optimization.merge": "off"}),
        ("space: {optimization.cache: {choice: [off, {size: 5}]}}\n", (), {"optimization.cache": "{size: 5}"}),
        (SWITCH, (), None),
        (SWITCH, ("optimization.cache.size=3",), {"optimization.cache": "on"}),
        (SWITCH.replace(" on", " true"), ("optimization.cache=on",), {"optimization.cache": True}),
        (CACHE, (), {"optimization.cache": "on", "optimization.cache.size": 5}),
        (CACHE, ("optimization.cache=off",), {"optimization.cache": "off"}),
    ],
)
def test_the_recipe_as_it_is_in_the_words_of_the_space(tmp_path, space, sets, expected):
    assert given(tmp_path, space, *sets) == expected


@pytest.mark.parametrize(
    ("space", "assignment"),
    [
        (SPACE, "model.lr=0.5"),
        ("space: {model.lr: {choice: [1e-4, 1e-2]}}\n", "model={kind: net, lr: 0.5}"),
        ("space: {model.hidden: {choice: [[4], [8]]}}\n", "model.hidden=[9]"),
        ("space: {optimization.merge: {choice: [on, true]}}\n", "optimization.merge=off"),
        (SWITCH, "optimization.cache.size=9"),
        (CACHE, "optimization.cache.size=9"),
    ],
)
def test_an_assignment_that_no_trial_can_have_is_refused(tmp_path, space, assignment):
    path = assignment.partition("=")[0] if "{" not in assignment else "model.lr"
    (problem,) = problems(tmp_path, study_text(space), assignment)
    assert (problem[2], problem[4]) == (path, "override")
    assert "is set, but no value in space." in problem[3]
    (problem,) = problems(tmp_path, study_text(space, more=f"set: ['{assignment}']\n"))
    assert (problem[0], problem[2]) == (3 + space.count("\n") + 2, path)


def test_infinities_and_nan_are_searched_like_other_values(tmp_path):
    space = "space: {data.extra.a: {choice: [.inf, -.inf, .nan, null, '.inf']}}\n"
    definition = read(tmp_path, study_text(space), "data={kind: open}", "data.extra.a=.nan", catalog=OpenCatalog())
    (parameter,) = definition.space.parameters
    recipes = [definition.recipe_of({parameter.path: choice}) for choice in parameter.config.choice]
    assert [dump_inline(recipe.data.extra["a"]) for recipe in recipes] == [".inf", "-.inf", ".nan", "null", "'.inf'"]
    assert len({recipe.digest for recipe in recipes}) == 5
    assert dump_inline(definition.as_given()) == "{data.extra.a: .nan}"
    assert definition.differing(definition.described) == []


def test_the_flagship_study_is_valid_and_begins_with_its_recipe():
    file = Path(__file__).parents[2] / "experiments" / "marl_search.yaml"
    found = load_study(file, (), Registry())
    given = found.as_given()
    assert given is not None
    assert given.keys() <= set(paths(found))
    switches = [each.stage for each in found.space.parameters if each.stage]
    assert switches.index("stacked_agents") > switches.index("forward_cache")


def test_a_constraint_without_a_bound_is_said_at_its_place(tmp_path):
    found = problems(tmp_path, study_text(more="constraints: {eval/x: {}}\n"))
    assert {each[:3] for each in found} == {(7, 23, "constraints.eval/x")}
    assert "should have min, max or both" in [each[3] for each in found]


@pytest.mark.parametrize(
    ("aims", "more", "message"),
    [
        (AIMS, "pruner: {kind: wilcoxon}\n", "pruner.kind: wilcoxon compares seeds, and seeds is 1"),
        ("objectives: {perf/x: maximize}\n", "budget: {parallel: 2}\n", "use parallel: 1"),
        ("objectives: {eval/x: maximize, eval/y: minimize}\n", "pruner: {kind: median}\n", "there are several"),
        (AIMS, "constraints: {eval/x: pass}\n", "constraints.eval/x should be a mapping with min or max"),
    ],
)
def test_settings_of_a_study_that_exclude_each_other_are_said_with_its_file(tmp_path, aims, more, message):
    (found,) = problems(tmp_path, study_text(aims=aims, more=more))
    assert found[4].startswith(str(tmp_path / "study.yaml"))
    assert message in found[3]
