"""Failures that a change may hide: numbers that are not finite, that are very small, or that have few digits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof.close_check import jog
from runner.proof.decisions import DecisionSearch
from runner.proof.difference import TIMES, absolute_difference, as_float64, described, digest
from runner.proof.isolation import Frame, Isolation, Location, StepError
from runner.proof.modes import NarrowTypes
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build, Subject
from runner.proof.subject_states import clones, leaves, named_parameters, on_host, saved
from runner.proof.trajectory import Trajectory, Update
from runner.proof.verdict import Outcome, Verdict
from runner.system.errors import RunnerError
from runner.system.tensor_trees import map_tensors

_MOST_TENSORS = 3
"""Tensors of a batch, and parameters, that get a NaN, one at a time."""
_SMALL = 1e-12
"""Factor of numbers that are small in any precision; their squares are still normal."""
_SMALL_IN_FLOAT64 = 1e-30
_SUBNORMAL = 1e-39
"""Factor of numbers that are subnormal in float32."""
_ALLOWED = 0.01
"""Share of its size by which a small tensor may differ."""
_FEW_DIGITS = 1e-4
"""Error of a tensor, as a share of its size, that is never too large; numbers of 16 bits are off by more."""
_FURTHER = 30.0
"""Times that a tensor may be as far from float64 as the baseline's."""
_FEWEST_DIGITS = 1e-41
"""Smaller numbers have fewer than four digits in float32."""


class _Failing(NamedTuple):
    """An update with a NaN in it."""

    name: str
    update: Update


def unmasked(baseline: Build, changed: Build, start: Update, contract: str, seed: int = 0) -> Verdict:
    """Returns whether NaN in a batch or a parameter reaches everything that it reaches in the baseline.

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
    start = replace(start, states=start.states or saved(reference.subject), seed=seed)
    for failing in _failing_updates(start, reference.subject):
        trajectory = Trajectory([failing.update], seed)
        expected = _frame(reference, trajectory)
        frame = _frame(candidate, trajectory)
        frame = on_host(frame)  # the state is loaded again below
        if expected is None or frame is None:
            # An exception is not hidden.
            continue
        candidate.load(failing.update.states or {})
        location = _masked(expected, frame, candidate.initial(), is_exact=contract == "Exact")
        if location is not None:
            difference = described(1, location, expected[location], frame[location])
            summary = f"with {failing.name}, a failure is hidden: {difference}"
            reproduction = Reproduction(baseline, changed, trajectory, 1, contract)
            return Verdict(Outcome.FAIL, contract, summary, {"difference": difference.data()}, reproduction)
    return Verdict(Outcome.PASS, contract, "numbers that are not finite reach what they reach in the baseline")


def _failing_updates(start: Update, subject: Subject) -> Iterator[_Failing]:
    """Yields updates with a NaN in one tensor of the batch, or in one parameter."""
    tensors = [(name, leaf) for name, leaf in leaves(start.batch, has_means=False) if _can_hold_nan(leaf)]
    for name, tensor in tensors[:_MOST_TENSORS]:
        batch = map_tensors(partial(_spoil, id(tensor)), start.batch)
        yield _Failing(f"NaN in '{name}' of the input", replace(start, batch=batch))
    states = start.states or {}
    parameters = list(_saved_parameters(states, subject))
    step = -(-len(parameters) // _MOST_TENSORS)
    for name, tensor in parameters[:: max(1, step)]:
        spoilt = map_tensors(partial(_spoil, id(tensor)), states)
        yield _Failing(f"NaN in '{name}'", replace(start, states=spoilt))


def _saved_parameters(states: Mapping[str, Any], subject: Subject) -> Iterator[tuple[str, Tensor]]:
    """Yields the copies of trainable parameters in a saved state."""
    addresses = {parameter.data_ptr() for parameter in named_parameters(subject).values()}
    present = dict(leaves({name: part.state_dict() for name, part in subject.state.items()}))
    for name, copy in leaves(states):
        tensor = present.get(name)
        if isinstance(tensor, Tensor) and _can_hold_nan(copy) and tensor.data_ptr() in addresses:
            yield name, copy


def _can_hold_nan(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided and leaf.numel() > 0


def _spoil(identity: int, tensor: Tensor) -> Tensor:
    """Returns a copy, with NaN in the first row if the tensor is that object."""
    copy: Tensor = clones(tensor)
    if id(tensor) == identity:
        with torch.no_grad():
            (copy[:1] if copy.dim() else copy).fill_(math.nan)
    return copy


def _frame(isolation: Isolation, trajectory: Trajectory) -> Frame | None:
    """Returns the visible values of a subject after an update; None if it raises."""
    try:
        return next(trajectory.updated(isolation))
    except (StepError, RunnerError):
        return None


def _masked(expected: Frame, frame: Frame, start: Frame, *, is_exact: bool) -> Location | None:
    """Returns the first value that is finite although the baseline's is not."""
    for location, value in expected.items():
        candidate = frame.get(location)
        is_hidden = not _is_finite(value) and candidate is not None and _is_finite(candidate)
        if not is_hidden:
            continue
        if is_exact or location.kind == "output":
            return location
        if location.kind == "state" and digest(candidate) != digest(start.get(location)):
            return location
    return None


