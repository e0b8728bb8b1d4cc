"""Inputs of predictions as a server makes them: generation and sampling with several
lengths and counts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from runner.plugin.configs import ServedRequest
from runner.plugin.learner import Learner
from runner.system.tensor_trees import tensors

COUNTS = (1, 2, 5)
"""Values of every integer of a request: steps, samples, symbols."""
_MOST = 16
"""Requests that are compared."""
_SHARE = 0.5
"""Share of its default that every other number has in one request."""


def request_batches(learner: Learner, inputs: Any) -> list[list[ServedRequest]]:
    """Returns variants of the learner's example of a request, in batches that a server
    would answer together.

    Integers have the values of ``COUNTS``. Texts have the lengths 1 and 2 and those on
    both sides of every size of a training input, where a decoder reaches the limit of
    its context. Batches of several requests come after the single ones.

    Args:
        learner: The learner that answers requests.
        inputs: Inputs of a prediction on a training batch.
    """
    request = learner.config.request
    example = None if request is None else learner.example_request()
    if request is None or example is None:
        return []
    sizes = {size for tensor in tensors(inputs) for size in tensor.shape[1:]}
    lengths = sorted({1, 2} | {size + step for size in sizes for step in (-1, 0, 1)})
    candidates = _variants(request, example, lengths)
    accepted = (variant for variant in candidates if learner.refused(variant) is None)
    variants = list(itertools.islice(accepted, _MOST))
    groups: dict[Hashable, list[ServedRequest]] = defaultdict(list)
    for variant in variants:
        groups[variant.group()].append(variant)
    batches = [group for group in groups.values() if len(group) > 1]
    return [*([variant] for variant in variants), *batches]


def _variants(
    request: type[ServedRequest], example: Mapping[str, Any], lengths: Iterable[int]
) -> Iterator[ServedRequest]:
    """Yields a request with small integers, and variants that differ from it in one
    value each.
    """
    numbers = _numbers(request, "integer")
    small = {name: COUNTS[-1] for name in numbers if isinstance(example.get(name), int)}
    base = {**example, **small}
    first = request.model_validate(base)
    yield first
    changes: list[tuple[str, Any]] = list(itertools.product(numbers, COUNTS))
    for name in _numbers(request, "number"):
        value = getattr(first, name)
        if isinstance(value, float):
            changes.append((name, _SHARE * value))
    for name, value in example.items():
        if isinstance(value, str) and value:
            for length in filter(None, lengths):
                repetitions = length // len(value) + 1
                changes.append((name, (value * repetitions)[:length]))
    for name, value in changes:
        try:
            yield request.model_validate({**base, name: value})
        except ValidationError:
            # The schema limits the value.
            continue


def _numbers(request: type[ServedRequest], kind: str) -> list[str]:
    """Returns the names of a request's fields that can be numbers of a JSON type."""
    properties = request.model_json_schema().get("properties", {})
    names = []
    for name, schema in properties.items():
        # A field that may be None has several types.
        options = (schema, *schema.get("anyOf", ()))
        if any(option.get("type") == kind for option in options):
            names.append(name)
    return names
