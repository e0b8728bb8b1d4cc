"""Failures that a change may hide: numbers that are not finite, that are very small, or that
have few digits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof.algebra_check import perturb
from runner.proof.decisions import DecisionSearch
from runner.proof.difference import TIMES, absolute_difference, described, digest
from runner.proof.isolation import Frame, Isolation, Location, StepError
from runner.proof.modes import NarrowTypes
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build, Subject
from runner.proof.subject_states import named_parameters, saved
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import (
    clones,
    leaves,
    map_tensors,
    named_tensors,
    on_host,
    scaled,
    with_first_row,
)
from runner.proof.verdict import Outcome, Verdict
from runner.system.tensor_trees import as_float64, has_arithmetic

# Tensors of a batch, and parameters, that get a NaN, one at a time.
_MOST_TENSORS = 3
# Factor of numbers that are small in any precision; their squares are still normal.
_SMALL = 1e-12
_SMALL_IN_FLOAT64 = 1e-30
# Factor of numbers that are subnormal in float32.
_SUBNORMAL = 1e-39
# Share of its size by which a small tensor may differ.
_ALLOWED = 0.01
# Error of a tensor, as a share of its size, that is never too large; numbers of 16 bits are off
# by more.
_FEW_DIGITS = 1e-4
# Times that a tensor may be as far from float64 as the baseline's.
_FURTHER = 30.0
# Smaller numbers have fewer than four digits in float32.
_FEWEST_DIGITS = 1e-41


class _Failing(NamedTuple):
    """An update with a NaN in it."""

    name: str
    update: Update


def unmasked(
    baseline: Build, changed: Build, start: Update, contract: str, seed: int = 0
) -> Verdict:
    """Returns whether NaN in a batch or a parameter reaches everything that it reaches in the
    baseline.

    Exact: a tensor of outputs, gradients or state that is not finite in the baseline must not be
    finite. Close: outputs must not be; a state may stay as it was, because a gradient scaler skips
    an update, but may not change by finite numbers.

    Args:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        start: An update with the state before it; without one, the initial state.
        contract: Name of the contract.
        seed: Of the global random generators.
    """
    reference = Isolation(baseline, seed)
    candidate = Isolation(changed, seed)
    is_exact = contract == "Exact"
    start = replace(start, states=start.states or saved(reference.subject), seed=seed)
    for failing in _failing_updates(start, reference.subject):
        trajectory = Trajectory([failing.update], seed)
        expected = trajectory.first_frame(reference)
        actual = on_host(trajectory.first_frame(candidate))
        if expected is None or actual is None:
            # An exception is not hidden.
            continue
        # The candidate's values were copied because its state is loaded again.
        candidate.load(failing.update.states or {})
        loaded = candidate.initial()
        location = _masked(expected, actual, loaded, is_exact=is_exact)
        if location is not None:
            difference = described(1, location, expected[location], actual[location])
            summary = f"with {failing.name}, a failure is hidden: {difference}"
            reproduction = Reproduction(baseline, changed, trajectory, 1, contract)
            return reproduction.fail(summary, difference)
    summary = "numbers that are not finite reach what they reach in the baseline"
    return Verdict(Outcome.PASS, contract, summary)


def _failing_updates(start: Update, subject: Subject) -> Iterator[_Failing]:
    """Yields updates with a NaN in one tensor of the batch, or in one parameter."""
    names = [
        name
        for name, tensor in named_tensors(start.batch).items()
        if _can_hold_nan(tensor)
    ]
    for name in names[:_MOST_TENSORS]:
        batch = with_first_row(start.batch, name, math.nan)
        yield _Failing(f"NaN in '{name}' of the input", replace(start, batch=batch))
    states = start.states or {}
    parameters = list(_saved_parameters(states, subject))
    step = -(-len(parameters) // _MOST_TENSORS)
    for name in parameters[:: max(1, step)]:
        failing_states = with_first_row(states, name, math.nan)
        yield _Failing(f"NaN in '{name}'", replace(start, states=failing_states))


def _saved_parameters(states: Mapping[str, Any], subject: Subject) -> Iterator[str]:
    """Yields the names of trainable parameters in a saved state."""
    parameters = named_parameters(subject).values()
    addresses = {parameter.data_ptr() for parameter in parameters}
    current = {name: state.state_dict() for name, state in subject.state.items()}
    current_leaves = dict(leaves(current))
    for name, copy in leaves(states):
        tensor = current_leaves.get(name)
        if not isinstance(tensor, Tensor) or not _can_hold_nan(copy):
            continue
        if tensor.data_ptr() in addresses:
            yield name


def _can_hold_nan(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or not has_arithmetic(leaf):
        return False
    return leaf.layout == torch.strided and leaf.numel() > 0


def _masked(
    expected: Frame, actual: Frame, start: Frame, *, is_exact: bool
) -> Location | None:
    """Returns the first value that is finite although the baseline's is not."""
    for location, expected_value in expected.items():
        value = actual.get(location)
        if value is None or _is_finite(expected_value) or not _is_finite(value):
            continue
        if is_exact or location.kind == "output":
            return location
        if location.kind != "state":
            continue
        # A skipped update leaves the state as it was, which hides nothing.
        if digest(value) != digest(start.get(location)):
            return location
    return None