def _is_finite(value: Any) -> bool:
    """Returns whether all numbers of a value are finite; also for a value that has none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, Tensor) or bool(as_float64(value).isfinite().all())


def same_small_numbers(baseline: Build, changed: Build, start: Update, contract: str, seed: int = 0) -> Verdict:
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
    is_exact = contract == "Exact"
    precisions = (False,) if is_exact else (True, False)
    for in_float64 in precisions:
        reference = Isolation(baseline, seed, in_float64)
        candidate = Isolation(changed, seed, in_float64)
        first = replace(start, states=start.states or saved(reference.subject), seed=seed)
        for name, update in _small_updates(first, in_float64=in_float64, is_exact=is_exact):
            trajectory = Trajectory([update], seed, in_float64)
            expected = _frame(reference, trajectory)
            if expected is None or not all(map(_is_finite, expected.values())):
                continue
            expected = on_host(expected)  # the baseline may make another update below
            try:
                frame = next(trajectory.updated(candidate))
            except StepError as error:
                return error.verdict(contract, baseline)
            location = _differing_tensor(expected, expected, frame, has_state=is_exact)
            if location is not None:
                perturbed = _frame(reference, Trajectory([_perturb(update)], seed, in_float64)) or expected
                location = _differing_tensor(expected, perturbed, frame, has_state=is_exact)
            if location is not None:
                difference = described(1, location, expected[location], frame[location])
                summary = f"{name}, not the same: {difference}"
                # A search by tolerances takes such small numbers for equal.
                reproduction = Reproduction(baseline, changed, trajectory, 1, contract) if is_exact else None
                return Verdict(Outcome.FAIL, contract, summary, {"difference": difference.data()}, reproduction)
    return Verdict(Outcome.PASS, contract, "the same with very small numbers")


def _small_updates(start: Update, *, in_float64: bool, is_exact: bool) -> Iterator[tuple[str, Update]]:
    factors = [_SMALL_IN_FLOAT64] if in_float64 else [_SMALL]
    if is_exact:
        factors = [_SMALL_IN_FLOAT64, _SUBNORMAL]
    for factor in factors:
        scale = partial(_times, factor)
        yield f"with a state {factor:g} times as large", replace(start, states=map_tensors(scale, start.states))
        yield f"with a batch {factor:g} times as large", replace(start, batch=map_tensors(scale, start.batch))


def _times(factor: float, tensor: Tensor) -> Tensor:
    return tensor * factor if tensor.is_floating_point() else tensor


def _perturb(update: Update) -> Update:
    batch = map_tensors(_perturb_tensor, update.batch)
    return replace(update, batch=batch, states=map_tensors(_perturb_tensor, update.states))


def _perturb_tensor(tensor: Tensor) -> Tensor:
    return jog(tensor).to(tensor.dtype)


def _differing_tensor(expected: Frame, perturbed: Frame, frame: Frame, *, has_state: bool) -> Location | None:
    """Returns the first tensor that differs by more than a share of its largest element."""
    for location, value in expected.items():
        is_compared = location.kind != "state" or has_state
        if not is_compared or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        error = absolute_difference(value, frame.get(location))
        yardstick = absolute_difference(value, perturbed.get(location))
        if error is None or yardstick is None or not error.numel():
            continue
        size = float(as_float64(value).abs().max())
        least = max(_FEWEST_DIGITS, 100 * torch.finfo(value.dtype).smallest_normal if not has_state else 0.0)
        allowed = _ALLOWED * size + TIMES * float(yardstick.max())
        if size > least and float(error.max()) > allowed:
            return location
    return None


def same_digits(baseline: Build, changed: Build, updates: Sequence[Update], contract: str, seed: int = 0) -> Verdict:
    """Returns whether every tensor has about as many digits as in the baseline, and the same types.

    Other comparisons measure rounding errors by the size of all gradients together. Here each
    gradient and output of ``Close`` has its own size. 16-bit types that the baseline does not have
    are a FAIL if a decision depends on them, and INCONCLUSIVE if no result does: two of them can
    have the digits of one longer number.

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
        return Verdict(Outcome.PASS, contract, "numbers have as many digits as in the baseline")
    rounded = f"numbers are rounded to {name} ({places[name]}), as the baseline's are not"
    shown = _compare_decisions(baseline, changed, updates[0], contract, seed, always=True)
    if shown is None:
        return Verdict(Outcome.INCONCLUSIVE, contract, f"{rounded}; no result shows it yet")
    return replace(shown, summary=f"{rounded}, and decide: {shown.summary}")


