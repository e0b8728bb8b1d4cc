"""Records how a source calls its learner, and replaces the learner's answers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.plugin.learner import Learner
from runner.proof.trees import clones, leaves
from runner.system.tensor_trees import map_tensors


class LearnerRecorder:
    """Records how a source calls its learner.

    Attributes:
        learner: A copy of the learner for the source, which shares its modules.
        calls: Method and arguments of every call that returned tensors.
        answers: The learner's results.
        generator: Draws the answers that the source receives, between -1 and 1; None
            for the learner's.

    Args:
        learner: The learner of a pipeline.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = copy.copy(learner)
        self.calls: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        self.generator: torch.Generator | None = None
        self._replies = deque[Any]()
        for name in dir(type(learner)):
            if not name.startswith("_") and callable(getattr(type(learner), name)):
                # A stage may have replaced the method of this object.
                method = getattr(learner, name)
                setattr(self.learner, name, partial(self._call, name, method))

    def begin(self, replies: tuple[Any, ...]) -> None:
        """Forgets the calls; the source receives these results instead of the learner's."""
        self.calls = []
        self.answers = []
        self._replies = deque(clones(replies))

    def _call(
        self, name: str, method: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        # A learner may change its arguments in place.
        arguments = clones([args, options])
        answer = method(*args, **options)
        values = [leaf for _, leaf in leaves(answer)]
        if not values or not all(isinstance(value, Tensor) for value in values):
            return answer
        self.calls.append({"method": name, "arguments": arguments})
        self.answers.append(clones(answer))
        reply = self._replies.popleft() if self._replies else answer
        if self.generator is None:
            return reply
        return map_tensors(self._draw_answer, reply)

    def _draw_answer(self, answer: Tensor) -> Tensor:
        if not answer.is_floating_point():
            return answer
        draws = torch.rand(answer.shape, generator=self.generator, dtype=answer.dtype)
        return (2 * draws - 1).to(answer.device)
