"""A subject with separate random generators and torch settings, which leaves the global
ones unchanged.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from runner.proof.subject import Build
from runner.proof.subject_states import (
    have_equal_leaves,
    leaves,
    load,
    named_parameters,
    on_host,
    saved,
    to_float64,
    widen,
)
from runner.proof.verdict import Outcome, Verdict
from runner.system import generators, torch_settings
from runner.system.errors import RunnerError

Kept = TypeVar("Kept")
_LOOK_BACK = 3  # steps after which what was returned is still looked at
STEP = "step"  # the slot that represents the entire update


class Location(NamedTuple):
    """The place where a value was observed."""

    slot: str
    kind: Literal["output", "gradient", "state"]
    name: str
    visit: int = 0  # how many times the slot had returned in this update before

    def __str__(self) -> str:
        return f"{self.name}.grad" if self.kind == "gradient" else self.name

    @property
    def call(self) -> tuple[str, int] | None:
        """Returns the slot and the number of its call; None for the entire update."""
        return None if self.slot == STEP else (self.slot, self.visit)


class _Given(NamedTuple):
    """A gradient as an optimizer was given it."""

    tensor: Tensor
    # Of the tensor while the copy is valid: some optimizers (Nesterov by ``foreach``) overwrite it.
    version: int
    kept: Tensor  # a copy


# The visible values of a subject after an update, in order; valid until the next one.
Frame = dict[Location, Any]


class StepError(Exception):
    """A subject's step, the loading of a state before it, or in float64 its making raised an exception: the cause."""

    def __init__(self, isolation: Isolation, cause: Exception) -> None:
        last = traceback.extract_tb(cause.__traceback__)[-1]
        first_line = str(cause).strip().partition("\n")[0]
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}, in {last.name}"
        super().__init__(f"{type(cause).__name__}: {first_line} ({where})")
        self.build, self.float64, self.update = isolation.build, isolation.float64, isolation.updates

    def verdict(self, contract: str, baseline: Build | None) -> Verdict:
        """Returns the verdict on a comparison with this error; raises it if the baseline has failed
        in its original precision.
        """
        who = "the baseline" if self.build is baseline else "the changed step"
        if self.float64:
            summary = f"the algebra cannot be compared: in float64 {who} raises {self}"
            return Verdict(Outcome.INCONCLUSIVE, contract, summary)
        if self.build is baseline:
            raise self
        return Verdict(Outcome.FAIL, contract, f"update {self.update}: {who} raises {self}", {"updates": self.update})


