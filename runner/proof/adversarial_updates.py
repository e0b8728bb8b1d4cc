"""Updates that an ordinary training rarely shows: the same again, memory used again, numbers at their ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof.difference import (
    LOADED_TOLERANCE,
    MISSING,
    TOLERANCE,
    Difference,
    as_float64,
    comparable,
    described,
    differing,
    farthest,
    locate,
)
from runner.proof.isolation import Frame, Isolation, StepError
from runner.proof.modes import Probabilities
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build, Subject
from runner.proof.subject_states import clones, leaves, named_parameters, saved
from runner.proof.trajectory import Trajectory, Update
from runner.proof.verdict import Outcome, Verdict
from runner.system.errors import RunnerError
from runner.system.tensor_trees import map_tensors

STALE = "with the same batch again and other parameters, "
_PLACE = "with another batch in the memory of the one before, "
_OBJECTS = "with another batch in the objects of the one before, "
_FURTHER = 16  # times as far from the truth as the baseline is what no luck explains, where numbers are large
# Allowed error of an output there in the original precision, as a share, for any baseline.
_AT_ENDS = 0.001
_LOST = 0.01  # share of its size by which the baseline is off where it has run out of digits
_NEARER, _STEPS = 0.87, 50  # how near to an end it is looked for: a share, and as many powers of it
_LARGER, _GROWN = 10, (10, 100)  # times, of inputs and of a state: enough for a clamp
_MOST_SPOILT = 8  # tensors of a batch that get a NaN, one at a time
_MOVED = (-10, 3)  # is added to biases and other parameters of one dimension or none; to logarithms, too


_Pair = tuple[Isolation, Isolation]
"""The baseline and the changed one."""


class Turn(NamedTuple):
    """An adversarial case."""

    name: str  # start of a verdict on it
    update: Update


def turns(baseline: Build, batches: Sequence[Any], seed: int, float64: bool) -> list[Turn]:
    """The last batch, the very same object: with another state, too; and others in its memory and objects.

    Raises ``StepError`` if the baseline fails in its first update, after which its state is loaded.
    """
    state, last = saved(_begun(baseline, batches[:1], seed, float64).subject), batches[-1]
    found = [Turn(STALE, Update(last)), Turn(STALE, Update(last, state))]
    if len(batches) > 1:
        found.append(Turn(_PLACE, Update(batches[0], place=last)))
        found.append(Turn(_OBJECTS, Update(batches[1], place=last, in_memory=False)))
    return found


def _begun(baseline: Build, batches: Sequence[Any], seed: int, float64: bool) -> Isolation:
    """The baseline after its first update."""
    first = Trajectory(batches, seed, float64)
    isolation = first.isolated(baseline)
    next(first.updated(isolation))
    return isolation


def ends(baseline: Build, changed: Build, batch: Any, contract: str, seed: int, float64: bool) -> Verdict:
    """Compares single updates in extreme cases that trainings rarely reach, if the baseline's
    numbers are finite there.

    Outputs and gradients are compared, up to rounding: state is not, because Adam divides the
    rounding of a gradient that has vanished by its epsilon; and bits are not, because the sign of a
    zero and the smallest numbers have no meaning. Outputs that are compared in float64 must be near
    that in their original precision, too, which may use other code: one that overflows only there
    may be right in trainings, and is INCONCLUSIVE.
    """
    try:
        begun = _begun(baseline, [batch], seed, False)
    except StepError as error:
        return error.verdict(contract, baseline)
    state = saved(begun.subject)
    one, other = (Isolation(build, seed, float64) for build in (baseline, changed))
    in_own_precision = Isolation(changed, seed) if float64 else None
    tolerance = LOADED_TOLERANCE if float64 else TOLERANCE
    passed = Verdict(Outcome.PASS, contract, "the same at its ends")
    for name, given, begin in chain(_ends(batch, state), _moved(batch, state, begun.subject)):
        end = Trajectory([Update(given, begin, seed)], seed, float64)
        own = _frame(one, end)
        if own is None or not _is_finite(own):
            continue
        try:
            theirs = next(end.updated(other))
            seen = {location: own[location] for location in comparable(own, theirs, ())}
            rounded = (
                _rounding(seen, replace(end, float64=False), begun, in_own_precision) if in_own_precision else None
            )
        except (StepError, RunnerError) as error:
            return Verdict(Outcome.FAIL, contract, f"{name}the changed step raises {error}")
        place = next(differing(seen, theirs, tolerance), None)
        if place is not None:
            between = partial(_between, Update(batch, state, seed), Update(given, begin, seed))
            if in_own_precision and _is_stabilised(between, (one, other), (begun, in_own_precision), tolerance):
                continue
            found = locate(end, baseline, changed, 1, partial(differing, tolerance=tolerance))
            found = found or described(1, place, own[place], theirs.get(place, MISSING))
            summary = f"{name}not the same {'algebra: in float64' if float64 else 'numbers'}, {found}"
            reproduction = Reproduction(baseline, changed, end, 1, contract)
            return Verdict(Outcome.FAIL, contract, summary, {"difference": found.data()}, reproduction)
        if rounded is not None and math.isinf(rounded.absolute) and not rounded.remark:
            summary = f"{name}it overflows in its original precision, unlike the baseline: {rounded}"
            passed = Verdict(Outcome.INCONCLUSIVE, contract, summary, {"difference": rounded.data()})
        elif rounded is not None:
            summary = f"{name}rounds more than the baseline: {rounded}"
            reproduction = Reproduction(baseline, changed, replace(end, float64=False), 1, contract)
            return Verdict(Outcome.FAIL, contract, summary, {"difference": rounded.data()}, reproduction)
    return passed


def _rounding(truth: Frame, end: Trajectory, one: Isolation, other: Isolation) -> Difference | None:
    """Returns a difference if the other one's update has a larger error in its original precision
    than the baseline's, beyond chance.
    """
    # A count may round to another, and a gradient jumps where an activation has a corner.
    outputs = ((place, value) for place, value in truth.items() if place.kind == "output")
    exact = {place: value for place, value in outputs if getattr(value, "dtype", type(value)) in (torch.float64, float)}
    own = _frame(one, end)
    if own is None or not _is_finite(own):
        return None
    theirs = next(end.updated(other))
    place = next(differing(exact, theirs, max(_AT_ENDS, _FURTHER * farthest(exact, own))), None)
    return None if place is None else described(1, place, own[place], theirs.get(place, MISSING))


def _is_stabilised(
    between: Callable[[float], Update], in_float64: _Pair, in_own_precision: _Pair, tolerance: float
) -> bool:
    """Returns whether the two differ at an end because the baseline has run out of digits there and
    the changed one has not.

    That is the case for a cross-entropy of a sigmoid: its logarithm ends where the
    sigmoid rounds to one, in float32 at 17 and in float64 at 37. Before its end in
    float64, both have the same values there, while in its original precision the
    baseline is far off and the changed one is right. For a limit that is part of the
    algebra, the baseline's precisions agree. torch's cross-entropy of probabilities has
    a limit in any precision, before which both must have the same values.
    """
    baseline, changed = in_float64
    saturated = _saturates(baseline, between(1.0))
    for step in range(1, _STEPS):
        update = between(_NEARER**step)
        if saturated and _saturates(baseline, update):
            continue
        truth = _frame(baseline, Trajectory([update], update.seed or 0, float64=True))
        theirs = _frame(changed, Trajectory([update], update.seed or 0, float64=True))
        if truth is None or theirs is None or not _is_finite(truth):
            continue
        seen = {location: truth[location] for location in comparable(truth, theirs, ())}
        if saturated:
            return not any(differing(seen, theirs, tolerance))
        if any(differing(seen, theirs, tolerance)):
            continue
        own, other = (_frame(each, Trajectory([update], update.seed or 0)) for each in in_own_precision)
        lost = math.inf if own is None else farthest(seen, own)
        if lost > _LOST:
            return other is not None and farthest(seen, other) <= _AT_ENDS
    return False


def _saturates(isolation: Isolation, update: Update) -> bool:
    """Returns whether a cross-entropy of probabilities has no digits left in an update."""
    probabilities = Probabilities()
    with probabilities:
        _frame(isolation, Trajectory([update], update.seed or 0, isolation.float64))
    return probabilities.saturated


def _between(start: Update, end: Update, share: float) -> Update:
    """An update on the way from one to another, which has the same batch and state with other numbers."""
    batch, states = (_blend(one, other, share) for one, other in ((start.batch, end.batch), (start.states, end.states)))
    return replace(start, batch=batch, states=states)


def _blend(one: Any, other: Any, share: float) -> Any:
    tensors: list[Tensor] = []
    map_tensors(lambda tensor: tensors.append(tensor) or tensor, other)  # type: ignore[func-returns-value]
    remaining = iter(tensors)

    def blend(tensor: Tensor) -> Tensor:
        target = next(remaining)
        return tensor + share * (target - tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor

    return map_tensors(blend, one)


def _ends(batch: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yields a batch whose flags (a mask, an end) are all equal, or with other integers; larger
    numbers in it or in a state.
    """
    flags = {id(each) for _, each in leaves(batch) if isinstance(each, Tensor) and _is_flag(each)}
    for value in (0, 1) if flags else ():
        yield f"with every flag of the batch {value}, ", map_tensors(partial(_filled, flags, value), batch), state
    if flags:
        # A mask that is nearly full may take another branch than a full one and that of a batch.
        yield "with every flag of the batch 1 but one, ", map_tensors(partial(_all_but_one, flags), batch), state
    lengths = {len(each) for _, each in leaves(batch) if isinstance(each, Tensor) and each.dim()}
    renumbered = partial(_renumbered, lengths)
    other = map_tensors(lambda tensor: tensor if id(tensor) in flags else renumbered(tensor), batch)
    if any(one is not own for (_, one), (_, own) in zip(leaves(other), leaves(batch), strict=True)):
        yield "with other integers in the batch, ", other, state
    larger = map_tensors(lambda tensor: tensor if id(tensor) in flags else _times(_LARGER, tensor), batch)
    yield f"with a batch {_LARGER} times as large, ", larger, state
    for times in _GROWN:
        yield f"with a state {times} times as large, ", batch, map_tensors(partial(_times, times), state)


