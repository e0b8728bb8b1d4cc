"""A subject that lives apart: it has random generators and torch settings of its own, and leaves the others alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from runner.compare.state import leaves, load, named_parameters
from runner.compare.subject import Build
from runner.system import generators
from runner.system.errors import RunnerError

STEP = "step"
"""The slot that stands for the whole update."""


class Location(NamedTuple):
    """Where a value was seen."""

    slot: str
    kind: Literal["output", "gradient", "state"]
    name: str
    visit: int = 0
    """How many times the slot had returned in this update before."""

    def __str__(self) -> str:
        return f"{self.name}.grad" if self.kind == "gradient" else self.name


class _Gradient(NamedTuple):
    """A gradient that an optimizer was given."""

    tensor: Tensor
    version: int
    kept: Tensor
    """A copy."""


Frame = dict[Location, Any]
"""What can be seen of a subject after an update, in order; the tensors are its own until the next one."""


class StepError(Exception):
    """A subject's step, or the loading of a state before it, raised an exception, which is the cause."""

    def __init__(self, isolation: Isolation) -> None:
        super().__init__(isolation.updates)
        self.isolation, self.update = isolation, isolation.updates

    def __str__(self) -> str:
        cause = self.__cause__
        assert cause is not None
        last = traceback.extract_tb(cause.__traceback__)[-1]
        text = str(cause).strip().splitlines()
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}, in {last.name}"
        return f"{type(cause).__name__}: {text[0] if text else ''} ({where})"


