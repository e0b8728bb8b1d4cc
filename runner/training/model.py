"""The model of a finished run: the state that inference needs, without optimizers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.recipe.yaml_nodes import MAX_BYTES
from runner.system.errors import CheckpointError
from runner.system.manifest import FileDigest, Manifest, read_checked
from runner.system.workspace_paths import LOCK_NAME
from runner.training.checkpoint import CHECKPOINTS, Writer, best, checkpoints, load
from runner.training.checkpoint_files import MANIFEST, read_manifest
from runner.training.state_schema import check_state

if TYPE_CHECKING:
    from runner.plugin.configs import ServedRequest

MODEL = "model"
REQUEST_SCHEMA = "request.schema.json"
"""The file in the folder of a model with the JSON schema of a request to it."""
_log = logging.getLogger(__name__)


def write_model(
    run_dir: Path, request: type[ServedRequest] | None = None
) -> tuple[Path, int] | None:
    """Writes the learner of the best checkpoint, without its optimizers, and a
    copy of the run's lock.

    The folder has the layout of a run's. An error is logged and does not fail the training.

    Args:
        run_dir: The folder of the run.
        request: The model's request when it is served, whose schema is written; None keeps the schema
            that exists.

    Returns:
        The folder and how far the training was, in the recipe's unit; None if it could not be written.
    """
    folder, found = run_dir / MODEL, checkpoints(run_dir / CHECKPOINTS)
    try:
        path = best(found) or found[-1]
        state = load(path)
        check_state(state, path, is_training=True)
        learner = {
            name: part
            for name, part in state["pipeline"]["learner"].items()
            if name != "optimizers"
        }
        writer = Writer(folder / CHECKPOINTS)
        pipeline = {
            "learner": learner,
            "stages": {},
            "prepared": {},
            "batch_size": state["pipeline"]["batch_size"],
            "classes": state["pipeline"].get("classes", []),
            "progress": state["pipeline"][
                "progress"
            ],  # losses of an evaluation may depend on it
        }
        writer.save(state["step"], {"pipeline": pipeline})
        writer.wait()
        Manifest(folder).add(_weights_of(folder))
        Manifest(folder).store_text(
            folder / LOCK_NAME,
            read_checked(run_dir / LOCK_NAME, MAX_BYTES).decode(
                errors="surrogateescape"
            ),
        )
        if request is not None:
            schema = json.dumps(request.model_json_schema(), indent=1)
            Manifest(folder).store_text(folder / REQUEST_SCHEMA, schema + "\n")
    except (OSError, IndexError, CheckpointError) as error:
        _log.warning(
            "%s: the model could not be written: %s",
            folder,
            getattr(error, "strerror", None) or error,
        )
        return None
    return (folder, int(state["step"])) if writer.failure is None else None


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
    """Returns the digests of a model's newest checkpoint, of all files in it, as its manifest has them."""
    path = checkpoints(folder / CHECKPOINTS)[-1]
    manifest = read_manifest(path)
    files = {
        path / name: FileDigest(digest, manifest["bytes"][name])
        for name, digest in manifest["sha256"].items()
    }
    return {**files, path / MANIFEST: FileDigest.of(path / MANIFEST)}
