"""Compares timed updates with the baseline's, in windows of a few updates from a common state.

Identical float32 trainings diverge soon, so states after a long timing cannot be compared. A few
updates from the same state, with the same batches and seeds, show how far a correct change may be
from the baseline: as far as the baseline is from itself with other random numbers and with a state
that is rounded to 16 bits.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.plugin.contract import Contract, Statistical
from runner.proof.difference import digest
from runner.proof.subject_states import leaves
from runner.system.tensor_trees import map_tensors, tensors

UPDATES = 4
"""Updates of a window: few enough for rounding to stay small, enough to contain one that is skipped."""
ALLOWED = 0.1
"""Deviation of a change of state, as a share of it, that is never held against a candidate."""
TIMES = 4.0
"""How many times as far from the baseline as the baseline from itself a candidate may be."""
FEWEST_WINDOWS = 2
SHARE_OF_WINDOWS = 0.2
"""A fault counts if it is in two windows and in a fifth of them: a loss scaler skips an update now and then."""
ROUNDING = 2.0**-8
"""Largest relative change of a number that is rounded to bfloat16."""
_OWN_KINDS = (Tensor, nn.Parameter)

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


def observe(read_state: Callable[[], Any], steps: Iterable[Callable[[], Any]]) -> Window:
    """Makes updates, and returns what they did to the state and what they returned."""
    before = _floats(read_state())
    counters = _counters(read_state())
    previous = before
    idle: Counter[str] = Counter()
    returned: defaultdict[str, list[Tensor]] = defaultdict(list)
    digests = []
    kinds: set[str] = set()
    for step in steps:
        result = step()
        kinds.update(type(tensor).__name__ for tensor in tensors(result) if type(tensor) not in _OWN_KINDS)
        output = _floats(result)
        digests.append(b"".join(digest(value) for value in output.values()))
        for name, value in output.items():
            returned[name].append(value.double().flatten())
        current = _floats(read_state())
        idle.update(_idle_groups(previous, current))
        previous = current

    changes = {
        name: previous[name].double() - value.double()
        for name, value in before.items()
        if name in previous and previous[name].shape == value.shape
    }
    advanced = {name: value - counters[name] for name, value in _counters(read_state()).items() if name in counters}
    outputs = {name: torch.cat(values) for name, values in returned.items()}
    return Window(changes, dict(idle), advanced, outputs, digests, frozenset(kinds))


def _idle_groups(before: Numbers, after: Numbers) -> list[str]:
    is_idle: dict[str, bool] = {}
    for name, value in after.items():
        same = name in before and torch.equal(before[name], value)
        is_idle[group_of(name)] = is_idle.get(group_of(name), True) and same
    return [group for group, idle in is_idle.items() if idle]


def _floats(value: Any) -> Numbers:
    """Returns copies of the floating-point tensors, and of the numbers that are not
    settings, on the host.
    """
    found = {}
    for name, leaf in leaves(value):
        number = torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) and not _is_setting(name) else leaf
        if not isinstance(number, Tensor) or not (number.is_floating_point() or number.is_complex()):
            continue
        dense = number.detach().to_dense() if number.layout != torch.strided else number.detach()
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        found[name or "output"] = real.to("cpu", copy=True)
    return found


def _is_setting(name: str) -> bool:
    return "param_groups." in name


def _counters(value: Any) -> dict[str, float]:
    """Returns integers without a dimension: steps of an optimizer, batches of a normalization."""
    found = {}
    for name, leaf in leaves(value):
        if isinstance(leaf, bool) or _is_setting(name):
            continue
        is_scalar = isinstance(leaf, Tensor) and not leaf.dim() and not leaf.is_complex()
        if not is_scalar and not isinstance(leaf, int):
            continue
        number = float(leaf)
        if number.is_integer():
            found[name] = number
    return found


def group_of(name: str) -> str:
    """The group whose numbers are compared together: the last name, within a part of the state."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.rpartition('.')[2]}" if rest else first


def deviations(baseline: Window, candidate: Window) -> dict[str, float]:
    """Returns the deviations of changes and outputs from the baseline's, by group, as a
    share of the baseline's.
    """
    found = _relative(baseline.changes, candidate.changes, group_of)
    outputs = _relative(baseline.outputs, candidate.outputs, lambda name: name)
    return found | {f"output '{name}'": value for name, value in outputs.items()}


def _relative(baseline: Numbers, candidate: Numbers, key: Callable[[str], str]) -> dict[str, float]:
    errors: defaultdict[str, float] = defaultdict(float)
    sizes: defaultdict[str, float] = defaultdict(float)
    for name, value in baseline.items():
        if name in candidate and candidate[name].shape == value.shape:
            error = (candidate[name] - value).nan_to_num(posinf=math.inf, neginf=math.inf)
            errors[key(name)] = math.hypot(errors[key(name)], float(error.norm()))
            sizes[key(name)] = math.hypot(sizes[key(name)], float(value.norm()))
    return {group: errors[group] / size for group, size in sizes.items() if 0 < size < math.inf}


def covered(baseline: Window, candidate: Window) -> dict[str, float]:
    """Returns how far each group moved in the direction of the baseline, as a share of
    the baseline's distance.
    """
    dots: defaultdict[str, float] = defaultdict(float)
    sizes: defaultdict[str, float] = defaultdict(float)
    for name, value in baseline.changes.items():
        if name in candidate.changes and candidate.changes[name].shape == value.shape:
            dots[group_of(name)] += float((candidate.changes[name] * value).sum())
            sizes[group_of(name)] += float(value.square().sum())
    return {group: dots[group] / size for group, size in sizes.items() if size}


