import io
import json
import math
import random
import shutil

import pytest
from run_folders import run_folder, seed_group

from runner.system.console import Console
from runner.system.processes import Owner
from runner.tracking import Workspace
from runner.tracking.listing import listing, show
from runner.tracking.record import Record
from runner.tracking.selection import select
from runner.tracking.workspace import RunFolder
from runner.training.checkpoint import write_manifest

REASON = "the checkpoint at step 400 could not be written: it needs 0.2 MiB and the disk has 0.0 MiB free"


UNKNOWN = dict.fromkeys(Record.model_fields.keys() - {"name"}) | {"status": "UNKNOWN"}


def run(name="marl_phase2-3f2a91c0", **changes):
    known = dict.fromkeys(Record.model_fields) | {
        "name": name,
        "status": "FINISHED",
        "reason": "",
        "step": 60_000,
        "goal": 60_000,
        "unit": "steps",
        "started": 1_700_000_000.0,
        "last_checkpoint": 60_000,
        "resumable": False,
        "not_resumable": "it is finished",
        "unsent_bytes": 0,
        "kind": "run",
        "seconds": 434.0,
        "overrides": {},
        "headline": ["eval/return", "eval/success_rate"],
        "metrics": {"eval/return": 874.43, "perf/update_ms": 20.3},
    }
    return known | changes


RUNS = [
    run("marl_phase2-00000001", status="RUNNING", step=120, not_resumable="process 7 on here is training it"),
    run("marl_phase2-00000002"),
    run("marl_phase2-00000003", status="FAILED", reason=f"{REASON}\nmore", resumable=True, not_resumable=""),
    run(
        "marl_phase2-00000004", status="KILLED", resumable=True, not_resumable="", unsent_bytes=9, last_checkpoint=None
    ),
    run("marl_phase2-00000005", not_resumable="its run.json cannot be read", last_checkpoint=60_000, **UNKNOWN),
]


def printed(runs, width):
    screen = io.StringIO()
    show(runs, "", Console(file=screen, width=width))
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 160])
@pytest.mark.parametrize("name", ["marl_phase2", "a" * 40, "名" * 12])
def test_names_and_words_stay_whole_on_any_screen(name, width):
    runs = [each | {"name": each["name"].replace("marl_phase2", name)} for each in RUNS]
    lines = printed(runs, width)
    assert all(line == line.rstrip() for line in lines)
    for each in runs:
        (line,) = [line for line in lines if each["name"] in line]
        own_line = line == each["name"]
        assert own_line or each["status"] in line
    for word in ("RUNNING", "120/60,000", "cannot", "sync"):
        assert any(word in line for line in lines)


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (160, "run status progress objective took checkpoint started resume"),
        (80, "run status progress objective resume"),
        (60, "run status progress objective resume"),
        (40, "run status progress resume"),
    ],
)
def test_a_narrow_screen_does_without_what_matters_least(width, titles):
    lines = printed(RUNS, width)
    heads = lines[: 1 if "status" in lines[0] else 2]  # a name that does not fit has a line of its own
    assert " ".join(" ".join(heads).split()) == titles
    columns = [line for line in lines if not line.startswith("    ")]
    assert max(map(len, columns)) <= width


@pytest.mark.parametrize("seed", range(60))
def test_a_run_that_can_be_resumed_is_never_without_the_column_that_states_it(seed):
    draw = random.Random(seed)
    width = draw.randint(76, 100)
    can_resume = draw.random() < 0.7
    runs = []
    for number in range(draw.randint(1, 5)):
        name = f"{draw.choice(('digits_classifier', 'gpt', 'marl_phase2_with_a_longer_name'))}-{number:08x}"
        goal = draw.choice((12, 2_000, 60_000))
        unit = draw.choice(("epochs", "updates", "env_steps"))
        counts = {"step": draw.randint(0, goal), "goal": goal, "unit": unit}
        runs.append(run(name, last_checkpoint=goal, **counts))
    if can_resume:
        runs[-1] |= {"status": "KILLED", "resumable": True, "not_resumable": ""}
    heads = " ".join(printed(runs, width)[:2]).split()
    needed = 28 + 10 + 21 + 13 + 6  # of the other columns, if names have separate lines
    assert needed < 80
    if can_resume:
        assert "resume" in heads
    elif "checkpoint" not in heads:
        assert "resume" not in heads


def test_what_is_to_be_said_about_a_run_is_below_it():
    lines = printed(RUNS, 160)
    assert lines[2] == "    process 7 on here is training it"
    assert lines[3].split() == [
        *("marl_phase2-00000002", "FINISHED", "60,000", "steps", "return", "874.4", "7", "min", "60,000"),
        *lines[3].split()[-4:-2],
        "ago",
        "-",
    ]
    assert lines[5] == f"    {REASON}"
    assert lines[7] == "    not completely in MLflow yet: runner sync"
    assert lines[8].split() == ["marl_phase2-00000005", "UNKNOWN", "-", "-", "-", "60,000", "-", "no"]
    assert lines[9] == "    its run.json cannot be read"


@pytest.mark.parametrize("smoke", [False, True])
def test_what_a_smoke_test_sets_is_not_listed_as_an_override(smoke):
    overrides = {"seed": "3", "train.updates": "8", "train.smoke": "true", "data.limit": "{train: 0.01}"}
    text = "\n".join(printed([run(overrides=overrides, smoke=smoke)], 160))
    assert "seed=3" in text
    assert ("train.updates=8" in text) is not smoke


