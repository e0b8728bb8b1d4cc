"""Groups of seeds whose machine is gone are resumed or removed."""

import time

import pytest
from run_folders import run_folder, seed_group
from toy_runs import TOYS, SilentSeeds, toy

from runner.plugin.registry import Registry
from runner.system.errors import UsageError
from runner.system.processes import Owner
from runner.tracking import RunFolder, Workspace
from runner.tracking import workspace as workspace_module
from runner.tracking.seeds import groups
from runner.tracking.trash import remove
from runner.training.seeds import train_seeds

ELSEWHERE = Owner(pid=4711, host="elsewhere", boot_id="another")
YESTERDAY, LATELY, FUTURE = 86_400, 30, -3_600
"""Ages of a heartbeat in seconds."""
GONE = [(YESTERDAY, False), (YESTERDAY, True), (LATELY, True), (FUTURE, True)]
PERHAPS_ALIVE = [LATELY, FUTURE]


@pytest.fixture(autouse=True)
def short_watch(monkeypatch):
    monkeypatch.setattr(workspace_module, "OBSERVED_SECONDS", 0.2)
    monkeypatch.setattr(workspace_module, "GLANCE_SECONDS", 0.05)


def vanish(folder, age):
    """Makes the record of a folder that of a machine that was last heard of so long ago."""
    changes = {"status": "RUNNING", "owner": ELSEWHERE, "heartbeat": time.time() - age}
    folder.write(folder.record().model_copy(update=changes))


@pytest.mark.usefixtures("migrated_workspace", "copied_children")
def test_a_group_of_a_machine_that_vanished_is_resumed(tmp_path):
    sets = ("train.updates=4", "train.evaluate_every=2", "train.checkpoint_every=2")
    recipes = {seed: toy(tmp_path, *sets, f"seed={seed}") for seed in (5, 6)}

    def train(**options):
        registry = Registry([TOYS])
        return train_seeds(
            recipes, registry, Workspace(), SilentSeeds(), 2, tags={}, note="", resume_command="", **options
        )

    first = train(go_on=False)
    group = RunFolder(Workspace().seeds / first.name)
    for age in PERHAPS_ALIVE:
        vanish(group, age)
        with pytest.raises(UsageError, match="may be in use by process 4711 on elsewhere"):
            train(go_on=True)
    for age, takeover in GONE[::2]:
        vanish(group, age)
        vanish(RunFolder(Workspace().runs / first.runs[6]), age)
        result = train(go_on=True, takeover=takeover)
        assert (result.status, result.name, result.values) == ("FINISHED", first.name, first.values)
    assert len(groups(Workspace())) == 1


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("trains", [(), (5,)])
def test_a_group_without_all_of_its_runs_is_not_finished(trains, tmp_path, monkeypatch):
    def train_seed(recipe, registry, run, threads, options, *rest):
        if recipe.seed in trains:
            run_folder(digest=recipe.digest, group=options["group"][0], status="FINISHED")

    monkeypatch.setattr("runner.training.seeds.train_seed", train_seed)
    recipes = {seed: toy(tmp_path, "train.updates=4", f"seed={seed}") for seed in (5, 6)}
    result = train_seeds(
        recipes, Registry([TOYS]), Workspace(), SilentSeeds(), 1, go_on=False, tags={}, note="", resume_command=""
    )
    assert (result.status, result.exit_code) == ("FAILED", 1)
    assert result.failures.keys() == {5, 6} - set(trains)
    assert {group.status for group in groups(Workspace())} == {"FAILED"}


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize(("age", "takeover"), GONE)
def test_a_group_of_a_machine_that_vanished_is_removed(age, takeover):
    group, runs = seed_group(1, 2)
    for folder in (group, *runs):
        vanish(folder, age)
    remove(Workspace(), [group], purge=False, takeover=takeover)
    assert groups(Workspace()) == []
    assert not any(folder.path.exists() for folder in (group, *runs))


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("age", PERHAPS_ALIVE)
def test_a_group_whose_machine_may_be_there_is_not_removed(age):
    group, _ = seed_group(1, 2)
    vanish(group, age)
    with pytest.raises(UsageError, match="if that machine is gone, add --takeover"):
        remove(Workspace(), [group], purge=False)
    assert group.path.exists()
