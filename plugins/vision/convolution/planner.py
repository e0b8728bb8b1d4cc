"""Plans for the convolutions of one pipeline: from its run, from a cache, or from a search."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.api import Choices, UsageError

from .backend import Backend
from .function import convolve
from .geometry import ConvGeometry
from .key import ConvKey
from .plan import ConvPlan, Needs, parse_plan, plan_key
from .plan_file import MOST_PLANS, Plans
from .registry import BACKENDS
from .search import SearchLimits, SearchResult
from .workspace import Workspace

SearchFunction = Callable[[ConvKey, Needs, SearchLimits], SearchResult]
_log = logging.getLogger(__name__)


class Planner:
    """Computes convolutions by the backends that a search has selected.

    A plan comes from the tuning choices of the run, or else from the cache, or else from a
    search. All three are recorded among the tuning choices, so that another run of the lock
    computes the same bits.

    Args:
        choices: The tuning choices of the run.
        plans: Returns the cache.
        search: Searches for the plan of one convolution.
        limits: What candidates may cost; the seconds are for all searches together.
        every_call: Whether each call searches again, and nothing is kept.
    """

    def __init__(
        self,
        choices: Choices,
        plans: Callable[[], Plans],
        search: SearchFunction,
        limits: SearchLimits,
        every_call: bool = False,
    ) -> None:
        self.choices = choices
        self.plans = plans
        self.search = search
        self.limits = limits
        self.every_call = every_call
        self.searches = 0
        self.cached = 0
        self.untested = 0
        self.seconds = 0.0
        self.results: dict[str, SearchResult] = {}
        self._known: dict[tuple[ConvKey, Needs], ConvPlan] = {}
        self._revision = choices.revision

    def convolve(
        self,
        x: Tensor,
        w: Tensor,
        geometry: ConvGeometry,
        bias: Tensor | None,
        workspace: Workspace,
    ) -> Tensor:
        """Computes a convolution."""
        needs = Needs.of(x, w)
        plan: ConvPlan | None = None

        def choose(key: ConvKey) -> Backend:
            nonlocal plan
            # The forward direction is the first one that is chosen.
            if plan is None:
                plan = self.plan(key, needs)
            return BACKENDS[getattr(plan, key.direction)]

        return convolve(x, w, geometry, choose, bias, workspace)

    def plan(self, key: ConvKey, needs: Needs) -> ConvPlan:
        """Returns the plan of a convolution.

        Raises:
            UsageError: The lock of the run records a plan that cannot be used.
        """
        plans = self.plans()
        if self.every_call:
            return self._search(key, needs).plan
        if self._revision != self.choices.revision:
            # A checkpoint has brought other choices.
            self._known.clear()
            self._revision = self.choices.revision
        plan = self._known.get((key, needs))
        if plan is None:
            # Shapes that change all the time would fill the memory.
            if len(self._known) >= MOST_PLANS:
                self._known.clear()
            plan = self._known[key, needs] = self._new_plan(key, needs, plans)
        return plan

    def _new_plan(self, key: ConvKey, needs: Needs, plans: Plans) -> ConvPlan:
        text = plan_key(key, needs)
        recorded = self.choices.get(text)
        if recorded is not None:
            return self._recorded(recorded, key, needs)
        # A strided input has no layout that a sample could have.
        if not self.choices.searches or key.layout == "strided":
            return ConvPlan()
        plan = self._cached(plans.get(text), key, needs)
        if plan is None:
            is_out_of_time = self.limits.seconds <= self.seconds
            if is_out_of_time or len(self.choices.items()) >= MOST_PLANS:
                self.untested += 1
                plan = ConvPlan()
            else:
                plan = self._search(key, needs).plan
                plans.put(text, plan.data(needs))
        self.choices.record(text, plan.data(needs))
        return plan

    def _recorded(self, recorded: Any, key: ConvKey, needs: Needs) -> ConvPlan:
        try:
            return parse_plan(recorded, key, needs)
        except ValueError as error:
            message = f"the lock records a plan that cannot be used: {error}"
            raise UsageError(
                f"algorithm_search: {message}: search again with --retune"
            ) from None

    def _cached(self, kept: Any, key: ConvKey, needs: Needs) -> ConvPlan | None:
        """Returns a plan of the cache; None if there is none, or if it cannot be used."""
        if kept is None:
            return None
        try:
            plan = parse_plan(kept, key, needs)
        except ValueError as error:
            _log.warning("plan_cache: a plan is ignored, because it %s", error)
            return None
        self.cached += 1
        return plan

    def _search(self, key: ConvKey, needs: Needs) -> SearchResult:
        # The time limit is that of all searches together, unless each call searches.
        remaining = self.limits.seconds
        if not self.every_call:
            remaining -= self.seconds
        limits = SearchLimits(
            self.limits.workspace,
            self.limits.error_ratio,
            self.limits.deterministic,
            remaining,
        )
        result = self.search(key, needs, limits)
        self.searches += 1
        self.seconds += result.seconds
        self.results[plan_key(key, needs)] = result
        return result

    def notes(self) -> Sequence[str]:
        """Returns what was selected, for the closing table."""
        plans = list(self._known.values())
        changed = sum(not plan.is_native for plan in plans)
        lines = [
            f"{len(plans)} plans, {changed} of them not native: {self.searches} searches in "
            f"{self.seconds:.1f} s, "
            f"{self.cached} from the cache"
        ]
        if self.untested:
            lines.append(
                f"{self.untested} convolutions stayed native: the time limit was over before "
                f"they were tested"
            )
        return lines


def on_device(
    device: torch.device, workspace: Callable[[], Workspace]
) -> SearchFunction:
    """Returns the search on a device.

    Args:
        device: Where convolutions are computed.
        workspace: Returns what gives buffers for intermediate results.
    """
    from .search import Search

    def search(key: ConvKey, needs: Needs, limits: SearchLimits) -> SearchResult:
        return Search(key, needs, device, limits, workspace=workspace()).run()

    return search