def rounded(state: Any, seed: int) -> Any:
    """A state whose numbers are off by up to a unit of 16 bits; those without a dimension stay."""
    generator = torch.Generator().manual_seed(seed)

    def perturb(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.dim() or tensor.layout != torch.strided:
            return tensor
        direction = 2 * torch.rand(tensor.shape, dtype=torch.float64, generator=generator) - 1
        return tensor * (1 + ROUNDING * direction).to(tensor)

    return map_tensors(perturb, state)


@dataclass
class Comparison:
    """Windows of a candidate and of the baseline, and the faults of the candidate's.

    Attributes:
        contract: What the candidate promises. A ``Statistical`` one may make other updates, but has
            to make as many.
        compares_numbers: Whether both start a window from the same state, so that numbers can be compared.
        pairs: The windows of the baseline and the candidate.
        yardsticks: The baseline's windows from its state rounded to 16 bits, with other random numbers.
    """

    contract: Contract
    compares_numbers: bool = True
    pairs: list[tuple[Window, Window]] = field(default_factory=list)
    yardsticks: list[tuple[Window, Window]] = field(default_factory=list)

    @property
    def updates(self) -> int:
        """Number of updates compared."""
        return sum(len(candidate.digests) for _, candidate in self.pairs)

    def add(self, baseline: Window, candidate: Window) -> None:
        """Adds a window of both."""
        self.pairs.append((baseline, candidate))

    def is_deviating(self, baseline: Window, candidate: Window) -> bool:
        """Returns whether the baseline has to be compared with itself before these two
        can be judged.
        """
        return self._compares and any(value > ALLOWED for value in deviations(baseline, candidate).values())

    def fault(self) -> str | None:
        """Returns how the candidate deviates, in plain words; None if it does the baseline's work."""
        return self._lazy() or self._skipped() or self._replayed() or (self._deviating() if self._compares else None)

    @property
    def _compares(self) -> bool:
        return self.compares_numbers and not isinstance(self.contract, Statistical)

    def _lazy(self) -> str | None:
        """Results of a class whose methods decide when they are computed."""
        kinds = {kind for baseline, candidate in self.pairs for kind in candidate.kinds - baseline.kinds}
        if not kinds:
            return None
        names = ", ".join(sorted(kinds))
        return f"updates return a {names} in place of a tensor, which may be computed only when it is read"

    def _skipped(self) -> str | None:
        windows: Counter[str] = Counter()
        idle: Counter[str] = Counter()
        behind: Counter[str] = Counter()
        for baseline, candidate in self.pairs:
            for group, count in candidate.idle.items():
                more = count - baseline.idle.get(group, 0)
                if more > 0 and _moves(baseline, group):
                    windows[group] += 1
                    idle[group] += more
            for name, advance in baseline.counts.items():
                if name in candidate.counts and candidate.counts[name] < advance:
                    behind[name] += 1
        if group := self._first_often(windows):
            return f"'{group}' did not change in {idle[group]} of {self.updates} updates in which the baseline's did"
        if name := self._first_often(behind):
            advanced = math.fsum(window.counts.get(name, 0.0) for _, window in self.pairs)
            expected = math.fsum(window.counts.get(name, 0.0) for window, _ in self.pairs)
            return f"the counter '{name}' advanced by {advanced:g}, the baseline's by {expected:g}"
        return None

    def _replayed(self) -> str | None:
        """Outputs that come again to the bit although the baseline's do not."""
        baseline = [value for window, _ in self.pairs for value in window.digests if value]
        candidate = [value for _, window in self.pairs for value in window.digests if value]
        repeated = (len(candidate) - len(set(candidate))) - (len(baseline) - len(set(baseline)))
        if repeated < max(FEWEST_WINDOWS, SHARE_OF_WINDOWS * len(candidate)):
            return None
        return f"{repeated} of {len(candidate)} updates returned the result of another one, which the baseline's do not"

    def _deviating(self) -> str | None:
        largest: defaultdict[str, float] = defaultdict(float)
        for pair in self.yardsticks:
            for group, value in deviations(*pair).items():
                largest[group] = max(largest[group], value)
        windows: Counter[str] = Counter()
        furthest: dict[str, float] = {}
        for pair in self.pairs:
            for group, value in deviations(*pair).items():
                if not value <= max(ALLOWED, TIMES * largest[group]):
                    windows[group] += 1
                    furthest[group] = max(value, furthest.get(group, 0.0))
        group = self._first_often(windows)
        if not group:
            return None
        if group.startswith("output "):
            what = f"{group} differs by {furthest[group]:.0%} of its size"
        else:
            shares = [covered(*pair).get(group, 0.0) for pair in self.pairs]
            share = sorted(shares)[len(shares) // 2]
            way = f"'{group}' covered {share:.2f} of the baseline's way"
            what = f"{way} and differed from it by up to {furthest[group]:.0%}"
        allowed = max(ALLOWED, TIMES * largest[group])
        return f"in {windows[group]} of {len(self.pairs)} comparisons {what}; rounding explains {allowed:.0%}"

    def _first_often(self, counts: Mapping[str, int]) -> str:
        """The name that is counted in most windows, if in enough of them; else an empty one."""
        fewest = max(FEWEST_WINDOWS, SHARE_OF_WINDOWS * len(self.pairs))
        often = [name for name, count in counts.items() if count >= fewest]
        return max(often, key=lambda name: counts[name], default="")


def _moves(window: Window, group: str) -> bool:
    return any(bool(change.any()) for name, change in window.changes.items() if group_of(name) == group)
