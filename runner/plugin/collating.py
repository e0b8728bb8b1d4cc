"""Samples made into a batch, and which of them does not fit."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from runner.plugin.attributes import attributes_of, has_parts
from runner.plugin.failures import add_place, is_shortage
from runner.plugin.source import Batch
from runner.system.errors import RunnerError
from runner.system.tensor_trees import children, leaves

Collate = Callable[[Sequence[Any]], Batch]
_LISTED_SAMPLES = 8


def collated(
    collate: Collate, samples: Sequence[Any], indices: Sequence[int], data_name: str
) -> Batch:
    """Makes samples into a batch; an error names the sample that differs from the first one.

    Args:
        collate: Makes samples into a batch.
        samples: The samples.
        indices: Their numbers.
        data_name: Name of the data in messages.

    Raises:
        RunnerError: The samples do not fit together, and ``collate`` is torch's.
    """
    try:
        return collate(samples)
    except Exception as error:
        description = _odd_sample(samples, indices)
        samples_name = description or f"samples {list_indices(indices)}"
        location = f"{data_name}: {samples_name}"
        # An error of the plugin's code stays as it is: it has a line that its author can correct.
        if is_shortage(error) or not _is_of_torch(error):
            add_place(error, location)
            raise
        reason = str(error).partition("\n")[0]
        problem = f"no batch can be made of samples of the {location}"
        hint = "write collate(samples) to pad, crop or select them"
        raise RunnerError(f"{problem}; {hint} ({reason})") from error


def copy_samples(samples: Sequence[Any]) -> list[Any]:
    """Returns copies of samples, which ``collate`` may change in place.

    A value that cannot be copied, such as an open file, is the same object in the copy.
    """
    # The list keeps other objects from getting the identities of tensors that a mapping makes.
    originals = list(_tensors_in(samples))
    # Otherwise torch copies the entire storage of a view, and refuses results of computations.
    clones = {id(tensor): tensor.clone() for tensor in originals}
    try:
        return copy.deepcopy(list(samples), dict[int, Any](clones))
    except Exception:
        return [_copied(sample, clones) for sample in samples]


def _copied(value: Any, clones: dict[int, Tensor]) -> Any:
    """Returns a copy of a tree with those of its values that can be copied."""
    if type(value) is dict:
        return {key: _copied(entry, clones) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(entry, clones) for entry in value)
    try:
        return copy.deepcopy(value, dict[int, Any](clones))
    except Exception:
        return value


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors in trees, and in attributes of objects there."""
    visited: dict[int, Any] = {}
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif has_parts(value) and id(value) not in visited:
            # The reference keeps another object from getting this identity.
            visited[id(value)] = value
            pending += (children(value) or {}).values()
            pending += attributes_of(value).values()


def _is_of_torch(error: Exception) -> bool:
    """Returns whether an exception was raised without any code of a plugin."""
    modules = (
        str(frame.f_globals.get("__name__"))
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return all(module.startswith(("runner.plugin.", "torch.")) for module in modules)


def _odd_sample(samples: Sequence[Any], indices: Sequence[int]) -> str | None:
    """Describes the first sample whose form differs from that of the first; None if all have the
    same form.
    """
    if not isinstance(samples, list | tuple) or not samples:
        return None
    first = _form(samples[0])
    for sample, index in zip(samples, indices, strict=True):
        form = _form(sample)
        for entry in dict.fromkeys((*first, *form)):
            if form.get(entry) != first.get(entry):
                name = f"'{entry}' of " if entry else ""
                actual = form.get(entry, "missing")
                expected = (
                    f"that of sample {indices[0]} is {first.get(entry, 'missing')}"
                )
                return f"{name}sample {index} is {actual}, {expected}"
    return None


def _form(sample: Any) -> dict[str, str]:
    """Returns the shape or type of every leaf of a sample, by its dotted name."""
    forms = {}
    for name, leaf in leaves(sample):
        has_shape = isinstance(leaf, Tensor | np.ndarray)
        forms[name] = str(list(leaf.shape)) if has_shape else type(leaf).__name__
    return forms


def list_indices(indices: Sequence[int]) -> str:
    """Returns the first of some numbers as text, and how many more there are."""
    listed = ", ".join(map(str, indices[:_LISTED_SAMPLES]))
    hidden = len(indices) - _LISTED_SAMPLES
    return f"{listed} and {hidden} more" if hidden > 0 else listed
