"""Folders of runs without a process."""

import time
from types import SimpleNamespace

from runner.system.processes import Owner
from runner.tracking import RunFolder, Workspace
from runner.tracking.spool import Spool
from runner.tracking.store import shown
from runner.tracking.workspace import Record


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
        tracking=SimpleNamespace(experiment=experiment, system_metrics=system_metrics),
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
        "tracking_uri": shown(Workspace().tracking_uri),
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
