"""Base class of a callback: code that observes a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from runner.plugin.context import Context
    from runner.plugin.learner import Learner
    from runner.plugin.progress import Progress
    from runner.plugin.source import State

Logged = Mapping[str, "float | Tensor"] | None
"""Metrics by name that a method of a callback logs; None logs nothing."""


class Callback:
    """Observes a training; override the methods that you need.

    A method may log figures, images, texts and tables with ``self.context``, return metrics, which
    are logged as ``callbacks/<kind>/<name>`` at the current progress, and raise ``EndTraining``,
    which ends the training as finished. Only methods that a class overrides are called. Random
    numbers that a method draws do not change those of the training.

    A callback reads the learner. If it changes parameters, buffers, optimizers or modes of modules,
    the training continues, and the run is marked.
    """

    def __init__(self, config: Any, context: Context) -> None:
        self.config = config
        self.context = context

    def on_start(
        self, progress: Progress, metrics: Mapping[str, float], learner: Learner
    ) -> Logged:
        """Called once before the first update of a training; ``metrics`` is empty."""

    def after_update(
        self, progress: Progress, metrics: Mapping[str, Any], learner: Learner
    ) -> Logged:
        """Called after every update, with the detached tensors and ``Mean``s that it returned."""

    def after_evaluation(
        self, progress: Progress, metrics: Mapping[str, float], learner: Learner
    ) -> Logged:
        """Called after every evaluation, with its metrics by name, without ``eval/``."""

    def after_checkpoint(
        self, progress: Progress, metrics: Mapping[str, float], learner: Learner
    ) -> Logged:
        """Called after every checkpoint that the recipe requires, with the newest value of each
        ``train/`` and ``eval/`` metric.

        A resumed run calls it for the checkpoint from which it continues.
        """

    def on_end(
        self, progress: Progress, metrics: Mapping[str, float], learner: Learner
    ) -> Logged:
        """Called after the last evaluation of a training that is complete; ``metrics`` as for
        ``after_checkpoint``.
        """

    def state_dict(self) -> State:
        """Returns the state that a resumed run needs to continue bit for bit."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        if state:
            stored = f"the checkpoint has {sorted(state)}"
            raise ValueError(
                f"callback '{self.config.kind}' has no state, but {stored}"
            )