def test_what_was_overridden_is_below_a_run_and_no_setting_is_torn():
    overrides = {"seed": "3", "optimizer.actor.lr": "1e-4", "data.root": "/a-path" * 10}
    (line, other) = printed([run(overrides=overrides)], 80)[2:]
    assert line == "    seed=3 optimizer.actor.lr=1e-4"
    assert other == f"    data.root={'/a-path' * 10}"


def test_kinds_are_told_where_there_are_several():
    ablation = run("marl_phases-00000009", kind="ablation", unit="rounds", headline=["all"], metrics={"all": 4.42})
    lines = printed([run(), ablation], 120)
    assert "kind" in lines[0]
    assert lines[2].split()[:6] == ["marl_phases-00000009", "ablation", "FINISHED", "60,000", "rounds", "all"]
    assert "kind" not in printed([run()], 120)[0]


def test_an_empty_workspace_says_what_to_do():
    assert printed([], 80) == ["no runs yet; start one: runner run marl_phase2"]


def test_the_data_is_all_that_is_known(isolated_workspace):
    older = run_folder("older", started=1.0, status="KILLED", step=7)
    newer = run_folder("newer")
    for step, done in ((40, 1), (80, 2)):
        folder = newer.path / "checkpoints" / f"step-{step:012d}"
        folder.mkdir(parents=True)
        write_manifest(folder, {"format": 1, "step": step, "done": done, "score": None, "sha256": {}})
    torn = newer.path / "checkpoints" / "step-000000000120"
    torn.mkdir()
    (torn / "manifest.json").write_text('{"format"')
    first, second = json.loads(json.dumps(listing(Workspace())))
    assert (first["name"], second["name"]) == (newer.name, older.name)
    known = json.loads(older.record().model_dump_json()) | {"tracking_uri": Workspace().tracking_uri}
    assert second.items() >= known.items()
    assert (first["last_checkpoint"], second["last_checkpoint"]) == (2, None)
    assert (first["step"], second["step"]) == (2, 7)  # nobody has noted more than the checkpoint has
    assert first["run_dir"] == str(newer.path)
    assert first["unsent_bytes"] == newer.spool.stat().st_size
    assert (first["resumable"], first["not_resumable"]) == (False, "it ended before its lock was written")


def test_ablations_and_studies_are_listed_with_runs_and_what_was_laid_aside_is_not(isolated_workspace):
    runs = [run_folder("marl", started=3.0)]
    for place, kind, name in (("ablations", "ablation", "phases-00000001"), ("studies", "study", "search")):
        folder = RunFolder(isolated_workspace / place / name)
        folder.path.mkdir(parents=True)
        known = runs[0].record().model_copy(update={"kind": kind, "name": name, "started": 2.0})
        folder.write(known)
        runs.append(folder)
    shutil.copytree(runs[2].path, runs[2].path.with_name("search.17.before"))
    dead = Owner.this_process().model_copy(update={"born": 1.0})
    runs[1].write(runs[1].record().model_copy(update={"owner": dead, "started": 1.0}))
    found = listing(Workspace())
    assert [(each["name"], each["kind"], each["status"]) for each in found] == [
        (runs[0].name, "run", "RUNNING"), ("search", "study", "RUNNING"), ("phases-00000001", "ablation", "KILLED"),
    ]  # fmt: skip
    assert found[2]["not_resumable"] == "the same command continues it"


def test_numbers_that_are_none_survive_the_record_and_are_text(isolated_workspace):
    folder = run_folder(metrics={"eval/return": math.nan, "train/loss": math.inf})
    assert math.isnan(folder.record().metrics["eval/return"])
    (found,) = json.loads(json.dumps(listing(Workspace()), allow_nan=False))
    assert found["metrics"] == {"eval/return": "NaN", "train/loss": "Infinity"}


def test_a_damaged_record_is_shown_as_such(isolated_workspace):
    whole, damaged = run_folder(), run_folder()
    (damaged.path / "run.json").write_text('{"name": ')
    shutil.copytree(whole.path, whole.path.with_name("renamed"))  # the record of another run
    found = {each["name"]: each for each in listing(Workspace())}
    assert found[damaged.name]["status"] == found["renamed"]["status"] == "UNKNOWN"
    assert found[whole.name].keys() == found[damaged.name].keys()
    assert found[damaged.name]["not_resumable"] == "its run.json cannot be read"
    assert len(printed(list(found.values()), 80)) > len(found)


def test_a_group_of_seeds_is_one_line_with_its_mean_and_its_runs_are_below(isolated_workspace):
    group, runs = seed_group(10, 14)
    alone = run_folder("alone", started=2.5)
    found = listing(Workspace())
    assert [each["name"] for each in found] == [alone.name, group.name, *(run.name for run in runs)]
    lines = printed(found, 120)
    (line,) = [line for line in lines if group.name in line]
    assert line.split()[:8] == [group.name, "seeds", "FINISHED", "2", "seeds", "return", "12", "[-13.4,"]
    below = [line for line in lines if line.startswith("  marl-")]
    assert [line.split()[0] for line in below] == [run.name for run in runs]
    assert "    seed=14" in printed(found, 80)
    assert not [line for line in printed(select(found, kind="run"), 120) if line.startswith("  marl-")]


def test_a_group_that_was_killed_says_what_goes_on_with_it(isolated_workspace):
    dead = Owner.this_process().model_copy(update={"born": 1.0})
    seed_group(10, 14, status="RUNNING", owner=dead, step=1)
    found = listing(Workspace())[0]
    assert (found["status"], found["not_resumable"]) == (
        "KILLED", "the same command continues it, with --resume",
    )  # fmt: skip
    assert "1/2 seeds" in "\n".join(printed([found], 120))
