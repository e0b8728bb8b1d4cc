"""Compares timed updates with the baseline's, in windows of a few updates from a common state.

Identical float32 trainings diverge soon, so states after a long timing cannot be compared. A few
updates from the same state, with the same batches and seeds, show how far a correct change may be
from the baseline: as far as the baseline is from itself with other random numbers and with a state
that is rounded to 16 bits.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.plugin.contract import Contract, Statistical
from runner.proof.difference import digest
from runner.proof.trees import leaves, map_tensors
from runner.system.tensor_trees import has_arithmetic, tensors

UPDATES = 4
"""Updates of a window: few enough for rounding to stay small, enough to contain one that is
skipped.
"""
ALLOWED = 0.1
"""Deviation of a change of state, as a share of it, that is never held against a candidate."""
TIMES = 4.0
"""How many times as far from the baseline as the baseline from itself a candidate may be."""
FEWEST_WINDOWS = 2
SHARE_OF_WINDOWS = 0.2
"""A fault counts if it is in two windows and in a fifth of them: a loss scaler skips an update
now and then.
"""
ROUNDING = 2.0**-8
"""Largest relative change of a number that is rounded to bfloat16."""
_TORCH_CLASSES = (Tensor, nn.Parameter)

Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Window:
    """The effects of a few consecutive updates.

    Attributes:
        changes: Difference of the floating-point state after and before, by name, in float64.
        idle: In how many updates no number of a group changed, by group.
        counts: By how much every counter of the state advanced, by name.
        outputs: The numbers that each update returned, by name.
        digests: Fingerprint of the numbers that each update returned.
        kinds: Classes of the tensors that updates returned, other than torch's own.
    """

    changes: Numbers
    idle: dict[str, int]
    counts: dict[str, float]
    outputs: Numbers
    digests: list[bytes]
    kinds: frozenset[str] = frozenset()


def observe(
    read_state: Callable[[], Any], steps: Iterable[Callable[[], Any]]
) -> Window:
    """Makes updates, and returns what they did to the state and what they returned."""
    initial = _floats(read_state())
    initial_counters = _counters(read_state())
    previous = initial
    idle: Counter[str] = Counter()
    returned: defaultdict[str, list[Tensor]] = defaultdict(list)
    digests = []
    kinds: set[str] = set()
    for step in steps:
        result = step()
        classes = [type(tensor) for tensor in tensors(result)]
        kinds.update(kind.__name__ for kind in classes if kind not in _TORCH_CLASSES)
        output = _floats(result)
        digests.append(b"".join(digest(value) for value in output.values()))
        for name, value in output.items():
            returned[name].append(value.double().flatten())
        # Each update is observed, because a skipped one is hidden in the sum of all.
        current = _floats(read_state())
        idle.update(_idle_groups(previous, current))
        previous = current

    changes = {
        name: previous[name].double() - value.double()
        for name, value in initial.items()
        if name in previous and previous[name].shape == value.shape
    }
    counts = {
        name: value - initial_counters[name]
        for name, value in _counters(read_state()).items()
        if name in initial_counters
    }
    outputs = {name: torch.cat(values) for name, values in returned.items()}
    return Window(changes, dict(idle), counts, outputs, digests, frozenset(kinds))


def _idle_groups(before: Numbers, after: Numbers) -> list[str]:
    is_idle: dict[str, bool] = {}
    for name, value in after.items():
        group = group_of(name)
        is_same = name in before and torch.equal(before[name], value)
        is_idle[group] = is_idle.get(group, True) and is_same
    return [group for group, idle in is_idle.items() if idle]


def _floats(value: Any) -> Numbers:
    """Returns copies of the floating-point tensors, and of the numbers that are not
    settings, on the host.
    """
    numbers = {}
    for name, leaf in leaves(value):
        number = leaf
        if isinstance(leaf, float) and not _is_setting(name):
            number = torch.tensor(leaf, dtype=torch.float64)
        if not isinstance(number, Tensor):
            continue
        if not (number.is_floating_point() or number.is_complex()):
            continue
        number = number.detach()
        if number.layout != torch.strided:
            number = number.to_dense()
        if number.is_complex():
            number = torch.view_as_real(number.resolve_conj())
        numbers[name or "output"] = number.to("cpu", copy=True)
    return numbers


def _is_setting(name: str) -> bool:
    return "param_groups." in name


def _counters(value: Any) -> dict[str, float]:
    """Returns integers without a dimension: steps of an optimizer, batches of a normalization."""
    counters = {}
    for name, leaf in leaves(value):
        if isinstance(leaf, bool) or _is_setting(name):
            continue
        if isinstance(leaf, Tensor):
            is_counter = not leaf.dim() and not leaf.is_complex()
        else:
            is_counter = isinstance(leaf, int)
        if not is_counter:
            continue
        number = float(leaf)
        if number.is_integer():
            counters[name] = number
    return counters


def group_of(name: str) -> str:
    """Returns the group whose numbers are compared together: the last name, within a part of the
    state.
    """
    first, _, path = name.partition(".")
    return f"{first}.{path.rpartition('.')[2]}" if path else first


def deviations(baseline: Window, candidate: Window) -> dict[str, float]:
    """Returns the deviations of changes and outputs from the baseline's, by group, as a
    share of the baseline's.
    """
    changes = _relative(baseline.changes, candidate.changes, group_of)
    outputs = _relative(baseline.outputs, candidate.outputs, lambda name: name)
    return changes | {f"output '{name}'": value for name, value in outputs.items()}


def _relative(
    baseline: Numbers, candidate: Numbers, key: Callable[[str], str]
) -> dict[str, float]:
    errors: defaultdict[str, float] = defaultdict(float)
    sizes: defaultdict[str, float] = defaultdict(float)
    for name, expected in baseline.items():
        actual = candidate.get(name)
        if actual is None or actual.shape != expected.shape:
            continue
        group = key(name)
        error = (actual - expected).nan_to_num(posinf=math.inf, neginf=math.inf)
        errors[group] = math.hypot(errors[group], float(error.norm()))
        sizes[group] = math.hypot(sizes[group], float(expected.norm()))
    return {
        group: errors[group] / size
        for group, size in sizes.items()
        if 0 < size < math.inf
    }


def covered(baseline: Window, candidate: Window) -> dict[str, float]:
    """Returns how far each group moved in the direction of the baseline, as a share of
    the baseline's distance.
    """
    dots: defaultdict[str, float] = defaultdict(float)
    sizes: defaultdict[str, float] = defaultdict(float)
    for name, expected in baseline.changes.items():
        actual = candidate.changes.get(name)
        if actual is None or actual.shape != expected.shape:
            continue
        group = group_of(name)
        dots[group] += float((actual * expected).sum())
        sizes[group] += float(expected.square().sum())
    return {group: dots[group] / size for group, size in sizes.items() if size}


def rounded(state: Any, seed: int) -> Any:
    """Returns a state whose numbers are off by up to a unit of 16 bits; those without a
    dimension are unchanged.
    """
    generator = torch.Generator().manual_seed(seed)

    def perturb(tensor: Tensor) -> Tensor:
        is_dense = has_arithmetic(tensor) and tensor.layout == torch.strided
        if not is_dense or not tensor.dim():
            return tensor
        shares = torch.rand(tensor.shape, dtype=torch.float64, generator=generator)
        return tensor * (1 + ROUNDING * (2 * shares - 1)).to(tensor)

    return map_tensors(perturb, state)


@dataclass
class Comparison:
    """Windows of a candidate and of the baseline, and the faults of the candidate's.

    Attributes:
        contract: What the candidate promises. A ``Statistical`` one may make other updates, but has
            to make as many.
        compares_numbers: Whether both start a window from the same state, so that numbers can be
            compared.
        pairs: The windows of the baseline and the candidate.
        yardsticks: The baseline's windows from its state rounded to 16 bits, with other random
            numbers.
    """

    contract: Contract
    compares_numbers: bool = True
    pairs: list[tuple[Window, Window]] = field(default_factory=list)
    yardsticks: list[tuple[Window, Window]] = field(default_factory=list)

    @property
    def updates(self) -> int:
        """Returns the number of updates compared."""
        return sum(len(candidate.digests) for _, candidate in self.pairs)

    def add(self, baseline: Window, candidate: Window) -> None:
        """Adds a window of both."""
        self.pairs.append((baseline, candidate))

    def is_deviating(self, baseline: Window, candidate: Window) -> bool:
        """Returns whether the baseline has to be compared with itself before these two
        can be judged.
        """
        if not self._compares:
            return False
        values = deviations(baseline, candidate).values()
        return any(value > ALLOWED for value in values)

    def fault(self) -> str | None:
        """Returns how the candidate deviates; None if it does the baseline's work."""
        fault = self._lazy() or self._skipped() or self._replayed()
        if fault is None and self._compares:
            return self._deviating()
        return fault

    @property
    def _compares(self) -> bool:
        return self.compares_numbers and not isinstance(self.contract, Statistical)

    def _lazy(self) -> str | None:
        """Returns a message about results of a class that decides when they are computed."""
        kinds: set[str] = set()
        for baseline, candidate in self.pairs:
            kinds |= candidate.kinds - baseline.kinds
        if not kinds:
            return None
        names = ", ".join(sorted(kinds))
        reason = "which may be computed only when it is read"
        return f"updates return a {names} in place of a tensor, {reason}"

    def _skipped(self) -> str | None:
        windows: Counter[str] = Counter()
        idle: Counter[str] = Counter()
        behind: Counter[str] = Counter()
        for baseline, candidate in self.pairs:
            for group, count in candidate.idle.items():
                # A loss scaler of the baseline skips updates, too.
                more = count - baseline.idle.get(group, 0)
                if more > 0 and _moves(baseline, group):
                    windows[group] += 1
                    idle[group] += more
            for name, advance in baseline.counts.items():
                if name in candidate.counts and candidate.counts[name] < advance:
                    behind[name] += 1
        group = self._first_often(windows)
        if group:
            updates = f"{idle[group]} of {self.updates} updates"
            return f"'{group}' did not change in {updates} in which the baseline's did"
        name = self._first_often(behind)
        if name:
            actual = math.fsum(window.counts.get(name, 0.0) for _, window in self.pairs)
            expected = math.fsum(
                window.counts.get(name, 0.0) for window, _ in self.pairs
            )
            figures = f"advanced by {actual:g}, the baseline's by {expected:g}"
            return f"the counter '{name}' {figures}"
        return None

    def _replayed(self) -> str | None:
        """Returns a message about outputs with the bits of another one, although the baseline's
        all differ.
        """
        baseline = [
            value for window, _ in self.pairs for value in window.digests if value
        ]
        candidate = [
            value for _, window in self.pairs for value in window.digests if value
        ]
        # Some outputs are constant in the baseline, too.
        repeated = _count_repeated(candidate) - _count_repeated(baseline)
        if repeated < max(FEWEST_WINDOWS, SHARE_OF_WINDOWS * len(candidate)):
            return None
        count = f"{repeated} of {len(candidate)} updates"
        return (
            f"{count} returned the result of another one, which the baseline's do not"
        )

    def _deviating(self) -> str | None:
        largest: defaultdict[str, float] = defaultdict(float)
        for pair in self.yardsticks:
            for group, value in deviations(*pair).items():
                largest[group] = max(largest[group], value)
        windows: Counter[str] = Counter()
        furthest: dict[str, float] = {}
        for pair in self.pairs:
            for group, value in deviations(*pair).items():
                # The condition is negated so that NaN counts as a deviation.
                if not value <= max(ALLOWED, TIMES * largest[group]):
                    windows[group] += 1
                    furthest[group] = max(value, furthest.get(group, 0.0))
        group = self._first_often(windows)
        if not group:
            return None
        if group.startswith("output "):
            deviation = f"{group} differs by {furthest[group]:.0%} of its size"
        else:
            shares = [covered(*pair).get(group, 0.0) for pair in self.pairs]
            share = sorted(shares)[len(shares) // 2]
            distance = f"'{group}' covered {share:.2f} of the baseline's way"
            deviation = (
                f"{distance} and differed from it by up to {furthest[group]:.0%}"
            )
        count = f"{windows[group]} of {len(self.pairs)} comparisons"
        allowed = max(ALLOWED, TIMES * largest[group])
        return f"in {count} {deviation}; rounding explains {allowed:.0%}"

    def _first_often(self, counts: Mapping[str, int]) -> str:
        """Returns the name that is counted in most windows, if in enough of them; else an empty
        one.
        """
        fewest = max(FEWEST_WINDOWS, SHARE_OF_WINDOWS * len(self.pairs))
        often = [name for name, count in counts.items() if count >= fewest]
        return max(often, key=lambda name: counts[name], default="")


def _count_repeated(digests: Sequence[bytes]) -> int:
    return len(digests) - len(set(digests))


def _moves(window: Window, group: str) -> bool:
    return any(
        bool(change.any())
        for name, change in window.changes.items()
        if group_of(name) == group
    )
