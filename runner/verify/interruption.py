"""Evaluations that end before all samples are measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from runner.plugin.learner import Learner

_MEASURING = ("metrics", "predict")
"""Methods of a learner that an evaluation calls."""


class EvaluationInterrupted(Exception):  # noqa: N818 (it is no error)
    """An evaluation has made all calls that it may."""


@contextmanager
def interrupted_evaluation(learner: Learner, calls: int | None) -> Iterator[None]:
    """Ends an evaluation inside of the ``with`` after some batches or predictions; never
    if None.
    """
    if calls is None:
        yield
        return
    count = itertools.count(1)

    def limit(measure: Callable[..., Any], *arguments: Any) -> Any:
        if next(count) > calls:
            raise EvaluationInterrupted
        return measure(*arguments)

    # Methods may have been replaced in this object before.
    methods = {name: vars(learner).get(name) for name in _MEASURING}
    for name in _MEASURING:
        setattr(learner, name, partial(limit, getattr(learner, name)))
    try:
        with suppress(EvaluationInterrupted):
            yield
    finally:
        for name, method in methods.items():
            if method is None:
                delattr(learner, name)
            else:
                setattr(learner, name, method)
