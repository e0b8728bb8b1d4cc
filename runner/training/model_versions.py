"""Runs whose models are given versions; only what ``runner verify`` has passed becomes the champion."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runner.plugin.source import State
from runner.system.errors import (
    CheckpointError,
    DamagedError,
    ExitCode,
    RunnerError,
    StorageError,
    UsageError,
)
from runner.system.files import is_writable, write_durably
from runner.system.manifest import Manifest, read_checked
from runner.system.secrets import redact_values
from runner.system.stored_json import parse_json
from runner.system.tensor_trees import leaves
from runner.system.text_lines import figures
from runner.tracking.description import code, describe
from runner.tracking.lookup import find, folder_of
from runner.tracking.record import Record
from runner.tracking.store import Store
from runner.tracking.versions import CHAMPION, Judgement, Version, Versions, is_version
from runner.tracking.workspace import RunFolder, Workspace
from runner.training.checkpoint import CHECKPOINTS, checkpoints, load
from runner.training.model import REQUEST_SCHEMA, request_fields, write_model
from runner.training.state_schema import check_state

if TYPE_CHECKING:
    from runner.training.trained_run import Trained

VERIFICATION = "verification.json"
"""The file in the folder of a run with the result of ``runner verify`` for its model."""


_MOST_BYTES = 2**20


class NotVerifiedError(RunnerError):
    """A version that ``runner verify`` has not passed cannot become the champion."""

    exit_code = ExitCode.GATE_FAILED


def weights_digest(pipeline: State) -> str:
    """SHA-256 of the weights in a pipeline's state: names, types, shapes and bytes, without those of optimizers."""
    learner = {
        name: part for name, part in pipeline["learner"].items() if name != "optimizers"
    }
    named = {
        name: leaf for name, leaf in leaves(learner) if isinstance(leaf, torch.Tensor)
    }
    found = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        found.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        found.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        )
    return found.hexdigest()


def register(run: str, name: str | None = None) -> Version:
    """Gives the model of a finished run a version; the one that it has, if it has one of that name already.

    Args:
        run: any reference that ``folder_of`` accepts.
        name: of the model; by default that of the recipe.

    Raises:
        UsageError: There is no such run, it has not finished, or its data are synthetic.
        StorageError: MLflow refuses.
    """
    folder = folder_of(run)
    record = folder.record()
    if record is None or record.status != "FINISHED" or record.kind != "run":
        raise UsageError(
            f"{folder.name} is not a finished run; only those can be registered"
        )
    if record.synthetic:
        raise UsageError(
            f"{folder.name} was trained on synthetic data; register a model that was trained on real data"
        )
    if record.run_id is None:
        raise UsageError(
            f"{folder.name} is not in MLflow yet: runner sync {folder.name}"
        )
    store, name = Store(Workspace()), name or record.recipe
    written = write_model(folder.path)
    if written is None:
        raise CheckpointError(f"{folder.name} has no checkpoint that can be used")
    model, step = written
    weights = weights_digest(_state(model)["pipeline"])
    versions = Versions(store)
    known = [
        each
        for each in versions.all(name)
        if (each.run, each.weights) == (folder.name, weights)
    ]
    if not known:
        logged = store.logged_model(record.run_id, model, step)
        facts = {"run": folder.name, "weights": weights, "model": logged.model_id}
        text = _description(record, step, logged.model_id, request_fields(model))
        known = [
            versions.create(name, record.run_id, facts, logged.artifact_location, text)
        ]
    return _judged(versions, known[-1])


def _description(
    record: Record, step: int, model: str, fields: Mapping[str, str]
) -> str:
    """Returns the description of a version: its run, its metrics, its request, and the line that loads it."""
    values = {
        name: record.metrics[name] for name in record.headline if name in record.metrics
    }
    shown = [f"{name}: {kind}" for name, kind in fields.items()]
    return describe(
        {
            "model": f"{code(record.recipe)} at step {step:,} of run {code(record.name)}",
            "metrics of the run": figures(values),
            "request": f"{code(*shown)}; JSON schema: {code(REQUEST_SCHEMA)} in the artifacts"
            if fields
            else "",
            "load it": code(f'runner.load_model("models:/{model}")'),
        }
    )


