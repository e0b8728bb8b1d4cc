"""The section ``system``: its values, its messages, and its place in lock and digest."""

import pytest
from faces import FakeCatalog, write_recipe

from runner.recipe.loader import load
from runner.recipe.lock import drift, locked_threads, read_lock, write_lock
from runner.recipe.yaml_nodes import RecipeError

PASSWORD = "model.password=hunter2"
USE = {"threads": 3, "threads_reason": "system.threads=3", "wait": "active", "wait_reason": "", "variables": {}}


def loaded(folder, *sets):
    return load(write_recipe(folder), [*sets, PASSWORD], FakeCatalog())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("system.threads=0", "system.threads: should be auto or an integer of at least 1, got 0"),
        ("system.threads=2.5", "system.threads: should be auto or an integer of at least 1, got 2.5"),
        ("system.threads=many", "system.threads: should be auto or an integer of at least 1, got 'many'"),
        ("system.threads=true", "system.threads: should be auto or an integer of at least 1, got True"),
        ("system.wait=never", "system.wait: should be 'auto', 'active' or 'passive', got 'never'"),
        ("system.waits=auto", "system.waits: unknown key - did you mean 'wait'?"),
    ],
)
def test_what_is_wrong_is_one_problem_at_its_place(tmp_path, setting, message):
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, setting)
    assert [str(problem).splitlines()[0] for problem in caught.value.problems] == [f"override: {message}"]


def test_the_number_of_threads_is_part_of_what_is_trained_and_how_they_wait_is_not(tmp_path):
    plain = loaded(tmp_path)
    assert "system" not in plain.values()
    assert loaded(tmp_path, "system.wait=passive").digest == plain.digest
    assert loaded(tmp_path, "system.threads=2").digest != plain.digest
    assert loaded(tmp_path, "system={threads: 2, wait: active}").values()["system"] == {"threads": 2, "wait": "active"}


def test_the_lock_has_the_choice_with_its_reason_and_another_one_is_no_drift(tmp_path):
    recipe = loaded(tmp_path, "system.threads=3")
    (tmp_path / "run").mkdir()
    lock = write_lock(recipe, tmp_path / "run", FakeCatalog(), processor=USE)
    assert read_lock(lock)["system"] == USE
    assert locked_threads(lock) == 3
    again = load(lock, ["system.wait=passive", PASSWORD], FakeCatalog())
    changes = [change for change in drift(lock, again, FakeCatalog()) if change.name.startswith("recipe")]
    assert [(change.name, change.matters) for change in changes] == [("recipe.system.wait", False)]
    others = load(lock, ["system.threads=4", PASSWORD], FakeCatalog())
    assert [change.matters for change in drift(lock, others, FakeCatalog())] == [True]


def test_an_older_lock_has_the_threads_that_torch_had(tmp_path):
    import torch

    (tmp_path / "run").mkdir()
    lock = write_lock(loaded(tmp_path), tmp_path / "run", FakeCatalog())
    assert "system" not in read_lock(lock)
    assert locked_threads(lock) == torch.get_num_threads()
