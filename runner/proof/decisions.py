"""Search of inputs at which a candidate decides differently from the baseline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.proof.difference import (
    LOADED_TOLERANCE,
    Difference,
    absolute_difference,
    compared_values,
    described,
    differing,
    not_same_bits,
    shared,
)
from runner.proof.isolation import Frame, Isolation, StepError
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import map_tensors, on_host, scaled
from runner.system.errors import RunnerError
from runner.system.tensor_trees import has_arithmetic

Signature = tuple[tuple[str, bool | None], ...]
"""The operators of an update, with the result of each operator that decides."""
Line = Callable[[float], Update]
"""Makes an update with numbers that are larger by a factor."""
# Factors between which decisions are searched.
_FACTORS = tuple(4.0**exponent for exponent in range(-4, 7))
# Relative distance of two factors between which a decision is located. Float32 decides the same
# on both sides up to a hundredth of it; 16 bits are off by up to 400 of it.
WIDTH = 1e-5
# Relative size of perturbations; a sum in float32 rounds by less.
_PERTURBATION = 1e-6
_PERTURBATIONS = 5
# Times by which a difference is larger than that of the perturbed baseline.
_TIMES = 3.0
# The operator by which code reads a single number.
_READS = "_local_scalar_dense"
# Decisions that are located on each line.
_MOST_DECISIONS = 4


class DecisionDifference(NamedTuple):
    """A difference next to a decision.

    Attributes:
        input: The input of the update, in words.
        difference: The first value that differs.
        trajectory: The update.
    """

    input: str
    difference: Difference
    trajectory: Trajectory

    def __str__(self) -> str:
        return f"with {self.input}, {self.difference}"


class Decisions(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the operators of an update, and single truth values, by which code may branch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[str, bool | None]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        truths = [leaf for leaf in tree_leaves(output) if _is_truth(leaf)]
        self.made.append((str(func), bool(truths[0]) if truths else None))
        return output


def _is_truth(leaf: Any) -> bool:
    """Returns whether a leaf is a tensor with one truth value."""
    return isinstance(leaf, Tensor) and leaf.dtype == torch.bool and leaf.numel() == 1


class DecisionSearch:
    """Searches updates in which the candidate branches at other numbers than the baseline.

    An update is repeated with its batch, its state, or both larger or smaller by factors. Between
    two factors with other operators of the candidate, a bisection locates its decision. On both
    sides of it, candidate and baseline must have the same result: a decision at other numbers
    shows there, if they are further apart than the relative distance of the two sides.

    Args:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        is_exact: Whether bits are compared, in the precision of the training. Otherwise the
            comparison is in float64.
        seed: Of the global random generators.
    """

    def __init__(
        self, baseline: Build, changed: Build, *, is_exact: bool, seed: int = 0
    ) -> None:
        self.is_exact = is_exact
        self.seed = seed
        self.reference = Isolation(baseline, seed, float64=not is_exact)
        self.candidate = Isolation(changed, seed, float64=not is_exact)
        self.parts = shared(self.reference.subject.state, self.candidate.subject.state)

    def first_difference(self, start: Update) -> DecisionDifference | None:
        """Returns a difference next to a decision; None if there is none.

        Args:
            start: An update with the state before it.
        """
        lines: Mapping[str, Line] = {
            "batch and a state": partial(_scale_both, start),
            "batch": partial(_scale_batch, start),
            "state": partial(_scale_state, start),
        }
        for name, line in lines.items():
            for factors in itertools.islice(self._decisions(line), _MOST_DECISIONS):
                differences = []
                for factor in factors:
                    side = self._compare(line(factor))
                    if side is not None:
                        differences.append((factor, side))
                # A difference on both sides has another reason than the decision.
                if len(differences) == 1:
                    factor, difference = differences[0]
                    words = f"a {name} {factor:.6g} times as large"
                    trajectory = self._trajectory(line(factor))
                    return DecisionDifference(words, difference, trajectory)
        return None

    def has_more_decisions(self, start: Update) -> bool:
        """Returns whether the candidate reads more truth values and single numbers than the
        baseline.
        """
        baseline_count = self._count_decisions(self.reference, start)
        return self._count_decisions(self.candidate, start) > baseline_count

    def _count_decisions(self, isolation: Isolation, update: Update) -> int:
        signature = self._signature(isolation, update) or ()
        return sum(truth is not None or _READS in name for name, truth in signature)

    def _decisions(self, line: Line) -> Iterator[tuple[float, float]]:
        """Yields the factors on both sides of each decision of the candidate."""
        signatures = [
            (factor, self._signature(self.candidate, line(factor)))
            for factor in _FACTORS
        ]
        for (low, low_signature), (high, high_signature) in itertools.pairwise(
            signatures
        ):
            if low_signature is None or high_signature is None:
                continue
            if low_signature == high_signature:
                continue
            while high / low > 1 + WIDTH:
                middle = math.sqrt(low * high)
                if self._signature(self.candidate, line(middle)) == low_signature:
                    low = middle
                else:
                    high = middle
            yield low, high

    def _signature(self, isolation: Isolation, update: Update) -> Signature | None:
        """Returns the decisions of a subject in an update; None if it raises."""
        decisions = Decisions()
        trajectory = self._trajectory(update)
        try:
            copies = trajectory.copies()
            with isolation.entered():
                batch = trajectory.prepare(isolation, update, copies)
                with decisions:
                    isolation.advance([batch], lambda _: None)
        except (StepError, RunnerError):
            return None
        return tuple(decisions.made)

    def _trajectory(self, update: Update) -> Trajectory:
        return Trajectory([update], self.seed, float64=not self.is_exact)

    def _compare(self, update: Update) -> Difference | None:
        expected = self._frame(self.reference, update)
        actual = self._frame(self.candidate, update)
        if expected is None or actual is None:
            return None
        compared = compared_values(expected, actual, self.parts)
        if self.is_exact:
            differences = list(not_same_bits(compared, actual))
        else:
            differences = list(differing(compared, actual, LOADED_TOLERANCE))
        if not differences:
            return None

        # Rounding may change a decision of the baseline, too, if it is as near as that.
        yardsticks = []
        for number in range(_PERTURBATIONS):
            frame = self._frame(self.reference, _perturb(update, number))
            if frame is not None:
                yardsticks.append(frame)
        for location in differences:
            value = compared[location]
            distances = [_distance(value, frame.get(location)) for frame in yardsticks]
            actual_value = actual.get(location)
            if _distance(value, actual_value) > _TIMES * max(distances, default=0.0):
                return described(1, location, value, actual_value)
        return None

    def _frame(self, isolation: Isolation, update: Update) -> Frame | None:
        """Returns the visible values after an update, on the host; None if it raises."""
        frame: Frame | None = on_host(self._trajectory(update).first_frame(isolation))
        return frame


def _distance(expected: Any, actual: Any) -> float:
    """Returns the largest difference of an element; infinite for values that cannot be
    subtracted.
    """
    error = absolute_difference(expected, actual)
    if error is None:
        return math.inf
    return float(error.max()) if error.numel() else 0.0


def _perturb(update: Update, number: int) -> Update:
    """Returns an update whose numbers are slightly off, by random shares."""
    generator = torch.Generator().manual_seed(number)

    def perturb(tensor: Tensor) -> Tensor:
        if not has_arithmetic(tensor) or tensor.layout != torch.strided:
            return tensor
        shares = _PERTURBATION * torch.randn(
            tensor.shape, generator=generator, dtype=torch.float64
        )
        return (tensor * (1 + shares.to(tensor.device))).to(tensor.dtype)

    # Batch and states draw from the same generator, in this order.
    batch = map_tensors(perturb, update.batch)
    states = map_tensors(perturb, update.states)
    return replace(update, batch=batch, states=states)


def _scale_batch(start: Update, factor: float) -> Update:
    return replace(start, batch=scaled(factor, start.batch))


def _scale_state(start: Update, factor: float) -> Update:
    return replace(start, states=scaled(factor, start.states))


def _scale_both(start: Update, factor: float) -> Update:
    return _scale_state(_scale_batch(start, factor), factor)
