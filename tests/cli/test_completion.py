"""What TAB offers, as a shell asks for it, and what that imports."""

import os
import subprocess
import sys

import pytest
from run_folders import run_folder, seed_group

from runner.cli import completion
from runner.plugin.registry import GROUP, SECTIONS, Registry
from runner.recipe.loader import shipped
from runner.tracking import RunFolder, Workspace

HEAVY = {"torch", "mlflow", "optuna", "numpy", "yaml"}
CODE = f"""
import atexit, sys
atexit.register(lambda: print("heavy:", *sorted({HEAVY} & sys.modules.keys()), file=sys.stderr))
sys.argv[0] = "runner"
from runner.cli import main
main()
"""


def offered(*words):
    """What bash is given after ``runner WORDS``, the last of which is not finished."""
    variables = {
        "_RUNNER_COMPLETE": "complete_bash",
        "COMP_WORDS": f"runner {' '.join(words)}",
        "COMP_CWORD": len(words),
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    child = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert child.stderr == "heavy:\n"
    return child.stdout.split()


@pytest.fixture
def runs():
    """A run, an ablation and a study."""
    run = run_folder("marl_phase1", started=1.0)
    names = [run.name]
    for place, name in (("ablations", "phases-00000001"), ("studies", "search")):
        folder = RunFolder(Workspace().root / place / name)
        folder.path.mkdir(parents=True)
        folder.write(run.record().model_copy(update={"name": name}))
        names.append(name)
    return names


@pytest.mark.parametrize("verb", ["run", "verify", "profile", "ablate", "validate"])
def test_verbs_that_take_a_recipe_offer_those_that_ship(verb):
    assert offered(verb, "marl_ph") == ["marl_phase1", "marl_phase2", "marl_phase3"]


def test_verbs_that_take_a_run_offer_those_of_the_workspace(runs):
    run, ablation, _ = runs
    for verb in ("resume", "compare", "sync"):
        assert offered(verb, "marl") == [run]
    assert offered("rm", ablation[:3]) == [ablation]
    group, _ = seed_group(5, 6)
    for verb in ("rm", "compare", "show"):
        assert offered(verb, "marl-s") == [group.name]
    assert offered("show", "marl_phase1") == ["marl_phase1", run]
    assert offered("study", "show", "sea") == ["search"]


def test_plugins_and_stages_are_offered():
    assert offered("plugins", "uav") == ["uav_path_planning"]
    assert offered("verify", "marl_phase1", "--stage", "forw") == ["forward_cache"]


def test_what_is_offered_is_all_that_there_is(runs):
    registry = Registry()
    assert completion.recipes("") == sorted(shipped())
    assert sorted(completion.kinds("")) == sorted(kind for section in SECTIONS for kind in registry.kinds(section))
    assert completion.stages("") == registry.kinds("optimization")
    assert GROUP == "runner.plugins"
    assert completion.removable("") == runs[:2]
