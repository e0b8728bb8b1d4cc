"""Tuning choices are a part of a run: its lock has them, and what is run or resumed from it makes the same ones."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch
import yaml
from children import start
from interrupted import learnt, same
from running import NoDisplay
from toy_runs import TOYS, toy, written
from tuners import SEARCHES

from runner.api import Probe
from runner.plugin.registry import Registry
from runner.plugin.tuning import Tuning
from runner.recipe.loader import load
from runner.recipe.lock import is_trusted, read_lock, write_tuning
from runner.recipe.yaml_nodes import LockError
from runner.system.errors import UsageError
from runner.tracking import Workspace
from runner.tracking.comparison import compare
from runner.training.pipeline import Assembly, assemble
from runner.training.run import run

pytestmark = pytest.mark.usefixtures("migrated_workspace")
TUNERS = Path(__file__).parents[1] / "tuners.py"
SETS = ("optimization.tuner=on", "train.updates=12", "train.checkpoint_every=4", "train.log_every=2")


@pytest.fixture
def searches(tmp_path, monkeypatch):
    """A file with a line for every search."""
    path = tmp_path / "searches"
    path.touch()
    monkeypatch.setenv(SEARCHES, str(path))
    return path


def registry():
    return Registry([TOYS, TUNERS])


def trained(folder, *sets, **options):
    written(folder)
    recipe = load(folder / "toy.yaml", [*SETS, *sets], registry())
    return run(recipe, registry(), Workspace(), NoDisplay(), **options)


def trained_from(lock, *sets, **options):
    return run(load(lock, sets, registry()), registry(), Workspace(), NoDisplay(), **options)


def losses(result):
    """What a training learns depends on the choice."""
    lines = (Path(result.run_dir) / "spool.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    names = ("train/loss", "eval/loss")
    return [(entry["step"], name, entry["metrics"][name]) for entry in entries if entry.get("metrics") for name in names
            if name in entry["metrics"]]  # fmt: skip


def choice(result):
    return read_lock(Path(result.lock))["tuning"]["choices"]["tuner"]["scale"]


def test_a_run_of_the_lock_makes_the_choices_of_the_lock(tmp_path, searches):
    first = trained(tmp_path)
    second = trained_from(first.lock)
    assert choice(first) == choice(second)
    assert losses(first) == losses(second)
    assert len(searches.read_text().splitlines()) == 1
    assert is_trusted(Path(first.lock))

    third = trained_from(first.lock, retune=True)
    assert choice(third) != choice(first)
    assert losses(third) != losses(first)
    assert len(searches.read_text().splitlines()) == 2

    compared = compare(Workspace(), [first.run_name, third.run_name])
    assert compared["environment"]["tuning.tuner.scale"] == [str(choice(first)), str(choice(third))]
    compared = compare(Workspace(), [first.run_name, second.run_name])
    assert not any(name.startswith("tuning.") for name in compared["environment"])


@pytest.mark.parametrize("fault", ["tuning.stored=kill", "checkpoint.renamed=kill@2"])
def test_a_killed_run_is_resumed_with_its_choices(fault, tmp_path, isolated_workspace, searches):
    """Killed before its first checkpoint, or after it: it comes out as the run of its lock that is not killed."""
    command = [*written(tmp_path, *SETS), "--plugin", str(TUNERS)]
    assert start(tmp_path, *command, RUNNER_FAULTS=fault).wait() == -signal.SIGKILL
    (folder,) = isolated_workspace.glob("runs/*")
    resumed = start(
        tmp_path, "resume", folder.name, "--quiet", "--json", "--plugin", str(TOYS), "--plugin", str(TUNERS)
    )
    result = resumed.data()
    assert "not resumed bit for bit" not in resumed.stderr
    assert len(searches.read_text().splitlines()) == 1
    complete = trained_from(Path(result["lock"]))
    same(learnt(result), learnt(complete.data()))


def test_a_disk_that_takes_no_choice_stops_the_run_with_the_command_that_resumes_it(
    tmp_path, isolated_workspace, searches
):
    command = [*written(tmp_path, *SETS), "--plugin", str(TUNERS)]
    stopped = start(tmp_path, *command, RUNNER_FAULTS="tuning.stored=enospc")
    assert stopped.wait() == 1
    (folder,) = isolated_workspace.glob("runs/*")
    assert f"when the disk takes files again: runner resume {folder.name}" in stopped.stderr.splitlines()[-1]
    plugins = ["--plugin", str(TOYS), "--plugin", str(TUNERS)]
    start(tmp_path, "resume", folder.name, "--quiet", "--json", *plugins).data()
    assert len(searches.read_text().splitlines()) == 1


def test_other_threads_are_refused_in_one_line(tmp_path, searches):
    first = trained(tmp_path)
    threads = torch.get_num_threads()
    other = threads + 1
    try:
        torch.set_num_threads(other)
        with pytest.raises(UsageError, match="--retune") as refusal:
            trained_from(first.lock)
        retuned = trained_from(first.lock, retune=True)
    finally:
        torch.set_num_threads(threads)
    assert refusal.value.exit_code == 2
    assert "\n" not in str(refusal.value)
    assert f"threads {threads}, here {other}" in str(refusal.value)
    assert read_lock(Path(retuned.lock))["tuning"]["machine"]["threads"] == other


def test_another_machine_is_refused(tmp_path, searches):
    lock = Path(trained(tmp_path, "train.updates=4").lock)
    data = read_lock(lock)["tuning"]
    for name in ("cpu", "instructions", "torch", "numpy", "python", "device"):
        write_tuning(lock.parent, {**data, "machine": data["machine"] | {name: "another"}})
        with pytest.raises(UsageError, match=f"tuning: the choices of tuner were made with {name} another, here"):
            trained_from(lock)


def test_a_resumed_run_that_searches_again_goes_on_with_other_choices(tmp_path, isolated_workspace, searches):
    command = [*written(tmp_path, *SETS), "--plugin", str(TUNERS)]
    killed = start(tmp_path, *command, RUNNER_FAULTS="checkpoint.renamed=kill@2")
    assert killed.wait() == -signal.SIGKILL
    (lock,) = isolated_workspace.glob("runs/*/recipe.lock.yaml")
    data = read_lock(lock)["tuning"]
    write_tuning(lock.parent, {**data, "machine": data["machine"] | {"cpu": "another"}})
    resume = ["resume", lock.parent.name, "--quiet", "--json", "--plugin", str(TOYS), "--plugin", str(TUNERS)]
    refused = start(tmp_path, *resume)
    assert refused.wait() == 2
    (line,) = [line for line in refused.stderr.splitlines() if "tuning" in line]
    assert "cpu another, here" in line
    start(tmp_path, *resume, "--retune").data()
    renewed = read_lock(lock)["tuning"]
    assert renewed["machine"] == data["machine"]
    assert renewed["choices"] != data["choices"]


def test_choices_for_other_settings_are_not_used(tmp_path, searches, caplog):
    first = trained(tmp_path, "train.updates=4")
    same_settings = load(first.lock, ["train.updates=6", "seed=3"], registry())
    assert same_settings.tuning is not None
    for setting in ("model.dropout=0.0", "train.batch_size=4", "optimization.tuner.step=3", "data.rows=32"):
        caplog.clear()
        assert load(first.lock, [setting], registry()).tuning is None
        assert setting.partition("=")[0] in caplog.text


def test_a_damaged_section_is_refused_at_its_line(tmp_path, searches):
    values = yaml.safe_load(Path(trained(tmp_path, "train.updates=4").lock).read_text())
    lock = tmp_path / "copy" / "recipe.lock.yaml"
    lock.parent.mkdir()
    for damage in (3, "x", [], {"machine": {}}, {"machine": {}, "choices": {"tuner": 1}}):
        lock.write_text(yaml.safe_dump(values | {"tuning": damage}, sort_keys=False))
        with pytest.raises(LockError, match=r"recipe\.lock\.yaml:\d+:\d+: tuning: "):
            load(lock, (), registry())


def test_stages_that_are_off_need_no_choices(tmp_path, searches):
    lock = Path(trained(tmp_path, "train.updates=4").lock)
    data = read_lock(lock)["tuning"]
    write_tuning(lock.parent, {**data, "machine": data["machine"] | {"cpu": "another"}})
    assert assemble(load(lock, ["optimization.tuner=off"], registry()), registry().files).tuning.data() == {}


def test_the_batch_size_that_was_found_best_is_in_the_lock(tmp_path, monkeypatch):
    probed = []

    def probe(pipeline, batch_size):
        probed.append(batch_size)
        return Probe(1e3 * batch_size, 1, 100)

    monkeypatch.setattr(Assembly, "probe", probe)
    sets = ("optimization.batch_autotune={largest: 16}", "train={epochs: 1, batch_size: 8}")
    recipe = toy(tmp_path, *sets)
    result = run(recipe, Registry([TOYS]), Workspace(), NoDisplay())
    size = read_lock(Path(result.lock))["tuning"]["choices"]["batch_autotune"]["batch_size"]
    searched = len(probed)
    pipeline = assemble(load(result.lock, (), Registry([TOYS])), [TOYS])
    assert pipeline.batch_size == size == 16
    assert len(probed) == searched > 0
    assert pipeline.reports["batch_autotune"].notes == [f"batch size 8 -> {size}, as recorded in the lock"]


@pytest.mark.parametrize("recorded", ["x", 0, 1, -8, 7, 32, 1.5, True, [8], {"a": 1}])
def test_a_batch_size_that_no_search_selects_is_refused(recorded, tmp_path):
    recipe = toy(tmp_path, "optimization.batch_autotune={largest: 16}", "train={epochs: 1, batch_size: 8}")
    tuning = Tuning({})
    tuning.lock({"batch_autotune": {"batch_size": recorded}})
    with pytest.raises(UsageError, match=re.escape(f"the lock records {recorded!r}, should be a batch size from 8 to")):
        assemble(recipe, [TOYS], tuning=tuning)
