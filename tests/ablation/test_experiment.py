import pytest

from runner.ablation.experiment import RoundsConfig, load_experiment
from runner.plugin.registry import Registry
from runner.recipe.yaml_nodes import RecipeError

HEAD = "kind: ablation\nname: mine\nrecipe: marl_phase3\n"


def read(tmp_path, text, *sets, budget=None):
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    return load_experiment(path, sets, Registry(), budget)


def problems(tmp_path, text, *sets):
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, text, *sets)
    return [(p.place.line, p.place.column, p.path, p.message, str(p.place)) for p in caught.value.problems]


def test_cases_are_recipes_with_the_assignments_of_all_of_one_and_of_the_command_line(tmp_path):
    text = HEAD + (
        "set: [seed=5, train.batch_size=32]\n"
        "cases:\n  few: {set: [data.followers=1], published: {phase 1: 1.5, all: 2}}\n  many: {set: [seed=7]}\n"
        "budget: 60\nrounds: {least: 3, most: 5}\nvariants: [all, phases]\n"
    )
    found = read(tmp_path, text, "train.batch_size=64")
    few, many = found.cases
    assert (few.recipe.data.followers, few.recipe.seed, few.recipe.train.batch_size) == (1, 5, 64)
    assert (many.recipe.data.followers, many.recipe.seed) == (3, 7)
    assert few.published == {"phase 1": 1.5, "all": 2}
    assert found.config.rounds.most == 5
    assert found.config.budget == 60.0
    shorter = read(tmp_path, text, "train.batch_size=64", budget=10.0)
    assert (shorter.config.budget, shorter.digest) == (10.0, found.digest)
    assert found.digest != read(tmp_path, text).digest


@pytest.mark.parametrize(("most", "a_process"), [(3, 1), (5, 1), (8, 1), (20, 4), (60, 4)])
def test_there_are_five_processes_where_there_are_as_many_rounds(most, a_process):
    assert RoundsConfig(least=3, most=most).a_process == a_process


def test_a_bare_recipe_is_measured_with_default_settings(tmp_path):
    found = load_experiment("marl_phase2", ["seed=3"], Registry())
    assert [case.name for case in found.cases] == [""]
    assert found.cases[0].recipe.seed == 3
    assert found.config.name == "marl_phase2"
    assert found.cases[0].sets == ("seed=3",)


def test_a_recipe_beside_the_experiment_comes_first(tmp_path):
    (tmp_path / "own.yaml").write_text("name: own\nextends: marl_phase1\nseed: 11\n")
    found = read(tmp_path, "kind: ablation\nname: mine\nrecipe: own.yaml\n")
    assert found.cases[0].recipe.seed == 11


@pytest.mark.parametrize(
    ("text", "line", "column", "path", "message"),
    [
        (HEAD + "budgett: 3\n", 4, 1, "budgett", "unknown key - did you mean 'budget'?"),
        (HEAD + "budget: -1\n", 4, 9, "budget", "should be greater than 0, got -1"),
        (HEAD + "rounds: {least: 9, most: 3}\n", 4, 9, "rounds", "least, 9, is more than most, 3"),
        (HEAD + "variants: [alone, every]\n", 4, 19, "variants.1", "should be"),
        (HEAD + "name: twice\n", 4, 1, "name", "duplicate key"),
        (HEAD + "cases: {few: {sett: []}}\n", 4, 15, "cases.few.sett", "unknown key - did you mean 'set'?"),
        (HEAD + "set: [data.folowers=2]\n", 4, 12, "data.folowers", "unknown key - did you mean 'followers'?"),
        (HEAD + 'set: ["seed=x"]\n', 4, 13, "seed", "should be an integer, got 'x'"),
        (HEAD + "set: [seed=1]\ncases:\n  few: {set: [seed=2, seed=x]}\n", 6, 28, "seed", "should be an integer"),
        (HEAD + "cases: {few: {published: {phase 7: 2}}}\n", 4, 27, "cases.few.published.phase 7", "no variant"),
        (HEAD.replace("phase3", "phas3"), 3, 9, "recipe", "did you mean 'marl_phase3'?"),
        (HEAD.replace("phase3", "baseline"), 3, 9, "optimization", "no stage is switched on"),
        (
            "kind: study\n",
            1,
            7,
            "kind",
            "cannot be ablated; should be 'ablation'; a file of that kind is for: runner study run",
        ),
    ],
)
def test_every_mistake_is_said_at_its_place(tmp_path, text, line, column, path, message):
    (found,) = problems(tmp_path, text)
    assert found[:3] == (line, column, path)
    assert message in found[3]


def test_a_mistake_on_the_command_line_is_counted_there(tmp_path):
    (found,) = problems(tmp_path, HEAD + "set: [seed=1]\n", "data.followers=1", "seed=x")
    assert found[4] == "override"