def promote(name: str, number: int) -> Version:
    """Makes a version the champion of its model, if ``runner verify`` has passed it.

    Raises:
        NotVerifiedError: it has not been verified, or other weights were verified.
        UsageError: there is no such version.
    """
    versions = Versions(Store(Workspace()))
    version = _judged(versions, versions.one(f"{name}/{number}"))
    told, command = version.judgement, f"runner verify RECIPE --of {version.reference}"
    if told is None:
        hint = (
            f"verify it first: {command}, with a recipe that has an inference section"
        )
        raise NotVerifiedError(f"{version.reference} has not been verified; {hint}")
    if told.weights != version.weights:
        raise NotVerifiedError(
            f"{version.reference}: what '{told.recipe}' was verified with is other weights: {command}"
        )
    if told.outcome != "PASS":
        raise NotVerifiedError(
            f"{version.reference} cannot be promoted: with '{told.recipe}', {told.outcome}: {told.summary}"
        )
    return versions.call(version, CHAMPION)


def require_place_for_verification(reference: Path | str, found: Trained) -> None:
    """Raises a StorageError if ``record_verification`` could not keep a verdict, before there is one."""
    if is_version(str(reference)):
        Store(Workspace())
    elif not is_writable(found.folder):
        hint = "verify a part with --stage, whose verdict is not recorded, or a copy"
        raise StorageError(
            f"{found.folder} cannot be written, where the verdict is recorded: {hint}"
        )


def record_verification(
    reference: Path | str, found: Trained, outcome: str, summary: str
) -> Judgement:
    """Records the result of ``runner verify`` for a model: with its version, or
    in the folder of its run.

    Args:
        reference: the verified model, as it was named.
        found: the same model, with the recipe whose stages were judged.
        outcome: PASS, FAIL or INCONCLUSIVE.
        summary: remarks on stages that did not pass.
    """
    recipe = found.recipe
    stages = recipe.values().get("inference", {})
    told = Judgement(
        outcome,
        recipe.name,
        recipe.digest,
        stages,
        weights_digest(found.state),
        summary,
    )
    if is_version(str(reference)):
        versions = Versions(Store(Workspace()))
        versions.judge(versions.one(str(reference)), told)
    else:
        path, text = (
            found.folder / VERIFICATION,
            json.dumps(redact_values(asdict(told)), indent=1) + "\n",
        )
        manifest = Manifest(found.folder)
        # A run of an earlier version has no manifest. A manifest with only this file would hide the
        # lock.
        write = manifest.store_text if manifest.exists() else write_durably
        try:
            write(path, text)
        except OSError as error:
            raise StorageError(
                f"{found.folder}: {error.strerror}; the verdict is not recorded"
            ) from error
    return told


def fetched(reference: str) -> RunFolder:
    """Returns the folder with a version's files, fetched if necessary, whose
    weights are those of the version.

    Raises:
        UsageError: there is no such version.
        CheckpointError: a file is damaged, or the weights differ.
    """
    store = Store(Workspace(), reading=True)
    version = Versions(store).one(reference)
    folder = RunFolder(store.model(f"models:/{version.model}"))
    weights = weights_digest(_state(folder.path)["pipeline"])
    if weights != version.weights:
        raise CheckpointError(
            f"{reference}: {folder.path} has other weights than were registered: "
            f"SHA-256 {weights[:12]} instead of {version.weights[:12]}"
        )
    return folder


def _state(model: Path) -> State:
    """Returns the state in a model's folder; raises a ``CheckpointError`` that
    names a damaged file.
    """
    found = checkpoints(model / CHECKPOINTS)
    if not found:
        raise CheckpointError(f"{model} holds no model")
    state = load(found[-1])
    check_state(state, found[-1])
    return state


def _judged(versions: Versions, version: Version) -> Version:
    """Returns the version with the verification of its run's model, if that
    verified the same weights.
    """
    # The run may be elsewhere, may never have been verified, or the record may be damaged.
    with suppress(UsageError, DamagedError, OSError, ValueError, TypeError):
        path = find(Workspace().runs, version.run).path / VERIFICATION
        told = Judgement(**parse_json(read_checked(path, _MOST_BYTES).decode()))
        if told.weights == version.weights and told != version.judgement:
            return versions.judge(version, told)
    return version