def same_decisions(baseline: Build, changed: Build, start: Update, contract: str, seed: int = 0) -> Verdict:
    """Returns whether a candidate with further decisions has the baseline's results on both sides of each.

    Args:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        start: An update with the state before it; without one, the initial state.
        contract: Name of the contract.
        seed: Of the global random generators.
    """
    shown = _compare_decisions(baseline, changed, start, contract, seed, always=False)
    if shown is None:
        return Verdict(Outcome.PASS, contract, "the same on both sides of decisions")
    return replace(shown, summary=f"next to a decision, {shown.summary}")


def _compare_decisions(
    baseline: Build, changed: Build, start: Update, contract: str, seed: int, *, always: bool
) -> Verdict | None:
    """Returns a FAIL if the candidate decides at other numbers than the baseline; None otherwise."""
    search = DecisionSearch(baseline, changed, is_exact=contract == "Exact", seed=seed)
    states = start.states or saved(search.reference.subject)
    start = replace(start, states=states, seed=seed)
    found = search.first_difference(start) if always or search.has_more_decisions(start) else None
    if found is None:
        return None
    reproduction = Reproduction(baseline, changed, found.trajectory, 1, contract)
    return Verdict(Outcome.FAIL, contract, str(found), {"difference": found.difference.data()}, reproduction)


def _compare_digits(
    baseline: Build, changed: Build, updates: Sequence[Update], contract: str, seed: int
) -> Verdict | None:
    """Returns a FAIL if a tensor is much further from float64 than the baseline's; None otherwise."""
    reference = Isolation(baseline, seed, float64=True)
    subjects = [Isolation(build, seed) for build in (baseline, changed)]
    states = saved(subjects[0].subject)
    for update in (replace(update, states=update.states or states, seed=seed) for update in updates):
        truth = next(Trajectory([update], seed, float64=True).updated(reference))
        errors = []
        for isolation in subjects:
            frame = next(Trajectory([update], seed).updated(isolation))
            errors.append((frame, _tensor_errors(truth, frame)))
        (_, own), (frame, candidate) = errors
        for location, error in candidate.items():
            allowed = max(_FEW_DIGITS, _FURTHER * own.get(location, math.inf))
            if error > allowed:
                difference = described(1, location, truth[location], frame[location])
                start = Trajectory([update], seed)
                reproduction = Reproduction(baseline, changed, start, 1, contract)
                summary = (
                    f"a tensor has fewer digits than the baseline's: it is off by {error:.1e} of its size, the "
                    f"baseline's by {own[location]:.1e}: update 1, slot 'step': '{location}'"
                )
                return Verdict(Outcome.FAIL, contract, summary, {"difference": difference.data()}, reproduction)
    return None


def _tensor_errors(truth: Frame, frame: Frame) -> dict[Location, float]:
    """Returns the Euclidean errors of gradients and outputs, each as a share of its own size."""
    errors: dict[Location, float] = {}
    for location, exact in truth.items():
        is_tensor = isinstance(exact, Tensor) and exact.is_floating_point() and exact.dim() > 0
        if location.kind == "state" or not is_tensor:
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
