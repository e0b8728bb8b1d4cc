"""Folders of runs without a process."""

import time

from runner.system.processes import Owner
from runner.tracking import RunFolder, workspace
from runner.tracking.spool import Spool
from runner.tracking.store import shown
from runner.tracking.workspace import Record


def run_folder(name="marl", **changes):
    """A run that this process began and left without a word, unless told otherwise.

    Args:
        name: of its recipe.
        changes: of its record.
    """
    folder = RunFolder.create(workspace().runs, name)
    now = time.time()
    known = {
        "name": folder.name,
        "recipe": name,
        "digest": "",
        "goal": 100,
        "unit": "updates",
        "experiment": "tests",
        "tracking_uri": shown(workspace().tracking_uri),
        "owner": Owner.this_process(),
        "started": now,
        "heartbeat": now,
    }
    folder.write(Record(**known | changes))
    spool = Spool(folder.spool)
    spool.append({"t": int(now * 1e3), "step": 1, "metrics": {"loss": 1.0}})
    spool.close()
    folder.release()
    return folder
