"""Learning rates, gradient norms and sizes of updates, for the curves of a training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.system.tensor_trees import stored_numbers

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from runner.plugin.source import State
    from runner.training.pipeline import Assembly

# A measurement takes about 0.2 ms, which must not show in the time of an update.
LEAST_UPDATES = 20
"""Updates between two measurements."""
MOST_NUMBERS = 2**20
"""Numbers of a role's parameters that are compared; of a larger role, every n-th."""


class UpdateMetrics:
    """Measures the last update before a report, for each role: the gradient's norm before it is
    clipped, and the size of the update relative to that of the parameters.

    Which update is the last one follows from the mean progress of an update. The learning rates are
    those at the report.

    Args:
        pipeline: The training's.
        interval: Between two reports, counted as ``Progress.position``.
    """

    def __init__(self, pipeline: Assembly, interval: int) -> None:
        self._pipeline = pipeline
        self._progress = pipeline.progress
        self._interval = interval
        self._report_at = 0
        self.due_from = 0
        self._started_at = 0
        self._measured_at = -LEAST_UPDATES
        self._before: dict[str, list[Tensor]] = {}
        self._measured: dict[str, Any] = {}
        # Updates and norms before clipping, by the identity of the first clipped parameter.
        self._norms: dict[int, tuple[int, Any]] = {}
        # Norms by role before an interruption, until the role has another gradient.
        self._earlier_norms: dict[str, float] = {}
        self._clipped = {
            role
            for role, settings in pipeline.recipe.optimizer.items()
            if settings.max_grad_norm is not None
        }
        if self._clipped:
            pipeline.slots.wrap("clip", self._remembered)
        self._plan()

    def is_due(self, position: int) -> bool:
        """Returns whether the update at a position is measured."""
        updates = self._progress.updates
        remaining = self._report_at - position
        # A quarter more than the mean, because updates differ in their progress.
        is_last = 4 * remaining * updates <= 5 * position
        # The update that follows is the one that would be measured.
        is_spaced = updates + 1 >= self._measured_at + LEAST_UPDATES
        return is_last and updates > 0 and is_spaced

    def start(self) -> None:
        """Remembers the parameters before an update."""
        self._before = {
            role: [sample.clone() for sample in self._samples(parameters)]
            for role, parameters in self._parameters().items()
        }
        self._started_at = self._progress.updates

    def finish(self) -> None:
        """Measures the update since ``start``; nothing if there was none."""
        if self._progress.updates > self._started_at:
            self._measured_at = self._progress.updates
            for role, parameters in self._parameters().items():
                self._measure(role, parameters)
        self._before = {}

    def take(self) -> dict[str, float]:
        """Returns the learning rates, and what was measured since the last call."""
        metrics = self._rates()
        metrics |= self._finite()
        self._measured = {}
        self._plan()
        return metrics

    def state_dict(self) -> State:
        """Returns what a resumed training needs to log the same."""
        return {
            "measured_at": self._measured_at,
            "measured": self._finite(),
            "norms": self._last_norms(),
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        self._measured_at = int(state["measured_at"])
        self._measured = {
            name: float(value) for name, value in state["measured"].items()
        }
        # Earlier versions did not store them.
        norms = state.get("norms", {})
        self._earlier_norms = {role: float(norm) for role, norm in norms.items()}
        self._plan()

    def _finite(self) -> dict[str, float]:
        """Returns what was measured; parameters of zeros, for example, have no relative change."""
        measured = {name: float(value) for name, value in self._measured.items()}
        return {name: value for name, value in measured.items() if math.isfinite(value)}

    def _plan(self) -> None:
        """Determines the position of the next report."""
        progress = self._progress
        next_report = (progress.position // self._interval + 1) * self._interval
        self._report_at = min(next_report, progress.whole)
        # A training that counts updates knows the last one; others find it in ``is_due``.
        if progress.unit == "updates":
            self.due_from = self._report_at - 1

    def _remembered(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the slot that clips gradients; their norm is remembered."""

        def remembered(parameters: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
            norm = clip(parameters, *args, **kwargs)
            # Compiled code would have to leave the graph.
            if norm is not None and parameters and not torch.compiler.is_compiling():
                self._norms[id(parameters[0])] = (self._progress.updates, norm)
            return norm

        return remembered

    def _measure(self, role: str, parameters: Sequence[Tensor]) -> None:
        """Measures the last update of a role."""
        norm = self._last_norm(role, parameters)
        if norm is not None:
            self._measured[f"optimizer/{role}/gradient_norm"] = norm

        before = self._before.get(role, [])
        after = self._samples(parameters)
        # Parameters that were added by the update have no size before it.
        if not before or len(before) != len(after):
            return
        changes = torch._foreach_sub(after, before)
        ratio = _norm_of(changes) / _norm_of(before)
        self._measured[f"optimizer/{role}/update_ratio"] = ratio

    def _samples(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns views of parameters, with every n-th number if there are many."""
        count = sum(parameter.numel() for parameter in parameters)
        stride = max(1, math.ceil(count / MOST_NUMBERS))
        samples = []
        for parameter in parameters:
            values = parameter.detach()
            whole = self._pipeline.learner.whole(values)
            sample = whole.flatten()[::stride]
            # A view would keep all numbers of a parameter of which this process has a part.
            samples.append(sample if whole is values else sample.clone())
        return samples

    def _last_norms(self) -> dict[str, float]:
        """Returns the norms of the last gradients of roles that may have no other one in the next
        update.
        """
        norms = {}
        periods = self._pipeline.learner.periods()
        for role, parameters in self._parameters().items():
            has_pauses = any(name.startswith(f"{role}.") for name in periods)
            # A skipped update clips nothing, so that the last norm stays.
            if role in self._clipped or has_pauses:
                norm = self._last_norm(role, parameters)
                if norm is not None and math.isfinite(norm):
                    norms[role] = float(norm)
        return norms

    def _last_norm(
        self, role: str, parameters: Sequence[Tensor]
    ) -> Tensor | float | None:
        """Returns the norm of a role's last gradient before clipping; None if it is not known."""
        if role in self._clipped:
            norms = self._last_clipped(parameters)
        else:
            norms = [
                stored_numbers(parameter.grad.detach())
                for parameter in parameters
                if parameter.grad is not None
            ]
        if not norms:
            return self._earlier_norms.get(role)
        return self._pipeline.learner.whole(_norm_of(norms))

    def _last_clipped(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns the norms of the last update that clipped gradients of these parameters."""
        clips = [
            self._norms[id(parameter)]
            for parameter in parameters
            if id(parameter) in self._norms
        ]
        last_update = max((update for update, _ in clips), default=None)
        # Which parameter is the first one changes where parameters are frozen or unfrozen.
        return [
            torch.as_tensor(norm).detach()
            for update, norm in clips
            if update == last_update
        ]

    def _parameters(self) -> dict[str, list[Tensor]]:
        """Returns the parameters of all optimizers of a role, without integers."""
        roles: defaultdict[str, list[Tensor]] = defaultdict(list)
        for role, optimizer in self._pipeline.learner.optimizers():
            for group in optimizer.param_groups:
                roles[role] += filter(_is_measured, group["params"])
        return roles

    def _rates(self) -> dict[str, float]:
        """Returns the learning rates, by role and group."""
        groups: defaultdict[str, list[tuple[str, float, float]]] = defaultdict(list)
        optimizers: Iterable[tuple[str, Optimizer]] = (
            self._pipeline.learner.optimizers()
        )
        bases = self._pipeline.base_rates
        for (role, optimizer), rates in zip(optimizers, bases, strict=False):
            for group, base in zip(optimizer.param_groups, rates, strict=False):
                rate = float(group["lr"])
                groups[role].append((group.get("name", ""), base, rate))

        metrics = {}
        for role, entries in groups.items():
            bases_of_role = {base for _, base, _ in entries}
            for number, (name, _, rate) in enumerate(entries):
                label = name
                # An author's groups have no names, and those of one rate need none.
                if not name and len(bases_of_role) > 1:
                    label = f"group_{number}"
                path = "/".join(filter(None, ("optimizer", role, label, "lr")))
                metrics[path] = rate
        return metrics


def _is_measured(parameter: Tensor) -> bool:
    """Returns whether a parameter has a norm."""
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return is_number and parameter.layout == torch.strided


def _norm_of(values: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm of all numbers."""
    norms = torch._foreach_norm(list(values))
    stacked = torch.stack([norm.double() for norm in norms])
    total: Tensor = torch.linalg.vector_norm(stacked)
    return total