class Isolation:
    """One subject, and all that is global to it."""

    def __init__(self, build: Build, seed: int, dtype: torch.dtype | None = None, watching: bool = False) -> None:
        """Builds the subject.

        Args:
            build: makes it.
            seed: of the global generators, before it is built.
            dtype: the default floating-point type that it is built and stepped under; the present one unless told.
            watching: whether its slots are to tell what they return.
        """
        self.updates = 0
        self.untrained: dict[str, str] = {}
        """Parameters that no finite gradient other than zero has reached so far, with the reason."""
        self._own = Globals.current()
        self._before = self._own.random
        self._number = 0
        """What is added to the count of updates for the number that seeds one."""
        self._given: dict[int, _Gradient] = {}
        """What optimizers were given in this update, by parameter."""
        self._used_up: dict[int, _Gradient] = {}
        """Those that an optimizer has written over (``foreach`` with Nesterov), by gradient, as it left them."""
        self._events: Frame | None = None
        self._visits: dict[str, int] = {}
        with self._alone():
            if dtype is not None:
                torch.set_default_dtype(dtype)
            _inductor().fallback_random = True  # compiled code draws what eager code draws
            generators.seed(seed)
            self.subject = build()
            self.untrained = dict.fromkeys(named_parameters(self.subject), "receives no gradient")
            if watching and self.subject.watch is not None:
                self.subject.watch(torch.compiler.disable(self._report))  # type: ignore[no-untyped-call]

    def initial(self) -> Frame:
        """The state before the first update."""
        with self._alone():
            return self._state(STEP)

    def step(self, batch: Any, watching: bool = False) -> Frame:
        """One update.

        Args:
            batch: the very one that the subject gets.
            watching: whether the frame begins with what its slots returned; these values are copies on the host.

        Raises:
            StepError: the subject failed.
        """
        self.updates += 1
        self._events, self._visits = ({} if watching else None), {}
        with self._alone(), _caught(self):
            if self.subject.seed is not None:
                self.subject.seed(self._number + self.updates)
            self._before = generators.state_dict()
            with self._gradients_remembered():
                output = self.subject.step(batch)
            observed, self._events = self._events or {}, None
            gradients = self._gradients(STEP)
            self._look_at(gradients)
            return observed | _outputs(STEP, 0, output) | gradients | self._state(STEP)

    def load(self, states: Mapping[str, Any], seed: int | None = None) -> None:
        """Gives the subject another state, and new seeds if told.

        Raises:
            StepError: it cannot take it.
        """
        with self._alone(), _caught(self):
            load(self.subject, states)
            if seed is not None:
                generators.seed(seed)
                self._number = seed - self.updates

    @property
    def draws(self) -> bool:
        """Whether the last step drew numbers from the global random generators."""
        pairs = zip(leaves(self._before), leaves(self._own.random), strict=True)
        return any(
            not torch.equal(one, other) if isinstance(one, Tensor) else one != other for (_, one), (_, other) in pairs
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        outside = Globals.current()
        self._own.set()
        try:
            yield
        finally:
            self._own = Globals.current()
            outside.set()

    @contextmanager
    def _gradients_remembered(self) -> Iterator[None]:
        """Keeps what optimizers are given: many a loop forgets it before it ends, and some optimizers write over it."""
        self._given.clear()
        self._used_up.clear()
        hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_capturing():
            return
        for parameter in _parameters(optimizer):
            if (gradient := parameter.grad) is not None:
                self._given[id(parameter)] = _Gradient(gradient, gradient._version, gradient.detach().clone())

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_capturing() or getattr(optimizer, "grad_scale", None) is not None:  # it was to unscale them
            return
        for parameter in _parameters(optimizer):
            given = self._given.get(id(parameter))
            if given is not None and given.tensor._version != given.version:
                self._used_up[id(given.tensor)] = given._replace(version=given.tensor._version)

    def _gradients(self, slot: str, visit: int = 0) -> Frame:
        if self.subject.gradients is not None:
            found = dict(self.subject.gradients())
        else:
            found = {
                name: given.kept if (given := self._given.get(id(each))) and each.grad is None else each.grad
                for name, each in named_parameters(self.subject).items()
            }
        return {
            Location(slot, "gradient", name, visit): self._as_given(each)
            for name, each in found.items()
            if each is not None
        }

    def _as_given(self, gradient: Tensor) -> Tensor:
        """A gradient, dense, as its optimizer was given it."""
        used_up = self._used_up.get(id(gradient))
        if used_up is not None and gradient._version == used_up.version:
            gradient = used_up.kept
        return gradient.to_dense() if gradient.layout != torch.strided else gradient

    def _look_at(self, gradients: Frame) -> None:
        for location, gradient in gradients.items():
            if location.name in self.untrained:
                if not bool(gradient.isfinite().all()):
                    self.untrained[location.name] = "receives a gradient that is not finite"
                elif not bool(gradient.any()):
                    self.untrained[location.name] = "receives a gradient of zeros alone"
                else:
                    del self.untrained[location.name]

    def _state(self, slot: str, visit: int = 0) -> Frame:
        return {
            Location(slot, "state", path, visit): value
            for name, part in self.subject.state.items()
            for path, value in leaves(part.state_dict(), name)
        }

    def _report(self, slot: str, output: Any) -> None:
        if self._events is None or _is_capturing():
            return
        visit = self._visits.get(slot, 0)
        self._visits[slot] = visit + 1
        seen = _outputs(slot, visit, output) | self._gradients(slot, visit) | self._state(slot, visit)
        self._events |= {location: _on_host(value) for location, value in seen.items()}


def _outputs(slot: str, visit: int, output: Any) -> Frame:
    """Numbers and tensors that a step returned; a None among them is no output."""
    found = leaves(output) if output is not None else ()
    return {Location(slot, "output", path or "output", visit): value for path, value in found if value is not None}


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


@contextmanager
def _caught(isolation: Isolation) -> Iterator[None]:
    """Exceptions of a subject become one kind; too little memory, and what has a message for the user, stay."""
    try:
        yield
    except (RunnerError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StepError(isolation) from error


class Globals:
    """Random generators and settings that belong to the whole process."""

    def __init__(self, random: Any, settings: list[Any]) -> None:
        self.random = random
        self.settings = settings

    @classmethod
    def current(cls) -> Globals:
        """As they are now."""
        return cls(generators.state_dict(), [read() for read, _ in _SETTINGS])

    def set(self) -> None:
        """Makes them so again."""
        for (read, write), value in zip(_SETTINGS, self.settings, strict=True):
            if read() != value and value is not None:
                write(value)
        generators.load_state_dict(self.random)


def _matmul_precision() -> str | None:
    """None where it was set by backend, which this older setting cannot tell."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _inductor() -> Any:
    """The settings of ``torch.compile``'s backend, which the first optimizer imports anyway."""
    from torch._inductor import config

    return config


def _cudnn(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(torch.backends.cudnn, name), lambda value: setattr(torch.backends.cudnn, name, value)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_matmul_precision, torch.set_float32_matmul_precision),
    _cudnn("benchmark"),
    _cudnn("deterministic"),
    (lambda: _inductor().fallback_random, lambda value: setattr(_inductor(), "fallback_random", value)),
)
"""How each is read and written."""
