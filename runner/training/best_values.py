"""Remembers the best values of metrics, whose checkpoints stay as ``train.keep`` requires."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner.system.errors import RunnerError

if TYPE_CHECKING:
    from runner.plugin.contract import Objective
    from runner.plugin.source import State
    from runner.recipe.keeping import KeepConfig


class BestValues:
    """The best scores of each metric so far, best first; a larger score is better."""

    def __init__(self, config: KeepConfig, objective: Objective | None) -> None:
        self._count = config.best
        self._directions = config.directions(objective)
        self._scores: dict[str, list[float]] = {name: [] for name in self._directions}

    def scores(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the scores of an evaluation; a metric without a finite value has none.

        Args:
            metrics: Those of the evaluation, by name without ``eval/``.

        Raises:
            RunnerError: The evaluation has no such metric.
        """
        scores: dict[str, float] = {}
        for name, direction in self._directions.items():
            if name not in metrics:
                names = ", ".join(f"eval/{metric}" for metric in sorted(metrics))
                raise RunnerError(
                    f"train.keep.metrics: the evaluation has no 'eval/{name}'; it has {names}"
                )
            value = metrics[name]
            # A metric may have no value, such as a mean over no events.
            if math.isfinite(value):
                scores[name] = value if direction == "maximize" else -value
        return scores

    def add(self, scores: Mapping[str, float]) -> bool:
        """Adds the scores of an evaluation, and returns whether one of them is among the best.

        The later one of two equal scores is better, because its checkpoint stays.
        """
        is_among_best = False
        for name, score in scores.items():
            best = sorted([*self._scores[name], score], reverse=True)[: self._count]
            self._scores[name] = best
            is_among_best = is_among_best or score >= best[-1]
        return is_among_best

    def state_dict(self) -> State:
        """Returns what a resumed training needs to keep the checkpoints that this one would."""
        return {name: list(scores) for name, scores in self._scores.items()}

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned; a metric that is compared since then has no
        earlier values.
        """
        # The recipe of a resumed run may name other metrics.
        for name in self._scores:
            self._scores[name] = [float(score) for score in state.get(name, ())]