def _moved(batch: Any, state: Mapping[str, Any], subject: Subject) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yields states with other biases and single numbers, which are zero at the start
    of a training.
    """
    addresses = {each.data_ptr() for each in named_parameters(subject).values() if each.dim() <= 1}
    # By name: the state of some optimizers (LBFGS) has grown since the copy was made.
    own = dict(leaves({name: part.state_dict() for name, part in subject.state.items()}))
    pairs = [(own.get(name), copy) for name, copy in leaves(state)]
    dense = ((one, copy) for one, copy in pairs if isinstance(one, Tensor) and one.layout == torch.strided)
    small = {id(copy) for one, copy in dense if one.data_ptr() in addresses}
    for by in _MOVED:
        added = partial(_added, small, by)
        yield f"with biases {abs(by)} {'less' if by < 0 else 'more'}, ", batch, map_tensors(added, state)


def _added(small: Container[int], by: float, tensor: Tensor) -> Tensor:
    return tensor + by if id(tensor) in small else tensor


def _times(factor: float, tensor: Tensor) -> Tensor:
    return tensor * factor if tensor.is_floating_point() else tensor


def _renumbered(lengths: Container[int], tensor: Tensor) -> Tensor:
    """Returns every integer between the smallest and the largest, in random order.

    A sorted tensor may contain starts of parts, and one that adds up to the length of another may
    contain lengths: these are unchanged.
    """
    numbers = tensor.layout == torch.strided and tensor.numel() and tensor.dtype != torch.bool
    if not numbers or tensor.is_floating_point() or tensor.is_complex():
        return tensor
    flat = tensor.reshape(-1)
    if bool((flat[1:] >= flat[:-1]).all()) or int(flat.sum()) in lengths:
        return tensor
    least, largest = int(flat.min()), int(flat.max())
    every = torch.arange(flat.numel(), device=tensor.device) % (largest - least + 1) + least
    order = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(0))
    return every[order.to(tensor.device)].to(tensor.dtype).reshape(tensor.shape)


def _filled(flags: Container[int], value: int, tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, value) if id(tensor) in flags else tensor


def _all_but_one(flags: Container[int], tensor: Tensor) -> Tensor:
    if id(tensor) not in flags:
        return tensor
    filled = torch.ones_like(tensor)
    filled.view(-1)[-1] = 0
    return filled


def _is_flag(tensor: Tensor) -> bool:
    values = as_float64(tensor)
    return values.numel() > 0 and bool(((values == 0) | (values == 1)).all())


def _frame(isolation: Isolation, trajectory: Trajectory) -> Frame | None:
    """Returns the visible values of a subject after an update; None if it raises."""
    try:
        return next(trajectory.updated(isolation))
    except (StepError, RunnerError):
        return None


def _is_finite(frame: Frame) -> bool:
    return all(bool(as_float64(value).isfinite().all()) for value in frame.values() if isinstance(value, Tensor))


def hidden(baseline: Build, changed: Build, batch: Any, contract: str, seed: int) -> Verdict:
    """Returns whether NaN or infinity in a batch reaches the changed state if it reaches the baseline's.

    One tensor has such a number at a time: NaN in a target would hide the effect of NaN in an input.
    """
    isolations = [Isolation(build, seed) for build in (baseline, changed)]
    start = saved(isolations[0].subject)
    for number, spoilt in _spoilt_batches(batch):
        trajectory = Trajectory([Update(spoilt, start, seed)], seed)
        stays = [_state_stays_finite(isolation, trajectory) for isolation in isolations]
        if stays == [False, True]:
            place = f"with {number} in the batch, update 1, slot 'step': 'state'"
            summary = f"{place} stays finite, which the baseline's does not"
            reason = f"{summary}: it hides what diverges, or skips it on purpose"
            return Verdict(Outcome.INCONCLUSIVE, contract, reason)
    return Verdict(Outcome.PASS, contract, "numbers that are not finite are not hidden")


def _state_stays_finite(isolation: Isolation, trajectory: Trajectory) -> bool:
    frame = _frame(isolation, trajectory)
    return frame is not None and _is_finite({place: value for place, value in frame.items() if place.kind == "state"})


def _spoilt_batches(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields batches with NaN or infinity in the first row of one of the first tensors.

    An update may crop other rows. A limit of a loss hides infinity and keeps NaN.
    """
    tensors = (leaf for _, leaf in leaves(batch, has_means=False) if isinstance(leaf, Tensor))
    candidates = [id(tensor) for tensor in tensors if _can_hold_nan(tensor)]
    for identity in candidates[:_MOST_SPOILT]:
        yield "NaN", map_tensors(partial(_spoil, identity, math.nan), batch)
    for identity in candidates[:_MOST_SPOILT]:
        yield "infinity", map_tensors(partial(_spoil, identity, math.inf), batch)


def _can_hold_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout == torch.strided and not _is_flag(tensor)


def _spoil(identity: int, number: float, tensor: Tensor) -> Tensor:
    """Returns a copy, with this number in the first row if the tensor is that object."""
    copy: Tensor = clones(tensor)
    if id(tensor) == identity:
        with torch.no_grad():
            (copy[:1] if copy.dim() else copy).fill_(number)
    return copy
