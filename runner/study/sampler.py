"""Samplers and pruners of a study: suggestions depend only on its seed, the trial's number and earlier results."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, WilcoxonPruner
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from runner.study.config import StudyConfig


class PerTrialSampler(BaseSampler):
    """A fresh sampler for every trial, and for every parameter that is not drawn together with others.

    Optuna does not store a sampler's generator, so that one sampler for all trials would suggest
    something else after a restart. Here a trial that is started again, even in the middle of its
    suggestions, receives the same suggestions.
    """

    def __init__(self, config: StudyConfig) -> None:
        self._config = config
        self._joint_sampler: BaseSampler

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Returns the parameters that are sampled together; Optuna calls this
        just before sampling them.
        """
        self._joint_sampler = self._new(trial.number, "")
        return self._joint_sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draws parameters together."""
        return self._joint_sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draws one parameter by itself."""
        sampler = self._new(trial.number, param_name)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def _new(self, number: int, name: str) -> BaseSampler:
        """Returns the sampler of a parameter, or of all that are drawn together if the name is empty."""
        digest = hashlib.sha256(f"{self._config.seed} {number} {name}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        kind = self._config.sampler.kind
        startup = self._config.sampler.startup or 10

        if kind == "random":
            return RandomSampler(seed=seed)
        if kind == "nsga2":
            return NSGAIISampler(seed=seed, population_size=max(2, startup))
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            return TPESampler(
                n_startup_trials=startup,
                seed=seed,
                multivariate=True,
                # Settings of a stage exist only where it is on: without groups they would be sampled one by one.
                group=True,
                constant_liar=True,
            )


def pruner(config: StudyConfig, goal: int, every: int) -> BasePruner:
    """Returns the pruner for trainings that end at ``goal`` and are evaluated
    every ``every`` steps.
    """
    kind = config.pruner_kind
    startup = config.pruner.startup
    if kind == "median":
        return MedianPruner(n_startup_trials=5 if startup is None else startup)
    if kind == "hyperband":
        return HyperbandPruner(min_resource=max(1, every), max_resource=goal)
    if kind == "wilcoxon":
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            return WilcoxonPruner(n_startup_steps=2 if startup is None else startup)
    return NopPruner()
