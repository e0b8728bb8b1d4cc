"""Suggestions that follow from the study's seed, the trial's number and what came out before, and from nothing else."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, WilcoxonPruner
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler

from runner.study.config import StudyConfig

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial, TrialState


_STARTUP = 10


class PerTrialSampler(BaseSampler):
    """A fresh sampler for every trial, and for every parameter that is not drawn together with others.

    Optuna stores no sampler's generator, so that one which goes on from trial to trial would suggest something else
    after a restart. Here a trial that is begun again, even in the middle of its suggestions, is suggested the same.

    Args:
        config: the study's settings.
    """

    def __init__(self, config: StudyConfig) -> None:
        self._config = config
        self._current: tuple[int, BaseSampler] | None = None

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters that are drawn together."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draws parameters together."""
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draws one parameter by itself."""
        sampler = self._new(trial.number, param_name)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Called when a trial begins, or begins again: also here, where it may have drawn before."""
        self._current = None
        self._of(trial).before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Called when a trial ends."""
        self._of(trial).after_trial(study, trial, state, values)

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        if self._current is None or self._current[0] != trial.number:
            self._current = (trial.number, self._new(trial.number, ""))
        return self._current[1]

    def _new(self, number: int, name: str) -> BaseSampler:
        text = f"{self._config.seed} {number} {name}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        sampler = self._config.sampler
        startup = sampler.startup or _STARTUP
        if sampler.kind == "random":
            return RandomSampler(seed=seed)
        if sampler.kind == "nsga2":
            return NSGAIISampler(seed=seed, population_size=max(2, startup))
        with warnings.catch_warnings():  # conditional spaces want groups, which Optuna calls experimental
            warnings.simplefilter("ignore", ExperimentalWarning)
            return TPESampler(
                n_startup_trials=startup, seed=seed, multivariate=True, group=True, constant_liar=True
            )  # fmt: skip


def pruner(config: StudyConfig, goal: int, every: int) -> BasePruner:
    """Decides whether a trial goes on.

    Args:
        config: the study's settings.
        goal: the step at which a training ends.
        every: steps between two evaluations.
    """
    kind = config.pruner_kind
    startup = config.pruner.startup
    if kind == "median":
        return MedianPruner(n_startup_trials=5 if startup is None else startup)
    if kind == "hyperband":
        return HyperbandPruner(min_resource=max(1, every), max_resource=goal)
    if kind == "wilcoxon":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return WilcoxonPruner(n_startup_steps=2 if startup is None else startup)
    return NopPruner()
