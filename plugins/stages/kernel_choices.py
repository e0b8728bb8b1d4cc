"""The kernels that torch's compiler selects by time, as tuning choices of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from runner.api import Choices

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

_log = logging.getLogger(__name__)

# Torch's own caches hold compiled code and times of other runs. The kernels of a run must follow
# from its lock, so that these caches are not read.
WITHOUT_CACHES = {"fx_graph_cache": False, "autotune_local_cache": False}
"""Options of ``torch.compile``."""


class KernelChoices:
    """Records which kernel the compiler selects for an operation, and makes it select the same again.

    Args:
        choices: The tuning choices of the stage that compiles.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self.replayed = 0

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Applies to everything that is compiled inside of ``with``."""
        from torch._inductor.select_algorithm import get_algorithm_selector_cache

        selector: AlgorithmSelectorCache = get_algorithm_selector_cache()
        selector.preprocessing_fns.append(self.restrict)
        selector.feedback_saver_fns.append(self.record)
        try:
            yield
        finally:
            selector.preprocessing_fns.remove(self.restrict)
            selector.feedback_saver_fns.remove(self.record)

    def applied(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function to whose compilations this applies."""

        @wraps(step)
        def call(*arguments: Any, **options: Any) -> Any:
            with self.apply():
                return step(*arguments, **options)

        return call

    def restrict(self, candidates: list[ChoiceCaller]) -> list[ChoiceCaller]:
        """Returns the recorded kernel; without a record all candidates, or the first where nothing is searched."""
        if len(candidates) < 2:
            return candidates
        kernel = self._choices.get(_operation(candidates))
        if kernel is None:
            return candidates if self._choices.searches else candidates[:1]
        recorded = [candidate for candidate in candidates if candidate.hash_key() == kernel]
        if not recorded:
            _log.warning("compile: a kernel of the lock is not offered here; torch selects again")
            return candidates
        self.replayed += 1
        return recorded[:1]

    def record(
        self,
        timings: dict[ChoiceCaller, float],
        name: str,
        inputs: Sequence[Any],
        candidates: list[ChoiceCaller],
        *_: Any,
    ) -> None:
        """Records the fastest kernel of a measurement; torch calls it with more than is needed."""
        if timings:
            fastest = min(timings, key=timings.__getitem__)
            self._choices.record(_operation(candidates), fastest.hash_key())


def _operation(candidates: Sequence[ChoiceCaller]) -> str:
    """Returns what the candidates compute: names of library calls, inputs and output, and the precision of products."""
    import torch
    from torch._inductor.select_algorithm import ExternKernelCaller, create_inputs_key

    first = candidates[0]
    calls = sorted({caller.name for caller in candidates if isinstance(caller, ExternKernelCaller)})
    inputs = create_inputs_key(first.input_nodes)
    precision = torch.get_float32_matmul_precision()
    return f"{'/'.join(calls)}({inputs}) -> {first.layout}, {precision}"
