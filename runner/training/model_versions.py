"""Versions of the models of runs; a champion has passed ``runner verify``."""

from __future__ import annotations

import hashlib
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
from runner.system.stored_json import json_text, parse_json
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
    """Returns the SHA-256 of the weights in a pipeline's state, without those of optimizers.

    It covers names, types, shapes and bytes.
    """
    learner = {
        name: entry
        for name, entry in pipeline["learner"].items()
        if name != "optimizers"
    }
    tensors = {
        name: leaf for name, leaf in leaves(learner) if isinstance(leaf, torch.Tensor)
    }
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        contiguous = tensor.detach().cpu().contiguous()
        digest.update(contiguous.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def register(run: str, name: str | None = None) -> Version:
    """Gives the model of a finished run a version.

    A model that has a version of that name already keeps it.

    Args:
        run: A reference that ``folder_of`` accepts.
        name: Name of the model; by default that of the recipe.

    Raises:
        UsageError: The run does not exist, it has not finished, its data are synthetic, or
            it is a smoke test.
        StorageError: MLflow refuses.
    """
    folder = folder_of(run)
    record = folder.record()
    if record is None or record.status != "FINISHED" or record.kind != "run":
        raise UsageError(
            f"{folder.name} is not a finished run; only those can be registered"
        )
    # Synthetic data only show that the code works.
    if record.synthetic:
        raise UsageError(
            f"{folder.name} was trained on synthetic data; "
            "register a model that was trained on real data"
        )
    if record.smoke:
        raise UsageError(
            f"{folder.name} is a smoke test, which trained for a few updates; "
            "register a model that was trained to its end"
        )
    # A version links to its run in MLflow.
    if record.run_id is None:
        raise UsageError(
            f"{folder.name} is not in MLflow yet: runner sync {folder.name}"
        )
    store = Store(Workspace())
    name = name or record.recipe
    written = write_model(folder.path)
    if written is None:
        raise CheckpointError(f"{folder.name} has no checkpoint that can be used")
    model, step = written
    weights = weights_digest(_state(model)["pipeline"])
    versions = Versions(store)
    # A run that was resumed has other weights, and gets another version.
    existing = [
        version
        for version in versions.all(name)
        if version.run == folder.name and version.weights == weights
    ]
    if existing:
        return _judged(versions, existing[-1])
    logged = store.logged_model(record.run_id, model, step)
    facts = {"run": folder.name, "weights": weights, "model": logged.model_id}
    text = _description(record, step, logged.model_id, request_fields(model))
    location = logged.artifact_location
    version = versions.create(name, record.run_id, facts, location, text)
    return _judged(versions, version)


def _description(
    record: Record, step: int, model: str, fields: Mapping[str, str]
) -> str:
    """Returns the description of a version: run, metrics, request, and the line that loads it."""
    recipe = code(record.recipe)
    metrics = {
        name: record.metrics[name] for name in record.headline if name in record.metrics
    }
    request = ""
    if fields:
        types = code(*(f"{name}: {kind}" for name, kind in fields.items()))
        request = f"{types}; JSON schema: {code(REQUEST_SCHEMA)} in the artifacts"
    return describe(
        {
            "model": f"{recipe} at step {step:,} of run {code(record.name)}",
            "metrics of the run": figures(metrics),
            "request": request,
            "load it": code(f'runner.load_model("models:/{model}")'),
        }
    )


def promote(name: str, number: int) -> Version:
    """Makes a version the champion of its model, if ``runner verify`` has passed it.

    Raises:
        NotVerifiedError: It has not been verified, or other weights were verified.
        UsageError: The version does not exist.
    """
    versions = Versions(Store(Workspace()))
    version = _judged(versions, versions.one(f"{name}/{number}"))
    judgement = version.judgement
    command = f"runner verify RECIPE --of {version.reference}"
    if judgement is None:
        raise NotVerifiedError(
            f"{version.reference} has not been verified; verify it first: {command}, "
            "with a recipe that has an inference section"
        )
    # A verification of other weights proves nothing about these.
    if judgement.weights != version.weights:
        raise NotVerifiedError(
            f"{version.reference}: what '{judgement.recipe}' was verified with "
            f"is other weights: {command}"
        )
    if judgement.outcome != "PASS":
        raise NotVerifiedError(
            f"{version.reference} cannot be promoted: with '{judgement.recipe}', "
            f"{judgement.outcome}: {judgement.summary}"
        )
    return versions.call(version, CHAMPION)


def require_place_for_verification(reference: Path | str, trained: Trained) -> None:
    """Raises a StorageError if ``record_verification`` could not store a judgement."""
    if is_version(str(reference)):
        Store(Workspace())
    elif not is_writable(trained.folder):
        hint = "verify a part with --stage, whose verdict is not recorded, or a copy"
        raise StorageError(
            f"{trained.folder} cannot be written, where the verdict is recorded: {hint}"
        )


def record_verification(
    reference: Path | str, trained: Trained, outcome: str, summary: str
) -> Judgement:
    """Records the result of ``runner verify`` with a version, or in the folder of a run.

    Args:
        reference: The verified model, as it was named.
        trained: The same model, with the recipe whose stages were judged.
        outcome: PASS, FAIL or INCONCLUSIVE.
        summary: Remarks on stages that did not pass.
    """
    recipe = trained.recipe
    judgement = Judgement(
        outcome,
        recipe.name,
        recipe.digest,
        recipe.values().get("inference", {}),
        weights_digest(trained.state),
        summary,
    )
    if is_version(str(reference)):
        versions = Versions(Store(Workspace()))
        versions.judge(versions.one(str(reference)), judgement)
        return judgement
    text = json_text(redact_values(asdict(judgement)), indent=1)
    manifest = Manifest(trained.folder)
    # A run of an earlier version has no manifest. A manifest with only this file would hide the
    # lock.
    write = manifest.store_text if manifest.exists() else write_durably
    try:
        write(trained.folder / VERIFICATION, text + "\n")
    except OSError as error:
        reason = f"{error.strerror}; the verdict is not recorded"
        raise StorageError(f"{trained.folder}: {reason}") from error
    return judgement


def fetched(reference: str) -> RunFolder:
    """Returns the folder with a version's files, which are fetched if necessary.

    Raises:
        UsageError: The version does not exist.
        CheckpointError: A file is damaged, or the weights are not those of the version.
    """
    store = Store(Workspace(), reading=True)
    version = Versions(store).one(reference)
    folder = RunFolder(store.model(f"models:/{version.model}"))
    weights = weights_digest(_state(folder.path)["pipeline"])
    # Files in the storage of MLflow may have been replaced.
    if weights != version.weights:
        raise CheckpointError(
            f"{reference}: {folder.path} has other weights than were registered: "
            f"SHA-256 {weights[:12]} instead of {version.weights[:12]}"
        )
    return folder


def _state(model: Path) -> State:
    """Returns the state in a model's folder; a CheckpointError names a damaged file."""
    paths = checkpoints(model / CHECKPOINTS)
    if not paths:
        raise CheckpointError(f"{model} holds no model")
    state = load(paths[-1])
    check_state(state, paths[-1])
    return state


def _judged(versions: Versions, version: Version) -> Version:
    """Returns the version with the verification of its run's model, if the weights are equal."""
    # The run may be elsewhere, may never have been verified, or the record may be damaged.
    with suppress(UsageError, DamagedError, OSError, ValueError, TypeError):
        path = find(Workspace().runs, version.run).path / VERIFICATION
        content = parse_json(read_checked(path, _MOST_BYTES).decode())
        judgement = Judgement(**content)
        is_new = judgement != version.judgement
        if judgement.weights == version.weights and is_new:
            return versions.judge(version, judgement)
    return version
