"""Compares two outputs: their form, and their content up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.proof.difference import MISSING, absolute_difference, digest
from runner.proof.isolation import Frame, Location

CONTENT = 1e-4
"""Largest relative difference of an element where a source depends on what was learned."""
_OUTPUT = 1e-3
"""The same for the results of the first updates, whose rounding errors accumulate."""


def unlike(
    own: Frame,
    theirs: Frame,
    form: bool,
    content: float = CONTENT,
    share: float = 0.0,
    rounded: bool = False,
) -> Location | None:
    """Returns the first output that differs from the baseline's, except in a share of elements;
    only the form of numbers counts with ``form``.

    What updates return may be off by more where it is rounded otherwise.
    """
    for location in dict.fromkeys((*own, *theirs)):
        if location.kind != "output":
            continue
        returned = rounded and is_output(location.name)
        value, other = (each.get(location, MISSING) for each in (own, theirs))
        if returned and isinstance(value, float) and isinstance(other, float):
            value, other = (
                torch.tensor(each, dtype=torch.float64) for each in (value, other)
            )
        if not isinstance(value, Tensor) or location.name.startswith("generators."):
            alike = digest(value) == digest(other)
        else:
            alike = isinstance(other, Tensor) and (other.shape, other.dtype) == (
                value.shape,
                value.dtype,
            )
            alike = alike and bool((value.isfinite() <= other.isfinite()).all())
            alike = alike and (
                form or _same_content(value, other, content, share, returned)
            )
        if not alike:
            return location
    return None


def is_output(path: str) -> bool:
    """Returns whether a value is what an update returned."""
    return path.partition(".")[0] == "output"


def _same_content(
    value: Tensor, other: Tensor, content: float, share: float, returned: bool
) -> bool:
    error = absolute_difference(value, other)
    if error is None or not error.numel():
        return True
    allowed = float(returned)  # a count, as of right answers, may be off by one
    if value.is_floating_point():
        relative = max(content, _OUTPUT) if returned else content
        largest = float(value.detach().abs().max())
        allowed = relative * max(
            largest, 0.0 if value.dim() else 1.0
        )  # a mean may be nearly zero
    return float((error > allowed).double().mean()) <= share
