"""Validation of the state of a training before anything is restored from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.plugin.averages import AVERAGES
from runner.plugin.learner import FROZEN, Learner
from runner.plugin.progress import UNITS
from runner.plugin.source import State
from runner.system.errors import CheckpointError, DamagedError
from runner.system.stored_json import is_count
from runner.training.checkpoint_files import STATE_FILE


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_mapping_to(has_form: Callable[[object], bool], value: object) -> bool:
    """Returns whether a value is a mapping from texts to values of a form."""
    if not isinstance(value, dict) or not _is_mapping(value):
        return False
    return all(map(has_form, value.values()))


def _is_progress(value: object) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {*UNITS}:
        return False
    return all(map(is_count, value.values()))


def _is_batch_size(value: object) -> bool:
    return is_count(value) and value != 0


def _are_texts(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return all(isinstance(item, str) for item in value)


def _is_generator(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.uint8


_Form = tuple[Callable[[object], bool], str]
_MAPPINGS: _Form = (partial(_is_mapping_to, _is_mapping), "a mapping of mappings")
# Every pipeline's state has these entries.
_PIPELINE: dict[str, _Form] = {
    "learner": (_is_mapping, "a mapping"),
    "stages": _MAPPINGS,
    "progress": (_is_progress, "a count for every unit"),
    "batch_size": (_is_batch_size, "an integer above 0"),
    "prepared": (
        partial(_is_mapping_to, _are_texts),
        "a list of texts for every stage",
    ),
}
# Checkpoints of earlier versions, and models, do not have these entries.
_OPTIONAL: dict[str, _Form] = {
    "classes": (_are_texts, "a list of texts"),
    "settings": (_is_mapping, "a mapping"),
    "generators": (
        partial(_is_mapping_to, _is_generator),
        "a tensor of bytes for every generator",
    ),
    "device": (lambda value: isinstance(value, str), "a text"),
    "tuning": _MAPPINGS,
}
# A training's state has these in addition to the state of its pipeline.
_TRAINING: dict[str, _Form] = {
    "step": (is_count, "an integer"),
    "cursor": (is_count, "an integer"),
    "metrics": (_is_mapping, "a mapping"),
    "complete": (lambda value: isinstance(value, bool), "true or false"),
}


def check_state(state: State, path: Path, *, is_training: bool = False) -> None:
    """Compares the entries of a state that are used before a model is built with their forms.

    Args:
        state: The content of a checkpoint.
        path: Path of the checkpoint, for the message.
        is_training: Whether it must contain the entries that a training or its evaluation needs in
            addition to the model.

    Raises:
        DamagedError: An entry is missing or of another form.
    """
    file = path / STATE_FILE
    pipeline = state.get("pipeline")
    if not isinstance(pipeline, dict):
        raise DamagedError(f"{file}: has no mapping 'pipeline'")
    present = {name: form for name, form in _OPTIONAL.items() if name in pipeline}
    _check(pipeline, _PIPELINE | present, file)
    if is_training:
        _check(state, _TRAINING, file)


def check_weights(learner: Learner, state: State) -> None:
    """Compares the entries of a state, and the types of its weights, with those of a learner.

    Numbers in float32 may become float64, in which two models are compared.

    Raises:
        ValueError: It has other entries, or weights of another type.
    """
    unknown = state.keys() - {*learner.state_dict(), FROZEN, AVERAGES}
    if unknown:
        raise ValueError(f"the learner has no entry {min(unknown)!r:.80}")
    weights = learner.weights(state)
    for name, module in learner.modules().items():
        for entry, parameter in module.named_parameters():
            saved = weights[name].get(entry)
            if saved is None or saved.dtype is parameter.dtype:
                continue
            if parameter.dtype is not torch.float64 or not saved.is_floating_point():
                raise ValueError(
                    f"'{name}.{entry}' is of type {saved.dtype}, "
                    f"and the model's of {parameter.dtype}"
                )


def check_finite(learner: Learner) -> None:
    """Raises a CheckpointError if a weight is NaN, or if one that is trained is infinite."""
    for name, module in learner.modules().items():
        for entry, parameter in module.named_parameters():
            # A constant, such as a mask, may be infinite.
            if parameter.requires_grad:
                is_valid = _is_finite(parameter)
            else:
                is_valid = not bool(parameter.isnan().any())
            if not is_valid:
                raise CheckpointError(
                    f"parameter '{name}.{entry}' has values that are not finite"
                )
    averages = {} if learner.averages is None else learner.averages.values
    for entry, average in averages.items():
        if not _is_finite(average):
            raise CheckpointError(
                f"the average of '{entry}' has values that are not finite"
            )


@contextmanager
def fitting() -> Iterator[None]:
    """Surrounds the restoring of a state; a CheckpointError reports that it does not fit."""
    try:
        yield
    # Exceptions of torch and Python for wrong shapes, names and types.
    except (
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise CheckpointError(
            f"the checkpoint does not fit this recipe: {error}"
        ) from error


def _is_finite(tensor: Tensor) -> bool:
    # One pass without a copy decides in most cases; a sum of finite numbers may be too large.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _check(entries: Mapping[str, Any], forms: Mapping[str, _Form], file: Path) -> None:
    for name, (has_form, form) in forms.items():
        if name not in entries:
            raise DamagedError(f"{file}: has no entry '{name}'")
        if not has_form(entries[name]):
            value = entries[name]
            raise DamagedError(f"{file}: {name} should be {form}, got {value!r:.60}")
