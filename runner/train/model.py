"""The model that a run leaves: what it takes to answer, without what it takes to go on learning."""

from __future__ import annotations

import logging
from pathlib import Path

from runner.system.errors import CheckpointError
from runner.system.files import read_regular, write_text
from runner.system.places import LOCK_NAME
from runner.train.checkpoint import CHECKPOINTS, Writer, best, checkpoints, load

MODEL = "model"
_log = logging.getLogger(__name__)


def write_model(run_dir: Path) -> tuple[Path, int] | None:
    """Writes the learner of the best checkpoint, without its optimizers, beside a copy of the run's lock.

    The folder is laid out like a run's. What goes wrong costs the training nothing, and is said.

    Returns:
        The folder and how far the training was, in the recipe's unit; None if it could not be written.
    """
    folder, found = run_dir / MODEL, checkpoints(run_dir / CHECKPOINTS)
    try:
        state = load(best(found) or found[-1])
        learner = {name: part for name, part in state["pipeline"]["learner"].items() if name != "optimizers"}
        writer = Writer(folder / CHECKPOINTS)
        pipeline = {
            "learner": learner,
            "stages": {},
            "prepared": {},
            "batch_size": state["pipeline"]["batch_size"],
            "classes": state["pipeline"].get("classes", []),
            "progress": state["pipeline"]["progress"],  # losses of an evaluation may depend on it
        }
        writer.save(state["step"], {"pipeline": pipeline})
        writer.wait()
        write_text(folder / LOCK_NAME, read_regular(run_dir / LOCK_NAME).decode("utf-8", "surrogateescape"))
    except (OSError, IndexError, CheckpointError) as error:
        _log.warning("%s: the model could not be written: %s", folder, getattr(error, "strerror", None) or error)
        return None
    return (folder, int(state["step"])) if writer.failure is None else None
