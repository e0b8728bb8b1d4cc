"""The model of a finished run: the state that inference needs, without optimizers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.recipe.yaml_nodes import MAX_BYTES
from runner.system.errors import CheckpointError
from runner.system.manifest import FileDigest, Manifest, read_checked
from runner.system.stored_json import json_text
from runner.system.workspace_paths import LOCK_NAME
from runner.training.checkpoint import CHECKPOINTS, Writer, best, checkpoints, load
from runner.training.checkpoint_files import MANIFEST, read_manifest
from runner.training.state_schema import check_state

if TYPE_CHECKING:
    from runner.plugin.configs import ServedRequest
    from runner.plugin.source import State

MODEL = "model"
REQUEST_SCHEMA = "request.schema.json"
"""The file in the folder of a model with the JSON schema of a request to it."""
_log = logging.getLogger(__name__)


def write_model(
    run_dir: Path, request: type[ServedRequest] | None = None
) -> tuple[Path, int] | None:
    """Writes the learner of the best checkpoint without its optimizers, and a copy of the lock.

    The folder has the layout of a run's. An error is logged and does not fail the training.

    Args:
        run_dir: The folder of the run.
        request: The model's request when it is served, whose schema is written; None keeps the
            schema that exists.

    Returns:
        The folder and the progress of the training, in the recipe's unit; None if it could not be
            written.
    """
    folder = run_dir / MODEL
    paths = checkpoints(run_dir / CHECKPOINTS)
    try:
        # Without an objective, the last checkpoint is the model.
        path = best(paths) or paths[-1]
        state = load(path)
        check_state(state, path, is_training=True)
        writer = Writer(folder / CHECKPOINTS)
        writer.save(state["step"], {"pipeline": _inference_state(state["pipeline"])})
        writer.wait()
        manifest = Manifest(folder)
        manifest.add(_weights_of(folder))
        lock = read_checked(run_dir / LOCK_NAME, MAX_BYTES)
        # A path in a lock may have bytes that are not UTF-8.
        lock_text = lock.decode(errors="surrogateescape")
        manifest.store_text(folder / LOCK_NAME, lock_text)
        if request is not None:
            schema = json_text(request.model_json_schema(), indent=1)
            manifest.store_text(folder / REQUEST_SCHEMA, schema + "\n")
    except (OSError, IndexError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or error
        _log.warning("%s: the model could not be written: %s", folder, reason)
        return None
    return (folder, int(state["step"])) if writer.failure is None else None


def _inference_state(pipeline: State) -> State:
    """Returns the entries of a pipeline's state that inference needs."""
    learner = {
        name: entry
        for name, entry in pipeline["learner"].items()
        if name != "optimizers"
    }
    return {
        "learner": learner,
        "stages": {},
        "prepared": {},
        "batch_size": pipeline["batch_size"],
        "classes": pipeline.get("classes", []),
        # Losses of an evaluation may depend on the progress.
        "progress": pipeline["progress"],
    }


def request_fields(folder: Path) -> dict[str, str]:
    """Returns the fields of a request to a model with their types; none if it has no schema.

    Args:
        folder: The folder that ``write_model`` returned.
    """
    path = folder / REQUEST_SCHEMA
    if not path.exists():
        return {}
    properties = json.loads(read_checked(path, MAX_BYTES)).get("properties", {})
    return {name: _type_of(schema) for name, schema in properties.items()}


def _type_of(schema: dict[str, Any]) -> str:
    """Returns the types that a JSON schema allows, as text."""
    options = [option.get("type") for option in schema.get("anyOf", [schema])]
    return " or ".join(option for option in options if option) or "object"


def _weights_of(folder: Path) -> dict[Path, FileDigest]:
    """Returns the digests of the files in a model's newest checkpoint, from its manifest."""
    path = checkpoints(folder / CHECKPOINTS)[-1]
    manifest = read_manifest(path)
    files = {
        path / name: FileDigest(digest, manifest["bytes"][name])
        for name, digest in manifest["sha256"].items()
    }
    return {**files, path / MANIFEST: FileDigest.of(path / MANIFEST)}
