import pytest

from runner.plugin.registry import Registry
from runner.recipe.loader import from_values, load
from runner.recipe.lock import write_lock
from runner.recipe.yaml_nodes import RecipeError

PRUNED = ("inference.prune={ff: 0.5}", "inference.compile=on")


def loaded(*sets):
    return load("digits_classifier", sets, Registry())


def test_stages_for_inference_are_no_stages_of_the_training():
    recipe = loaded(*PRUNED)
    assert list(recipe.inference) == ["prune", "compile"]
    assert not recipe.inference.keys() & recipe.stages.keys()
    assert recipe.digest == loaded().digest
    assert "inference" not in loaded().values()


def test_a_lock_has_them(tmp_path):
    recipe = loaded(*PRUNED)
    again = load(write_lock(recipe, tmp_path, Registry()), [], Registry())
    assert again.inference == recipe.inference
    assert from_values(recipe.values(masked=False), "here.yaml", {}, Registry()).inference == recipe.inference


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("inference.prun=on", "unknown stage - did you mean 'prune'?"),
        ("inference.fused_optimizer=on", "unknown stage"),
        ("inference.prune={ff: 2}", "should be less than"),
        ("inference.prune=3", "should be on, off or its settings"),
        ("inference=[prune]", "should be a mapping of stages"),
    ],
)
def test_what_is_wrong_is_said_at_its_place(given, message):
    with pytest.raises(RecipeError, match="inference") as told:
        loaded(given)
    assert message in str(told.value)


def test_a_stage_that_is_off_is_not_there():
    assert loaded("inference.compile=off").inference == {}