class Isolation:
    """A subject with its global state."""

    def __init__(
        self, build: Build, seed: int, float64: bool = False, watching: bool = False, as_trained: bool = False
    ) -> None:
        """Builds the subject with this seed, optionally in float64, or with observed slots.

        Compiled code draws what eager code draws, unless it is to draw as it does in a training.
        On a GPU, torch selects kernels that have the same result every time, where it has any.
        """
        if torch.cuda.is_available():
            gc.collect()  # the one before may hold the device's memory in a circle of references
        self.build, self.float64, self.updates = build, float64, 0
        self._own = generators.Globals()
        self._inside: dict[str, Any] = {}  # torch's settings when an optimizer made its last step
        self._before = self._own.random
        self._number = 0  # offset of the count of updates for the seed of an update
        self._given: dict[int, _Given] = {}  # in this update, by parameter and by gradient
        # Results of slots, at the start of the next frame, if they are requested.
        self.events: Frame | None = None
        self._visits: Counter[str] = Counter()
        self._returned: deque[list[tuple[str, Tensor, Tensor]]] = deque(maxlen=_LOOK_BACK)  # with copies, by each step
        self.autocasts: dict[str, int] = {}  # types to which autocast casts, with the update in which it did first
        self.overwritten: dict[str, int] = {}  # outputs that did not outlive the next step, with the step they were of
        with self._own.apart(), self._failing() if float64 else nullcontext():
            if not as_trained:
                torch_settings.inductor().fallback_random = True
            if torch.cuda.is_available():
                torch_settings.prefer_deterministic_kernels()
            generators.seed(seed)
            if float64:
                torch.set_default_dtype(torch.float64)
            self.subject = build()
            if float64:
                widen(self.subject)
            # Parameters that no finite gradient other than zero has reached so far, with the reason.
            self.untrained = dict.fromkeys(named_parameters(self.subject), "receives no gradient")
            if watching and self.subject.watch is not None:
                self.subject.watch(torch.compiler.disable(self._report))  # type: ignore[no-untyped-call]

    def initial(self) -> Frame:
        """The state as it is, before the first update or between two."""
        with self._own.apart():
            return self._state(STEP)

    def advance(self, batches: Iterable[Any], keep: Callable[[Any], Kept]) -> list[Kept]:
        """Makes an update with each batch, and records a part of its result: much less
        than ``step`` observes.
        """
        kept = []
        with self._own.apart(), self._failing(), self._autocast():
            for batch in batches:
                self.updates += 1
                if self.subject.seed is not None:
                    self.subject.seed(self._number + self.updates)
                kept.append(keep(self.subject.step(batch)))
        return kept

    def step(self, batch: Any) -> Frame:
        """Makes one update with this batch, without a copy."""
        self.updates += 1
        self._visits.clear()
        self._given.clear()
        with self._own.apart(), self._failing():
            if self.subject.seed is not None:
                self.subject.seed(self._number + self.updates)
            self._before = generators.state_dict()
            # Many a loop forgets its gradients before it ends, and some optimizers write over them.
            with (
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
                self._autocast(),
            ):
                output = self.subject.step(batch)
            self._look_back(output)
            observed, self.events = self.events or {}, None
            frame = self._frame(STEP, 0, output)
            for location, gradient in frame.items():
                if location.kind == "gradient" and location.name in self.untrained:
                    if not bool(gradient.isfinite().all()):
                        self.untrained[location.name] = "receives a gradient that is not finite"
                    elif not bool(gradient.any()):
                        self.untrained[location.name] = "receives a gradient of zeros alone"
                    else:
                        del self.untrained[location.name]
            return observed | frame

    @property
    def settings(self) -> Mapping[str, Any]:
        """Returns torch's settings during the last step of the optimizer, or after the update if
        there was none.
        """
        return self._inside or self._own.settings

    def load(self, states: Mapping[str, Any], seed: int | None = None) -> None:
        """Loads another state, and new seeds if one is given."""
        with self._own.apart(), self._failing():
            load(self.subject, to_float64(states) if self.float64 else states)  # optimizers widen no complex numbers
            if seed is not None:
                generators.seed(seed)
                self._number = seed - self.updates

    def sizes(self) -> dict[str, float]:
        """The Euclidean size of every trainable parameter."""
        return {name: float(each.detach().norm()) for name, each in named_parameters(self.subject).items()}

    def moved(self, states: Mapping[str, Any], direction: Mapping[str, Tensor], distance: float) -> dict[str, Any]:
        """Returns these states with parameters that are moved by a distance in a
        direction; loads them meanwhile.
        """
        self.load(states)
        with self._own.apart(), torch.no_grad():
            for name, parameter in named_parameters(self.subject).items():
                if name in direction:
                    parameter.add_(direction[name].to(parameter.device, parameter.dtype), alpha=distance)
            return saved(self.subject)

    def draws_as(self, other: Isolation) -> bool:
        """Returns whether both can have drawn the same in their last step: as many numbers on the
        host, and none on a GPU.
        """
        mine, own_gpus = self._own.random, self._own.random["cuda"]
        return have_equal_leaves(mine, other._own.random) and have_equal_leaves(self._before["cuda"], own_gpus)

    @property
    def drew(self) -> bool:
        """Returns whether its last step has drawn from the global generators."""
        return not have_equal_leaves(self._before, self._own.random)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Exceptions of a subject become one kind; too little memory, and what has a message for the user, stay."""
        try:
            yield
        except (RunnerError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise StepError(self, error) from error

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """Records the types to which autocast casts inside the ``with``, which are
        invisible in float64.
        """
        enter = torch.autocast.__enter__

        def noted(autocast: torch.autocast) -> Any:
            if autocast._enabled:
                self.autocasts.setdefault(str(autocast.fast_dtype), self.updates)
            return enter(autocast)  # type: ignore[no-untyped-call]

        torch.autocast.__enter__ = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]

    def _look_back(self, output: Any) -> None:
        """Looks whether what the last steps have returned is still what it was."""
        for age, returned in enumerate(reversed(self._returned), start=1):
            for name, tensor, kept in returned:
                if not torch.allclose(tensor.detach().to_dense(), kept, rtol=0.0, atol=0.0, equal_nan=True):
                    self.overwritten.setdefault(name, self.updates - age)
        tensors = (
            (path or "output", value) for path, value in leaves(output, has_means=False) if isinstance(value, Tensor)
        )
        self._returned.append([(path, tensor, tensor.detach().to_dense().clone()) for path, tensor in tensors])

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_capturing():
            return
        self._inside = torch_settings.read()
        for parameter in _parameters(optimizer):
            if (gradient := parameter.grad) is not None:
                given = _Given(gradient, gradient._version, gradient.detach().clone())
                self._given[id(parameter)] = self._given[id(gradient)] = given

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_capturing():
            return
        unscales = getattr(optimizer, "grad_scale", None) is not None  # and writes over what it was given
        for parameter in _parameters(optimizer):
            if given := self._given.get(id(parameter)):
                kept = given.tensor.detach().clone() if unscales else given.kept
                given = given._replace(version=given.tensor._version, kept=kept)
                self._given[id(parameter)] = self._given[id(given.tensor)] = given

    def _report(self, slot: str, output: Any) -> None:
        if self.events is None or _is_capturing():
            return
        frame = self._frame(slot, self._visits[slot], output)
        self._visits[slot] += 1
        self.events |= on_host(frame)

    def _frame(self, slot: str, visit: int, output: Any) -> Frame:
        """Returns the numbers and tensors of a result, with gradients and state; None is
        ignored.
        """
        outputs = output_frame(output, slot, visit)
        if self.subject.gradients is not None:
            found = dict(self.subject.gradients())
        else:
            found = {
                name: given.kept if each.grad is None and (given := self._given.get(id(each))) else each.grad
                for name, each in named_parameters(self.subject).items()
            }
        known = [(name, self._as_given(each)) for name, each in found.items() if each is not None]
        gradients = {Location(slot, "gradient", name, visit): each for name, each in known}
        return outputs | gradients | self._state(slot, visit)

    def _as_given(self, gradient: Tensor) -> Tensor:
        """A gradient, dense, as its optimizer was given it."""
        given = self._given.get(id(gradient))
        if given is not None and gradient._version == given.version:
            gradient = given.kept
        return gradient.to_dense() if gradient.layout != torch.strided else gradient

    def _state(self, slot: str, visit: int = 0) -> Frame:
        return {
            Location(slot, "state", path, visit): value
            for name, part in self.subject.state.items()
            for path, value in leaves(part.state_dict(), name)
        }


def output_frame(output: Any, slot: str = STEP, visit: int = 0) -> Frame:
    """Returns the numbers and tensors that a slot has returned; None is ignored."""
    values = [(path or "output", value) for path, value in leaves(output) if value is not None]
    return {Location(slot, "output", path, visit): value for path, value in values}


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
