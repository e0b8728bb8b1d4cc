"""Folders of runs without a process."""

import time
from types import SimpleNamespace

from runner.system.interval import student
from runner.system.processes import Owner
from runner.tracking import RunFolder, Workspace
from runner.tracking.record import Record
from runner.tracking.spool import Spool
from runner.tracking.store import shown


def recipe(name="marl", experiment="tests", system_metrics=False, **settings):
    """What a tracker reads of a recipe."""
    return SimpleNamespace(
        name=name,
        digest="",
        length=("steps", 0),
        objective=None,
        headline=(),
        overrides={},
        values=lambda: settings,
        tracking=SimpleNamespace(experiment=experiment, system_metrics=system_metrics, second_copy=None),
        data=SimpleNamespace(is_synthetic=lambda: False),
        train=SimpleNamespace(smoke=False),
    )


def run_folder(name="marl", **changes):
    """A run that this process began and left without a word, unless told otherwise.

    Args:
        name: of its recipe.
        changes: of its record.
    """
    folder = RunFolder.create(Workspace().runs, name)
    now = time.time()
    known = {
        "name": folder.name,
        "recipe": name,
        "digest": "",
        "goal": 100,
        "unit": "updates",
        "experiment": "tests",
        "tracking_uri": Workspace().recorded_uri(shown(Workspace().tracking_uri)),
        "owner": Owner.this_process(),
        "started": now,
        "heartbeat": now,
    }
    folder.write(Record(**known | changes))
    spool = Spool(folder.spool)
    spool.append(t=int(now * 1e3), step=1, metrics={"loss": 1.0})
    spool.close()
    folder.release()
    return folder


def seed_group(*seeds, began=1.0, **changes):
    """A group of finished runs with these seeds, whose objective is the seed itself, and the runs.

    Args:
        seeds: one run each.
        began: in seconds since 1970; a run begins a second after the one before.
        changes: of the group's record.
    """
    name = f"marl-seeds-{time.time_ns() % 10**8:08d}"
    runs = [
        run_folder(
            group=name, digest=f"of {seed}", status="FINISHED", started=began + n, headline=("eval/return",),
            metrics={"eval/return": float(seed)}, overrides={"seed": str(seed)},
        )
        for n, seed in enumerate(seeds, start=1)
    ]  # fmt: skip
    for folder, seed in zip(runs, seeds, strict=True):
        spool = Spool(folder.spool)
        spool.append(t=0, step=100, metrics={"eval/return": float(seed)})
        spool.close()
    mean, low, high = student(seeds)
    known = runs[0].record().model_dump() | {
        "name": name, "kind": "seeds", "group": "", "digests": {seed: f"of {seed}" for seed in seeds},
        "goal": len(seeds), "step": len(seeds), "unit": "seeds", "started": began, "overrides": {},
        "metrics": {"eval/return": mean, "eval_low/return": low, "eval_high/return": high},
    }  # fmt: skip
    group = RunFolder(Workspace().seeds / name)
    group.path.mkdir(parents=True)
    group.write(Record(**known | changes))
    return group, runs
