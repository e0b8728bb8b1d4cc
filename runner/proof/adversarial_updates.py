"""Updates that an ordinary training rarely contains: repeated batches, reused memory, and
numbers at their ends.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof.algebra_check import perturb
from runner.proof.difference import (
    LOADED_TOLERANCE,
    TOLERANCE,
    Difference,
    compared_values,
    describe_first,
    differing,
    farthest,
    is_within_rounding,
    locate,
)
from runner.proof.isolation import Frame, Isolation, Location, StepError
from runner.proof.modes import Probabilities
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build, Subject
from runner.proof.subject_states import named_parameters, saved
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import (
    leaves,
    map_named,
    map_tensors,
    named_tensors,
    on_host,
    scaled,
    to_float64,
    with_first_row,
)
from runner.proof.verdict import Outcome, Verdict
from runner.system.errors import RunnerError
from runner.system.tensor_trees import as_float64, has_arithmetic

STALE = "with the same batch again and other parameters, "
_REUSED_MEMORY = "with another batch in the memory of the one before, "
_REUSED_OBJECTS = "with another batch in the objects of the one before, "
# Times as far from the truth as the baseline: luck does not explain more where numbers are large.
_FURTHER = 16
# Allowed error of an output there in the original precision, as a share, for any baseline.
_AT_ENDS = 0.001
# Share of its size by which the baseline is off where it has run out of digits.
_LOST = 0.01
# How near to an end its beginning is searched: a share, and the number of its powers.
_NEARER = 0.87
_STEPS = 50
# Factors of inputs and of a state: enough for a clamp.
_LARGER = 10
_GROWN = (10, 100)
_PERTURBATIONS = 4
"""Perturbed baselines that show what rounding changes at an end."""
# Number of tensors of a batch that get a NaN, one at a time.
_MOST_FAILING = 8
# Added to biases and other parameters of one dimension or none; to logarithms, too.
_MOVED = (-10, 3)


class AdversarialCase(NamedTuple):
    """An update that an ordinary training rarely contains.

    Attributes:
        name: Beginning of a verdict on it.
        update: The update.
    """

    name: str
    update: Update


def adversarial_cases(
    baseline: Build, batches: Sequence[Any], seed: int, float64: bool
) -> list[AdversarialCase]:
    """Returns updates with the last batch, the same object: also with another state; and with
    others in its memory and objects.

    Raises:
        StepError: The baseline fails in its first update, after which its state is loaded.
    """
    state = saved(_after_first_update(baseline, batches[:1], seed, float64).subject)
    last = batches[-1]
    cases = [
        AdversarialCase(STALE, Update(last)),
        AdversarialCase(STALE, Update(last, state)),
    ]
    if len(batches) > 1:
        in_memory = Update(batches[0], place=last)
        in_objects = Update(batches[1], place=last, in_memory=False)
        cases.append(AdversarialCase(_REUSED_MEMORY, in_memory))
        cases.append(AdversarialCase(_REUSED_OBJECTS, in_objects))
    return cases


def _after_first_update(
    baseline: Build, batches: Sequence[Any], seed: int, float64: bool
) -> Isolation:
    trajectory = Trajectory(batches, seed, float64)
    isolation = trajectory.isolated(baseline)
    next(trajectory.updated(isolation))
    return isolation


class _ExtremeInput(NamedTuple):
    """A batch and a state with extreme numbers.

    Attributes:
        name: Beginning of a verdict on it.
        batch: The batch.
        state: The state before the update.
    """

    name: str
    batch: Any
    state: Mapping[str, Any]


def compare_extreme_cases(
    baseline: Build, changed: Build, batch: Any, contract: str, seed: int, float64: bool
) -> Verdict:
    """Compares single updates in extreme cases that trainings rarely reach, if the baseline's
    numbers are finite there.

    Outputs and gradients are compared, up to rounding: state is not, because Adam divides the
    rounding of a gradient that has vanished by its epsilon; and bits are not, because the sign of a
    zero and the smallest numbers have no meaning. Outputs that are compared in float64 must be near
    that in their original precision, too, which may use other code: one that overflows only there
    may be right in trainings, and is INCONCLUSIVE.
    """
    try:
        trained = _after_first_update(baseline, [batch], seed, False)
    except StepError as error:
        return error.verdict(contract, baseline)
    start = Update(batch, saved(trained.subject), seed)
    comparison = _ExtremeComparison(
        baseline=baseline,
        changed=changed,
        contract=contract,
        start=start,
        reference=Isolation(baseline, seed, float64),
        candidate=Isolation(changed, seed, float64),
        trained=trained,
        rounded=Isolation(changed, seed) if float64 else None,
    )
    state = start.states or {}
    inputs = chain(_extremes(batch, state), _moved(batch, state, trained.subject))
    passed = Verdict(Outcome.PASS, contract, "the same at its ends")
    for extreme in inputs:
        verdict = comparison.verdict(extreme)
        if verdict is None:
            continue
        if verdict.outcome is Outcome.FAIL:
            return verdict
        passed = verdict
    return passed


@dataclass(frozen=True)
class _ExtremeComparison:
    """Compares two subjects in updates with extreme numbers.

    Attributes:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        contract: Name of the contract.
        start: An ordinary update.
        reference: A baseline, in float64 for ``Close``.
        candidate: The candidate in the same precision.
        trained: A baseline in its original precision.
        rounded: The candidate in its original precision, if the others are in float64.
    """

    baseline: Build
    changed: Build
    contract: str
    start: Update
    reference: Isolation
    candidate: Isolation
    trained: Isolation
    rounded: Isolation | None

    @property
    def _tolerance(self) -> float:
        return LOADED_TOLERANCE if self.candidate.float64 else TOLERANCE

    def verdict(self, extreme: _ExtremeInput) -> Verdict | None:
        """Returns FAIL or INCONCLUSIVE; None if the two are equal or cannot be compared."""
        update = replace(self.start, batch=extreme.batch, states=extreme.state)
        trajectory = Trajectory([update], update.seed or 0, self.candidate.float64)
        expected = trajectory.first_frame(self.reference)
        if expected is None or not _is_finite(expected):
            return None
        try:
            actual = next(trajectory.updated(self.candidate))
            compared = compared_values(expected, actual, ())
            rounding = self._rounding_difference(compared, trajectory)
        except (StepError, RunnerError) as error:
            summary = f"{extreme.name}the changed step raises {error}"
            return Verdict(Outcome.FAIL, self.contract, summary)
        criterion = partial(differing, tolerance=self._tolerance)
        locations = [*criterion(compared, actual)]
        difference = describe_first(1, expected, actual, locations)
        if difference is not None:
            if self._is_rounding(
                update, compared, actual, locations
            ) or self._is_stabilised(update):
                return None
            located = locate(trajectory, self.baseline, self.changed, 1, criterion)
            difference = located or difference
            kind = "algebra: in float64" if self.candidate.float64 else "numbers"
            message = f"{extreme.name}not the same {kind}, {difference}"
            return self._reproduction(trajectory).fail(message, difference)
        if rounding is None:
            return None
        if math.isinf(rounding.absolute) and not rounding.remark:
            reason = "it overflows in its original precision, unlike the baseline"
            summary = f"{extreme.name}{reason}: {rounding}"
            evidence = {"difference": rounding.data()}
            return Verdict(Outcome.INCONCLUSIVE, self.contract, summary, evidence)
        message = f"{extreme.name}rounds more than the baseline: {rounding}"
        trajectory = replace(trajectory, float64=False)
        return self._reproduction(trajectory).fail(message, rounding)

    def _is_rounding(
        self,
        update: Update,
        expected: Frame,
        actual: Frame,
        locations: Sequence[Location],
    ) -> bool:
        """Returns whether rounding alone takes the baseline about as far from itself.

        The outputs of a recurrent network with large weights are chaotic: they depend on the last
        bits of its parameters, and an optimizer may round these differently.
        """
        if not self.candidate.float64:
            return False
        # The baseline makes other updates below.
        unexplained = on_host({location: expected[location] for location in locations})
        # One perturbation may leave the decisive parameters as they are.
        for number in range(_PERTURBATIONS):
            states = map_tensors(
                partial(perturb, number=number), to_float64(update.states)
            )
            trajectory = Trajectory(
                [replace(update, states=states)], update.seed or 0, True
            )
            perturbed = trajectory.first_frame(self.reference) or {}
            unexplained = {
                location: value
                for location, value in unexplained.items()
                if not is_within_rounding(
                    location, value, perturbed.get(location), actual.get(location)
                )
            }
            if not unexplained:
                return True
        return False

    def _reproduction(self, trajectory: Trajectory) -> Reproduction:
        return Reproduction(self.baseline, self.changed, trajectory, 1, self.contract)

    def _rounding_difference(
        self, truth: Frame, trajectory: Trajectory
    ) -> Difference | None:
        """Returns a difference if the candidate has a larger error in its original precision
        than the baseline, beyond chance.
        """
        if self.rounded is None:
            return None
        trajectory = replace(trajectory, float64=False)
        # A count may round to another, and a gradient jumps where an activation has a corner.
        exact = {
            location: value
            for location, value in truth.items()
            if location.kind == "output" and _is_float64(value)
        }
        expected = trajectory.first_frame(self.trained)
        if expected is None or not _is_finite(expected):
            return None
        actual = next(trajectory.updated(self.rounded))
        tolerance = max(_AT_ENDS, _FURTHER * farthest(exact, expected))
        locations = differing(exact, actual, tolerance)
        return describe_first(1, expected, actual, locations)

    def _is_stabilised(self, end: Update) -> bool:
        """Returns whether the two differ at an end because the baseline has run out of digits there
        and the changed one has not.

        That is the case for a cross-entropy of a sigmoid: its logarithm ends where the
        sigmoid rounds to one, in float32 at 17 and in float64 at 37. Before its end in
        float64, both have the same values there, while in its original precision the
        baseline is far off and the changed one is right. For a limit that is part of the
        algebra, the baseline's precisions agree. torch's cross-entropy of probabilities has
        a limit in any precision, before which both must have the same values.
        """
        if self.rounded is None:
            return False
        saturated = _saturates(self.reference, _between(self.start, end, 1.0))
        for step in range(1, _STEPS):
            update = _between(self.start, end, _NEARER**step)
            if saturated and _saturates(self.reference, update):
                continue
            in_float64 = Trajectory([update], update.seed or 0, float64=True)
            truth = in_float64.first_frame(self.reference)
            actual = in_float64.first_frame(self.candidate)
            if truth is None or actual is None or not _is_finite(truth):
                continue
            compared = compared_values(truth, actual, ())
            is_different = any(differing(compared, actual, self._tolerance))
            if saturated:
                return not is_different
            if is_different:
                continue
            trajectory = Trajectory([update], update.seed or 0)
            expected = trajectory.first_frame(self.trained)
            rounded = trajectory.first_frame(self.rounded)
            lost = math.inf if expected is None else farthest(compared, expected)
            if lost > _LOST:
                return rounded is not None and farthest(compared, rounded) <= _AT_ENDS
        return False


def _is_float64(value: Any) -> bool:
    return getattr(value, "dtype", type(value)) in (torch.float64, float)


def _saturates(isolation: Isolation, update: Update) -> bool:
    """Returns whether a cross-entropy of probabilities has no digits left in an update."""
    trajectory = Trajectory([update], update.seed or 0, isolation.float64)
    probabilities = Probabilities()
    with probabilities:
        trajectory.first_frame(isolation)
    return probabilities.saturated


def _between(start: Update, end: Update, share: float) -> Update:
    """Returns an update between two others, which have the same batch and state with other
    numbers.
    """
    batch = _blend(start.batch, end.batch, share)
    return replace(start, batch=batch, states=_blend(start.states, end.states, share))


def _blend(start: Any, end: Any, share: float) -> Any:
    targets = named_tensors(end)

    def blend(name: str, tensor: Tensor) -> Tensor:
        if has_arithmetic(tensor) or tensor.is_complex():
            return tensor + share * (targets[name] - tensor)
        return tensor

    return map_named(blend, start)


def _extremes(batch: Any, state: Mapping[str, Any]) -> Iterator[_ExtremeInput]:
    """Yields a batch whose flags (a mask, an end) are all equal, or with other integers; larger
    numbers in it or in a state.
    """
    tensors = named_tensors(batch)
    flags = {name for name, tensor in tensors.items() if _is_flag(tensor)}
    if flags:
        for value in (0, 1):
            filled = map_named(partial(_filled, flags, value), batch)
            name = f"with every flag of the batch {value}, "
            yield _ExtremeInput(name, filled, state)
        # A mask that is nearly full may take another branch than a full one and that of a batch.
        nearly_full = map_named(partial(_all_but_one, flags), batch)
        name = "with every flag of the batch 1 but one, "
        yield _ExtremeInput(name, nearly_full, state)
    lengths = {len(tensor) for tensor in tensors.values() if tensor.dim()}
    integers = {
        name: _renumbered(tensor)
        for name, tensor in tensors.items()
        if name not in flags and _can_be_renumbered(lengths, tensor)
    }

    def enlarge(name: str, tensor: Tensor) -> Tensor:
        return tensor if name in flags else scaled(_LARGER, tensor)

    if integers:
        renumbered = map_named(integers.get, batch)
        yield _ExtremeInput("with other integers in the batch, ", renumbered, state)
    name = f"with a batch {_LARGER} times as large, "
    yield _ExtremeInput(name, map_named(enlarge, batch), state)
    for factor in _GROWN:
        name = f"with a state {factor} times as large, "
        yield _ExtremeInput(name, batch, scaled(factor, state))


def _moved(
    batch: Any, state: Mapping[str, Any], subject: Subject
) -> Iterator[_ExtremeInput]:
    """Yields states with other biases and single numbers, which are zero at the start
    of a training.
    """
    parameters = named_parameters(subject).values()
    addresses = {value.data_ptr() for value in parameters if value.dim() <= 1}
    # By name: the state of some optimizers (LBFGS) has grown since the copy was made.
    current = {name: state.state_dict() for name, state in subject.state.items()}
    current_leaves = dict(leaves(current))
    biases = set()
    for name in dict(leaves(state)):
        tensor = current_leaves.get(name)
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            continue
        if tensor.data_ptr() in addresses:
            biases.add(name)
    for distance in _MOVED:
        direction = "less" if distance < 0 else "more"
        name = f"with biases {abs(distance)} {direction}, "
        moved = map_named(partial(_added, biases, distance), state)
        yield _ExtremeInput(name, batch, moved)


def _added(
    biases: Container[str], distance: float, name: str, tensor: Tensor
) -> Tensor:
    return tensor + distance if name in biases else tensor


def _can_be_renumbered(lengths: Container[int], tensor: Tensor) -> bool:
    """Returns whether a tensor has integers whose order means nothing.

    A sorted tensor may contain starts of parts, and one that adds up to the length of another may
    contain lengths.
    """
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_quantized:
        return False
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        return False
    flat = tensor.reshape(-1)
    is_sorted = bool((flat[1:] >= flat[:-1]).all())
    return not is_sorted and int(flat.sum()) not in lengths


def _renumbered(tensor: Tensor) -> Tensor:
    """Returns every integer between the smallest and the largest, in random order."""
    flat = tensor.reshape(-1)
    least = int(flat.min())
    count = int(flat.max()) - least + 1
    integers = torch.arange(flat.numel(), device=tensor.device) % count + least
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(flat.numel(), generator=generator).to(tensor.device)
    return integers[order].to(tensor.dtype).reshape(tensor.shape)


def _filled(flags: Container[str], value: int, name: str, tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, value) if name in flags else tensor


def _all_but_one(flags: Container[str], name: str, tensor: Tensor) -> Tensor:
    if name not in flags:
        return tensor
    filled = torch.ones_like(tensor)
    filled.view(-1)[-1] = 0
    return filled


def _is_flag(tensor: Tensor) -> bool:
    values = as_float64(tensor)
    return values.numel() > 0 and bool(((values == 0) | (values == 1)).all())


def _is_finite(frame: Frame) -> bool:
    return all(
        bool(as_float64(value).isfinite().all())
        for value in frame.values()
        if isinstance(value, Tensor)
    )


def compare_hidden_numbers(
    baseline: Build, changed: Build, batch: Any, contract: str, seed: int
) -> Verdict:
    """Returns whether NaN or infinity in a batch reaches the changed state if it reaches the
    baseline's.

    One tensor has such a number at a time: NaN in a target would hide the effect of NaN in an
    input.
    """
    reference = Isolation(baseline, seed)
    candidate = Isolation(changed, seed)
    start = saved(reference.subject)
    for number, failing in _failing_batches(batch):
        trajectory = Trajectory([Update(failing, start, seed)], seed)
        expected = _state_stays_finite(reference, trajectory)
        actual = _state_stays_finite(candidate, trajectory)
        if actual and not expected:
            position = f"with {number} in the batch, update 1, slot 'step': 'state'"
            summary = f"{position} stays finite, which the baseline's does not"
            reason = f"{summary}: it hides what diverges, or skips it on purpose"
            return Verdict(Outcome.INCONCLUSIVE, contract, reason)
    summary = "numbers that are not finite are not hidden"
    return Verdict(Outcome.PASS, contract, summary)


def _state_stays_finite(isolation: Isolation, trajectory: Trajectory) -> bool:
    frame = trajectory.first_frame(isolation)
    if frame is None:
        return False
    state = {key: value for key, value in frame.items() if key.kind == "state"}
    return _is_finite(state)


def _failing_batches(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields batches with NaN or infinity in the first row of one of the first tensors.

    An update may crop other rows. A limit of a loss hides infinity and keeps NaN.
    """
    candidates = [
        name for name, tensor in named_tensors(batch).items() if _can_hold_nan(tensor)
    ]
    for description, number in (("NaN", math.nan), ("infinity", math.inf)):
        for name in candidates[:_MOST_FAILING]:
            yield description, with_first_row(batch, name, number)


def _can_hold_nan(tensor: Tensor) -> bool:
    if not has_arithmetic(tensor) or tensor.layout != torch.strided:
        return False
    return not _is_flag(tensor)
