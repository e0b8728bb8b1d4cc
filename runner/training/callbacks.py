"""Calls the callbacks of a recipe, and detects what they change."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from runner.plugin.callback import Callback
from runner.plugin.end_training import EndTraining
from runner.plugin.implementation import imported
from runner.plugin.metric_names import check_metric_name
from runner.recipe.yaml_nodes import DEFAULT, Problem, RecipeError
from runner.system import generators
from runner.system.errors import RunnerError
from runner.system.suggestions import method_named, nearest
from runner.training.state_watch import StateWatch

if TYPE_CHECKING:
    from runner.plugin.source import State
    from runner.training.pipeline import Assembly

METHODS = ("on_start", "after_update", "after_evaluation", "after_checkpoint", "on_end")
COMPLETE_EVERY = 50
"""Updates between two complete looks at the state around ``after_update``."""
_log = logging.getLogger(__name__)


class Callbacks:
    """The callbacks of one training.

    Args:
        pipeline: The assembled pipeline.

    Attributes:
        reason: Why a callback ends the training; empty until one does.
        changes: By kind, the first change of the learner by a callback.
        is_checkpoint_new: Whether ``after_checkpoint`` has not been called for the checkpoint that
            is being written.

    Raises:
        RecipeError: A class overrides no method, or a method takes other arguments.
    """

    def __init__(self, pipeline: Assembly) -> None:
        self.progress = pipeline.progress
        self.learner = pipeline.learner
        self.reason = ""
        self.changes: dict[str, str] = {}
        self.is_checkpoint_new = False
        self._callbacks: dict[str, Callback] = {}
        self._started: set[str] = set()
        # By method, the kinds that override it: other calls would cost time for nothing.
        self._kinds: dict[str, list[str]] = {name: [] for name in METHODS}
        self._watch = StateWatch(pipeline.learner)
        for kind, config in pipeline.recipe.callbacks.items():
            callback = imported(config)(config, pipeline.context)
            overridden = [name for name in METHODS if _is_overridden(callback, name)]
            problem = _problem(callback, overridden)
            if problem:
                path = f"callbacks.{kind}"
                origin = pipeline.recipe.origins.get(path, DEFAULT)
                raise RecipeError([Problem(origin, path, problem)])
            self._callbacks[kind] = callback
            for name in overridden:
                self._kinds[name].append(kind)

    def start(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Calls ``on_start`` of the callbacks that have not started, and ``after_checkpoint`` for
        the checkpoint that was loaded; returns what they log.

        Args:
            metrics: The newest value of every metric.
        """
        new = [kind for kind in self._callbacks if kind not in self._started]
        self._started.update(new)
        logged = self._call("on_start", {}, new)
        return logged | self.follow_checkpoint(metrics)

    def follow_update(self, output: Mapping[str, Any]) -> dict[str, float]:
        """Calls ``after_update`` with the result of an update; returns what is logged."""
        if not self._kinds["after_update"]:
            return {}
        return self._call("after_update", output)

    def follow_evaluation(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Calls ``after_evaluation`` with its metrics; returns what is logged."""
        return self._call("after_evaluation", metrics)

    def follow_checkpoint(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Calls ``after_checkpoint`` unless that was done; returns what is logged."""
        if not self.is_checkpoint_new:
            return {}
        self.is_checkpoint_new = False
        return self._call("after_checkpoint", _reproducible(metrics))

    def end(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Calls ``on_end``; returns what is logged."""
        return self._call("on_end", _reproducible(metrics))

    def summary(self) -> str:
        """Returns the changes of the learner, as one line; empty if there are none."""
        return "; ".join(self.changes.values())

    def state_dict(self) -> State:
        """Returns what a resumed training needs to call the callbacks as this one would."""
        return {
            "started": sorted(self._started),
            "is_checkpoint_new": self.is_checkpoint_new,
            "reason": self.reason,
            "changes": dict(self.changes),
            "callbacks": {
                kind: callback.state_dict()
                for kind, callback in self._callbacks.items()
            },
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned; a callback that was not there starts anew."""
        self._started = set(state["started"])
        self.is_checkpoint_new = bool(state["is_checkpoint_new"])
        self.reason = str(state["reason"])
        self.changes = dict(state["changes"])
        for kind in self._callbacks.keys() & state["callbacks"].keys():
            self._callbacks[kind].load_state_dict(state["callbacks"][kind])

    def _call(
        self, method: str, metrics: Mapping[str, Any], kinds: list[str] | None = None
    ) -> dict[str, float]:
        """Calls a method of all callbacks that override it, or of these kinds."""
        logged: dict[str, float] = {}
        for kind in self._kinds[method]:
            if kinds is None or kind in kinds:
                logged |= self._call_one(kind, method, metrics)
        return logged

    def _call_one(
        self, kind: str, method: str, metrics: Mapping[str, Any]
    ) -> dict[str, float]:
        """Calls a method, and restores the random generators; a change of the learner is noted."""
        callback = self._callbacks[kind]
        before = None
        # One change marks the run, so nothing is left to detect.
        if kind not in self.changes:
            before = self._watch.look(self._is_complete(method))
        random_state = generators.state_dict()
        returned = None
        try:
            returned = getattr(callback, method)(self.progress, metrics, self.learner)
        except EndTraining as ended:
            self.reason = self.reason or str(ended) or f"callback '{kind}' ended it"
        finally:
            generators.load_state_dict(random_state)
        change = "" if before is None else self._watch.change_since(before)
        if change:
            self._note_change(kind, method, change)
        return _logged(callback, method, returned)

    def _is_complete(self, method: str) -> bool:
        """Returns whether numbers are read before and after a call."""
        if method != "after_update":
            return True
        updates = self.progress.updates
        return updates == 1 or updates % COMPLETE_EVERY == 0

    def _note_change(self, kind: str, method: str, change: str) -> None:
        updates = self.progress.updates
        self.changes[kind] = (
            f"callback '{kind}' changed '{change}' in {method} after update {updates:,}"
        )
        _log.warning("%s; the run is marked", self.changes[kind])


def _reproducible(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that do not depend on the speed of this machine."""
    prefixes = ("train/", "eval/")
    return {name: metrics[name] for name in metrics if name.startswith(prefixes)}


def _is_overridden(callback: Callback, name: str) -> bool:
    return getattr(type(callback), name) is not getattr(Callback, name)


def _problem(callback: Callback, overridden: list[str]) -> str:
    """Returns why a callback cannot be called; empty if it can."""
    for name in overridden:
        signature = inspect.signature(getattr(callback, name))
        try:
            signature.bind(None, None, None)
        except TypeError:
            method = method_named(callback, name)
            return f"{method} should take (self, progress, metrics, learner)"
    if overridden:
        return ""
    owner = type(callback).__name__
    methods = [name for name in vars(type(callback)) if not name.startswith("_")]
    for method in methods:
        near = nearest(method, METHODS)
        if near is not None:
            return f"{method_named(callback, method)} is never called - did you mean '{near}'?"
    return f"{owner} overrides none of {', '.join(METHODS)}, so it has no effect"


def _logged(callback: Callback, method: str, returned: Any) -> dict[str, float]:
    """Returns what a method logs.

    Raises:
        RunnerError: It returned no metrics by name.
    """
    if returned is None:
        return {}
    name = method_named(callback, method)
    if not isinstance(returned, Mapping):
        kind = type(returned).__name__
        raise RunnerError(f"{name} should return None or metrics by name, got {kind}")
    logged = {}
    for metric, value in returned.items():
        check_metric_name(metric, name)
        logged[f"callbacks/{callback.config.kind}/{metric}"] = _number(
            value, metric, name
        )
    return logged


def _number(value: Any, metric: str, method: str) -> float:
    is_scalar = isinstance(value, Tensor) and value.numel() == 1
    if is_scalar or (isinstance(value, int | float) and not isinstance(value, bool)):
        return float(value)
    kind = type(value).__name__
    raise RunnerError(
        f"{method} returned '{metric}' as {kind}; it should be a number or a scalar tensor"
    )
