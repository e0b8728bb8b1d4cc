import io

import pytest
from run_folders import run_folder, seed_group

from runner.system.console import Console
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking.listing import described
from runner.tracking.run_summary import show


def printed(folder, width=80, below=()):
    screen = io.StringIO()
    show(described(folder), below, Console(file=screen, width=width))
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def test_a_finished_run_says_what_it_is_what_it_learnt_and_what_to_compare():
    folder = run_folder(
        status="FINISHED", step=100, seconds=434.0, run_id="3f" * 16, overrides={"seed": "3", "optimizer.lr": "1e-4"},
        headline=("eval/return", "eval/success_rate"),
        metrics={"eval/a": 1.0, "eval/return": 874.43, "train/loss": 0.5, "perf/update_ms": 20.31, "system/x": 1.0},
    )  # fmt: skip
    lines = printed(folder)
    assert lines[0] == f"{folder.name}: FINISHED"
    assert [" ".join(line.split()) for line in lines[1:]][:6] == [
        "recipe marl", "settings seed=3", "optimizer.lr=1e-4", "result return 874.4", "a 1", "training loss 0.5",
    ]  # fmt: skip
    text = "\n".join(lines)
    for said in ("20.3 ms per update", "100 updates in 7 min", f"MLflow id {'3f' * 16}", "runner compare", "s ago"):
        assert said in text
    assert "system" not in text
    assert str(folder.path) in "".join(line.strip() for line in lines)


def test_a_run_that_can_go_on_says_how_and_a_failed_one_why():
    folder = run_folder(status="FAILED", step=7, reason="out of luck\nmore of it")
    (folder.path / LOCK_NAME).write_text("lock: 1\n")
    text = "\n".join(printed(folder))
    for said in ("reason", "out of luck", "7/100 updates", "as in the recipe", f"runner resume {folder.name}"):
        assert said in text


@pytest.mark.parametrize(("kind", "said"), [("study", "runner study show"), ("ablation", "README.md")])
def test_ablations_and_studies_say_where_more_is(kind, said):
    folder = run_folder(kind=kind, status="KILLED", headline=("all",), metrics={"all": 4.42})
    text = "\n".join(printed(folder, 200))
    assert "result" in text
    assert said in text
    assert "all 4.42" in text
    assert "the same command continues it" in text


def test_of_a_damaged_record_is_said_what_is_known():
    folder = run_folder()
    (folder.path / "run.json").write_text("{")
    text = "\n".join(printed(folder))
    assert f"{folder.name}: UNKNOWN" in text
    assert "its run.json cannot be read" in text


def test_a_group_of_seeds_says_what_it_came_to_and_which_runs_it_has():
    group, runs = seed_group(10, 14)
    text = "\n".join(printed(group, 120, [described(run) for run in runs]))
    for said in (
        "return 12 [-13.41, 37.41]", f"{runs[0].name}: seed 10, FINISHED, return 10", f"{runs[1].name}: seed 14",
        "2 seeds", f"runner compare {group.name[-8:]} OTHER_GROUP",
    ):  # fmt: skip
        assert said in text
    assert "eval_low" not in text


@pytest.mark.parametrize(("kind", "word"), [("seeds", "seed"), ("folds", "fold")])
def test_members_of_a_group_are_named_by_what_they_differ_in(kind, word):
    group, runs = seed_group(10, 14, kind=kind)
    text = "\n".join(printed(group, 120, [described(run) for run in runs]))
    for number, run in zip((10, 14), runs, strict=True):
        assert f"{run.name}: {word} {number}, FINISHED" in text
    assert "return 12 [-13.41, 37.41]" in text
    assert f"runner compare {group.name[-8:]} OTHER_GROUP" in text


def test_members_of_a_grid_are_named_by_their_settings():
    group, runs = seed_group(10, 14, kind="grid", overrides={"train.updates": "4"})
    for rate, run in zip(("1e-3", "1e-2"), runs, strict=True):
        overrides = {"train.updates": "4", "optimizer.lr": rate}
        run.write(run.record().model_copy(update={"overrides": overrides}))
    text = "\n".join(printed(group, 120, [described(run) for run in runs]))
    assert f"{runs[0].name}: run 10, optimizer.lr=1e-3, FINISHED" in text
    assert f"{runs[1].name}: run 14, optimizer.lr=1e-2, FINISHED" in text
    assert ": seed " not in text
    assert "runner compare" not in text