def _is_finite(value: Any) -> bool:
    """Returns whether all numbers of a value are finite; also for a value that has none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, Tensor) or bool(as_float64(value).isfinite().all())


def same_small_numbers(
    baseline: Build, changed: Build, start: Update, contract: str, seed: int = 0
) -> Verdict:
    """Compares single updates in which parameters or inputs are very small, tensor by tensor.

    Other comparisons measure a difference by the size of all gradients together, in which small
    ones do not count. The yardstick is the baseline with numbers that are one ulp off. Exact: also
    with subnormal numbers, and with the state.

    Args:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        start: An update with the state before it; without one, the initial state.
        contract: Name of the contract.
        seed: Of the global random generators.
    """
    precisions = (False,) if contract == "Exact" else (True, False)
    for in_float64 in precisions:
        verdict = _compare_small_numbers(
            baseline, changed, start, contract, seed, in_float64=in_float64
        )
        if verdict is not None:
            return verdict
    return Verdict(Outcome.PASS, contract, "the same with very small numbers")


def _compare_small_numbers(
    baseline: Build,
    changed: Build,
    start: Update,
    contract: str,
    seed: int,
    *,
    in_float64: bool,
) -> Verdict | None:
    """Returns a verdict other than PASS if a tensor differs in a precision; None otherwise."""
    is_exact = contract == "Exact"
    reference = Isolation(baseline, seed, in_float64)
    candidate = Isolation(changed, seed, in_float64)
    start = replace(start, states=start.states or saved(reference.subject), seed=seed)
    factors = [_SMALL_IN_FLOAT64 if in_float64 else _SMALL]
    if is_exact:
        factors = [_SMALL_IN_FLOAT64, _SUBNORMAL]
    for name, update in _small_updates(start, factors):
        trajectory = Trajectory([update], seed, in_float64)
        expected = trajectory.first_frame(reference)
        if expected is None or not all(map(_is_finite, expected.values())):
            continue
        # The baseline may make another update below.
        expected = on_host(expected)
        try:
            actual = next(trajectory.updated(candidate))
        except StepError as error:
            return error.verdict(contract, baseline)
        location = _differing_tensor(expected, expected, actual, has_state=is_exact)
        if location is None:
            continue
        perturbed_update = Trajectory([_perturb(update)], seed, in_float64)
        perturbed = perturbed_update.first_frame(reference) or expected
        location = _differing_tensor(expected, perturbed, actual, has_state=is_exact)
        if location is None:
            continue
        difference = described(1, location, expected[location], actual[location])
        summary = f"{name}, not the same: {difference}"
        reproduction = Reproduction(baseline, changed, trajectory, 1, contract)
        verdict = reproduction.fail(summary, difference)
        # A search by tolerances takes such small numbers for equal.
        return verdict if is_exact else replace(verdict, reproduction=None)
    return None


def _small_updates(
    start: Update, factors: Sequence[float]
) -> Iterator[tuple[str, Update]]:
    for factor in factors:
        with_state = replace(start, states=scaled(factor, start.states))
        yield f"with a state {factor:g} times as large", with_state
        with_batch = replace(start, batch=scaled(factor, start.batch))
        yield f"with a batch {factor:g} times as large", with_batch


def _perturb(update: Update) -> Update:
    batch = map_tensors(_perturb_tensor, update.batch)
    states = map_tensors(_perturb_tensor, update.states)
    return replace(update, batch=batch, states=states)


def _perturb_tensor(tensor: Tensor) -> Tensor:
    return perturb(tensor).to(tensor.dtype)


def _differing_tensor(
    expected: Frame, perturbed: Frame, actual: Frame, *, has_state: bool
) -> Location | None:
    """Returns the first tensor that differs by more than a share of its largest element."""
    for location, value in expected.items():
        if location.kind == "state" and not has_state:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        error = absolute_difference(value, actual.get(location))
        yardstick = absolute_difference(value, perturbed.get(location))
        if error is None or yardstick is None or not error.numel():
            continue
        size = float(as_float64(value).abs().max())
        least = _FEWEST_DIGITS
        if not has_state:
            least = max(least, 100 * torch.finfo(value.dtype).smallest_normal)
        allowed = _ALLOWED * size + TIMES * float(yardstick.max())
        if size > least and float(error.max()) > allowed:
            return location
    return None


def same_digits(
    baseline: Build,
    changed: Build,
    updates: Sequence[Update],
    contract: str,
    seed: int = 0,
) -> Verdict:
    """Returns whether every tensor has about as many digits as in the baseline, and the same types.

    Other comparisons measure rounding errors by the size of all gradients together. Here each
    gradient and output of ``Close`` has a separate size. 16-bit types that the baseline does not
    have are a FAIL if a decision depends on them, and INCONCLUSIVE if no result does: two of them
    can have the digits of one longer number.

    Args:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        updates: Single updates, with their states.
        contract: Name of the contract.
        seed: Of the global random generators.
    """
    if contract == "Close":
        verdict = _compare_digits(baseline, changed, updates, contract, seed)
        if verdict is not None:
            return verdict
    expected = _narrow_types(baseline, updates, seed)
    places = _narrow_types(changed, updates, seed)
    name = next((name for name in places if name not in expected), None)
    if name is None:
        return Verdict(
            Outcome.PASS, contract, "numbers have as many digits as in the baseline"
        )
    rounded = (
        f"numbers are rounded to {name} ({places[name]}), as the baseline's are not"
    )
    verdict = _compare_decisions(
        baseline, changed, updates[0], contract, seed, always=True
    )
    if verdict is None:
        summary = f"{rounded}; no result shows it yet"
        return Verdict(Outcome.INCONCLUSIVE, contract, summary)
    return replace(verdict, summary=f"{rounded}, and decide: {verdict.summary}")


def same_decisions(
    baseline: Build, changed: Build, start: Update, contract: str, seed: int = 0
) -> Verdict:
    """Returns whether a candidate with further decisions has the baseline's results on both
    sides of each.

    Args:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        start: An update with the state before it; without one, the initial state.
        contract: Name of the contract.
        seed: Of the global random generators.
    """
    verdict = _compare_decisions(baseline, changed, start, contract, seed, always=False)
    if verdict is None:
        return Verdict(Outcome.PASS, contract, "the same on both sides of decisions")
    return replace(verdict, summary=f"next to a decision, {verdict.summary}")


def _compare_decisions(
    baseline: Build,
    changed: Build,
    start: Update,
    contract: str,
    seed: int,
    *,
    always: bool,
) -> Verdict | None:
    """Returns a FAIL if the candidate decides at other numbers than the baseline; None
    otherwise.
    """
    search = DecisionSearch(baseline, changed, is_exact=contract == "Exact", seed=seed)
    states = start.states or saved(search.reference.subject)
    start = replace(start, states=states, seed=seed)
    if not always and not search.has_more_decisions(start):
        return None
    decision = search.first_difference(start)
    if decision is None:
        return None
    reproduction = Reproduction(baseline, changed, decision.trajectory, 1, contract)
    return reproduction.fail(str(decision), decision.difference)


def _compare_digits(
    baseline: Build, changed: Build, updates: Sequence[Update], contract: str, seed: int
) -> Verdict | None:
    """Returns a FAIL if a tensor is much further from float64 than the baseline's in most
    updates; None otherwise.
    """
    exact = Isolation(baseline, seed, float64=True)
    reference = Isolation(baseline, seed)
    candidate = Isolation(changed, seed)
    states = saved(reference.subject)
    counts: Counter[Location] = Counter()
    for start in updates:
        update = replace(start, states=start.states or states, seed=seed)
        trajectory = Trajectory([update], seed)
        truth = next(replace(trajectory, float64=True).updated(exact))
        expected = next(trajectory.updated(reference))
        baseline_errors = _tensor_errors(truth, expected)
        actual = next(trajectory.updated(candidate))
        for location, error in _tensor_errors(truth, actual).items():
            baseline_error = baseline_errors.get(location, math.inf)
            if error <= max(_FEW_DIGITS, _FURTHER * baseline_error):
                continue
            counts[location] += 1
            # Rounding may decide otherwise in a single update, such as a ReLU near zero.
            if counts[location] <= len(updates) / 2:
                continue
            difference = described(1, location, truth[location], actual[location])
            reproduction = Reproduction(baseline, changed, trajectory, 1, contract)
            distances = (
                f"{error:.1e} of its size, the baseline's by {baseline_error:.1e}"
            )
            summary = (
                f"a tensor has fewer digits than the baseline's: it is off by {distances}: "
                f"update 1, slot 'step': '{location}'"
            )
            return reproduction.fail(summary, difference)
    return None


def _tensor_errors(truth: Frame, frame: Frame) -> dict[Location, float]:
    """Returns the Euclidean errors of gradients and outputs, each as a share of its size."""
    errors: dict[Location, float] = {}
    for location, exact in truth.items():
        if location.kind == "state" or not isinstance(exact, Tensor):
            continue
        if not exact.is_floating_point() or not exact.dim():
            continue
        error = absolute_difference(exact, frame.get(location))
        size = float(as_float64(exact).norm())
        if error is not None and math.isfinite(size) and size > 0:
            errors[location] = float(error.norm()) / size
    return errors


def _narrow_types(build: Build, updates: Sequence[Update], seed: int) -> dict[str, str]:
    isolation = Isolation(build, seed)
    types = NarrowTypes()
    for update in updates:
        if update.states is not None:
            isolation.load(update.states, update.seed)
        with types:
            isolation.advance([clones(update.batch)], lambda _: None)
    return types.places
