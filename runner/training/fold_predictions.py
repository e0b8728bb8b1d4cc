"""Predictions of a cross-validation: of every sample by the model that was not trained on it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from runner.plugin.dataset import DatasetSource
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import RunnerError
from runner.system.files import replacing
from runner.system.tensor_trees import map_tensors
from runner.tracking import RunFolder
from runner.training.checkpoint_selection import load_chosen
from runner.training.pipeline import Assembly, assemble

_log = logging.getLogger(__name__)
PREDICTIONS = "predictions.safetensors"
"""The file in the folder of a group with the predictions of all folds."""


def predict_folds(
    folder: Path,
    recipes: Mapping[int, Recipe],
    registry: Registry,
    runs: Mapping[int, RunFolder],
) -> str | None:
    """Writes the predictions of a finished cross-validation.

    Returns:
        The file; None if the model has no such predictions, which is logged.
    """
    path = folder / PREDICTIONS
    try:
        write_predictions(path, recipes, registry, runs)
    except RunnerError as error:
        # The trainings are complete without them.
        _log.warning("%s has no file of predictions: %s", folder.name, error)
        return None
    return str(path)


def write_predictions(
    path: Path,
    recipes: Mapping[int, Recipe],
    registry: Registry,
    runs: Mapping[int, RunFolder],
) -> None:
    """Writes the predictions of all samples, in the order of their numbers.

    The file has ``sample`` [N], ``fold`` [N], ``label`` [N] if the data have labels, and
    ``prediction`` [N, ...], or ``prediction.<name>`` if the model returns several tensors.

    Args:
        path: The file.
        recipes: The recipe of every fold.
        registry: Contains their plugins.
        runs: The finished run of every fold.

    Raises:
        RunnerError: The model returns no tensors with one row for each sample.
    """
    tables = []
    for fold, recipe in recipes.items():
        table = _predicted(recipe, registry, runs[fold])
        table["fold"] = torch.full_like(table["sample"], fold)
        tables.append(table)
    joined = {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
    order = joined["sample"].argsort()
    with replacing(path) as partial:
        save_file(
            {name: tensor[order].contiguous() for name, tensor in joined.items()},
            partial,
        )


def _predicted(
    recipe: Recipe, registry: Registry, folder: RunFolder
) -> dict[str, Tensor]:
    """Returns the predictions of one fold by its last checkpoint, with which it was evaluated."""
    _, state = load_chosen(folder, "last")
    # The stages are for the training.
    plain = replace(recipe, stages={})
    with generators.exclusive(f"the predictions of {folder.name}", nested=True):
        generators.seed(recipe.seed)
        pipeline = assemble(plain, registry.files, resumed=state["pipeline"])
        pipeline.load_learnt(state["pipeline"])
        return _table(pipeline)


@torch.no_grad()
def _table(pipeline: Assembly) -> dict[str, Tensor]:
    source = pipeline.source
    learner = pipeline.learner
    assert isinstance(source, DatasetSource)
    assert source.fold_samples is not None
    table = {"sample": source.fold_samples}
    labels = source.held_out_labels()
    if labels is not None:
        table["label"] = labels
    batches = []
    with learner.evaluating():
        for batch in source.held_out_batches():
            moved = map_tensors(lambda tensor: tensor.to(source.device), batch)
            output = learner.predict(learner.inputs(moved))
            batches.append(dict(_named("prediction", output)))
    for name in batches[0]:
        prediction = torch.cat([batch[name] for batch in batches])
        if len(prediction) != len(table["sample"]):
            raise RunnerError(
                f"{type(learner).__name__}.predict returns not one row per sample"
            )
        table[name] = prediction
    return table


def _named(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of an output on the host, each with its dotted name."""
    if isinstance(output, Tensor):
        if not output.dim():
            raise RunnerError(f"{name}: a prediction has no row for each sample")
        yield name, output.detach().cpu()
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _named(f"{name}.{key}", value)
    elif isinstance(output, tuple | list):
        for number, value in enumerate(output):
            yield from _named(f"{name}.{number}", value)
    else:
        raise RunnerError(
            f"{name}: predict returns {type(output).__name__}, and not a tensor"
        )
