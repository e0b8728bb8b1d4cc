"""A subject with separate random generators and torch settings, which leaves the global
ones unchanged.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from runner.proof.subject import Build
from runner.proof.subject_states import load, named_parameters, saved, widen
from runner.proof.trees import clones, have_equal_leaves, leaves, on_host, to_float64
from runner.proof.verdict import Outcome, Verdict
from runner.system import generators, torch_settings
from runner.system.errors import RunnerError

Result = TypeVar("Result")
# Number of later steps after which a returned tensor is still compared with its copy.
_LOOK_BACK = 3
FAILED_UPDATE = "failed_update"
"""Key of the evidence for the update in which the baseline fails in float64."""
STEP = "step"
"""The slot that represents the entire update."""


class Location(NamedTuple):
    """The place where a value was observed.

    Attributes:
        slot: The named step that returned it.
        kind: What the value is.
        name: Dotted path of the value.
        visit: The number of times that the slot had returned before in this update.
    """

    slot: str
    kind: Literal["output", "gradient", "state"]
    name: str
    visit: int = 0

    def __str__(self) -> str:
        return f"{self.name}.grad" if self.kind == "gradient" else self.name

    @property
    def call(self) -> tuple[str, int] | None:
        """Returns the slot and the number of its call; None for the entire update."""
        return None if self.slot == STEP else (self.slot, self.visit)


class _OptimizerGradient(NamedTuple):
    """A gradient at the start of an optimizer's step.

    Attributes:
        tensor: The gradient itself.
        version: Version of the tensor while the copy is valid: some optimizers (Nesterov by
            ``foreach``) overwrite it.
        copy: A copy of the gradient.
    """

    tensor: Tensor
    version: int
    copy: Tensor


Frame = dict[Location, Any]
"""The visible values of a subject after an update, in order; valid until the next one."""


class StepError(Exception):
    """Raised if a step, loading a state before it, or building in float64 raises the cause."""

    def __init__(self, isolation: Isolation, cause: Exception) -> None:
        last = traceback.extract_tb(cause.__traceback__)[-1]
        first_line, _, remaining = str(cause).strip().partition("\n")
        if first_line.endswith(":"):
            first_line += f" {remaining.strip().partition(chr(10))[0]}"
        line = f"{last.filename.rpartition('/')[2]}:{last.lineno}, in {last.name}"
        super().__init__(f"{type(cause).__name__}: {first_line} ({line})")
        self.build = isolation.build
        self.float64 = isolation.float64
        self.update = isolation.updates

    def verdict(self, contract: str, baseline: Build | None) -> Verdict:
        """Returns the verdict on a comparison with this error; raises it if the baseline has failed
        in its original precision.
        """
        is_baseline = self.build is baseline
        raising = (
            f"{'the baseline' if is_baseline else 'the changed step'} raises {self}"
        )
        if self.float64:
            summary = f"the algebra cannot be compared: in float64 {raising}"
            if "dtype" in str(self):
                hint = "make tensors outside `state` in torch's default type"
                summary += f"; {hint}"
            evidence = {FAILED_UPDATE: self.update} if is_baseline else {}
            return Verdict(Outcome.INCONCLUSIVE, contract, summary, evidence)
        if is_baseline:
            raise self
        summary = f"update {self.update}: {raising}"
        return Verdict(Outcome.FAIL, contract, summary, {"updates": self.update})


class Isolation:
    """A subject with its global state.

    Attributes:
        build: Makes the subject.
        float64: Whether it computes in float64.
        updates: Number of updates that it has made.
        subject: The subject.
        events: Results of slots, if they are requested; part of the next frame.
        untrained: Parameters that no finite gradient other than zero has reached so far, with
            the reason.
        autocasts: Types to which autocast casts, with the update in which it did first.
        overwritten: Outputs that a later step has overwritten, with the step that returned them.
        unlisted: Shapes of parameters that an optimizer trains and no part of the state has.
    """

    def __init__(
        self,
        build: Build,
        seed: int,
        float64: bool = False,
        watching: bool = False,
        as_trained: bool = False,
    ) -> None:
        """Builds the subject with this seed, optionally in float64, or with observed slots.

        Compiled code draws what eager code draws, unless it is to draw as it does in a training.
        On a GPU, torch selects kernels that have the same result every time, where it has any.
        """
        if torch.cuda.is_available():
            # The last subject may hold the device's memory in a circle of references.
            gc.collect()
        self.build = build
        self.float64 = float64
        self.updates = 0
        self.events: Frame | None = None
        self.autocasts: dict[str, int] = {}
        self.overwritten: dict[str, int] = {}
        self.unlisted: list[tuple[int, ...]] = []
        self._globals = generators.Globals()
        # Generators before the last step, and torch's settings in the optimizer's last step.
        self._random_before = self._globals.random
        self._optimizer_settings: dict[str, Any] = {}
        # A loaded state may have a seed, from which the seeds of updates are counted.
        self._seed_offset = 0
        # Parameters of the optimizers that stepped in this update, by their ids.
        self._trained: dict[int, Tensor] = {}
        # Gradients in this update, by the id of the parameter and of the gradient.
        self._gradients: dict[int, _OptimizerGradient] = {}
        self._visits: Counter[str] = Counter()
        # What each of the last steps has returned: names, tensors and copies.
        self._returned: deque[list[tuple[str, Tensor, Tensor]]] = deque(
            maxlen=_LOOK_BACK
        )
        with self._globals.apart(), self._failing() if float64 else nullcontext():
            self._build(seed, watching, as_trained)

    def _build(self, seed: int, watching: bool, as_trained: bool) -> None:
        # Different random numbers could not be compared element by element.
        if not as_trained:
            torch_settings.inductor().fallback_random = True
        if torch.cuda.is_available():
            torch_settings.prefer_deterministic_kernels()
        generators.seed(seed)
        if self.float64:
            torch.set_default_dtype(torch.float64)
        self.subject = self.build()
        if self.float64:
            widen(self.subject)
        names = named_parameters(self.subject)
        self.untrained = dict.fromkeys(names, "receives no gradient")
        if watching and self.subject.watch is not None:
            listener = torch.compiler.disable(self._report)  # type: ignore[no-untyped-call]
            self.subject.watch(listener)

    def entered(self) -> AbstractContextManager[None]:
        """Keeps the subject's global state for several calls, each of which would exchange it."""
        return self._globals.apart()

    def initial(self) -> Frame:
        """Returns the state as it is, before the first update or between two."""
        with self._globals.apart():
            return self._state(STEP)

    def advance(
        self, batches: Iterable[Any], keep: Callable[[Any], Result]
    ) -> list[Result]:
        """Makes an update with each batch, and records a part of its result: much less
        than ``step`` observes.
        """
        results = []
        with self._globals.apart(), self._failing(), self._autocast():
            for batch in batches:
                self.updates += 1
                self._seed_step()
                results.append(keep(self.subject.step(batch)))
        return results

    def step(self, batch: Any) -> Frame:
        """Makes one update with this batch, without a copy."""
        self.updates += 1
        self._visits.clear()
        self._gradients.clear()
        self._trained.clear()
        with self._globals.apart(), self._failing():
            self._seed_step()
            self._random_before = generators.state_dict()
            # Many a loop forgets its gradients before it ends, and some optimizers overwrite them.
            with (
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
                self._autocast(),
            ):
                output = self.subject.step(batch)
            self._look_back(output)
            # Slots that run while the frame is read do not belong to the update.
            observed = self.events or {}
            self.events = None
            frame = self._frame(STEP, 0, output)
            self._note_trained(frame)
            self._note_unlisted()
            return observed | frame

    def _seed_step(self) -> None:
        if self.subject.seed is not None:
            self.subject.seed(self._seed_offset + self.updates)

    def _note_trained(self, frame: Frame) -> None:
        """Removes parameters that have received a gradient from the untrained ones."""
        for location, gradient in frame.items():
            if location.kind != "gradient" or location.name not in self.untrained:
                continue
            if not bool(gradient.isfinite().all()):
                self.untrained[location.name] = "receives a gradient that is not finite"
            elif not bool(gradient.any()):
                self.untrained[location.name] = "receives a gradient of zeros alone"
            else:
                del self.untrained[location.name]

    def _note_unlisted(self) -> None:
        """Notes parameters that an optimizer has trained and that cannot be compared."""
        # A recipe lists its parameters itself.
        if self.subject.parameters is not None or self.unlisted:
            return
        listed = {id(value) for value in named_parameters(self.subject).values()}
        unlisted = [value for key, value in self._trained.items() if key not in listed]
        if unlisted:
            memory = {_address(value) for value in self._state(STEP).values()}
            self.unlisted = [
                tuple(value.shape)
                for value in unlisted
                if _address(value) not in memory
            ]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Returns torch's settings during the last step of the optimizer, or after the update if
        there was none.
        """
        return self._optimizer_settings or self._globals.settings

    def load(self, states: Mapping[str, Any], seed: int | None = None) -> None:
        """Loads another state, and new seeds if one is given."""
        with self._globals.apart(), self._failing():
            # Optimizers do not widen complex numbers when they load them.
            load(self.subject, to_float64(states) if self.float64 else states)
            if seed is not None:
                generators.seed(seed)
                self._seed_offset = seed - self.updates

    def sizes(self) -> dict[str, float]:
        """Returns the Euclidean size of every trainable parameter."""
        parameters = named_parameters(self.subject)
        return {
            name: float(value.detach().norm()) for name, value in parameters.items()
        }

    def moved(
        self,
        states: Mapping[str, Any],
        direction: Mapping[str, Tensor],
        distance: float,
    ) -> dict[str, Any]:
        """Returns these states with parameters that are moved by a distance in a
        direction; loads them meanwhile.
        """
        self.load(states)
        with self._globals.apart(), torch.no_grad():
            for name, parameter in named_parameters(self.subject).items():
                if name in direction:
                    move = direction[name].to(parameter.device, parameter.dtype)
                    parameter.add_(move, alpha=distance)
            return saved(self.subject)

    def draws_as(self, other: Isolation) -> bool:
        """Returns whether both can have drawn the same in their last step: as many numbers on the
        host, and none on a GPU.
        """
        random = self._globals.random
        return have_equal_leaves(random, other._globals.random) and have_equal_leaves(
            self._random_before["cuda"], random["cuda"]
        )

    @property
    def drew(self) -> bool:
        """Returns whether its last step has drawn from the global generators."""
        return not have_equal_leaves(self._random_before, self._globals.random)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Converts exceptions of a subject to one kind, except too little memory and those
        with a message for the user.
        """
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

        def record_and_enter(autocast: torch.autocast) -> Any:
            if autocast._enabled:
                self.autocasts.setdefault(str(autocast.fast_dtype), self.updates)
            return enter(autocast)  # type: ignore[no-untyped-call]

        torch.autocast.__enter__ = record_and_enter  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]

    def _look_back(self, output: Any) -> None:
        """Compares the results of the last steps with their copies, and copies this result."""
        for age, returned in enumerate(reversed(self._returned), start=1):
            for name, tensor, copy in returned:
                dense = tensor.detach().to_dense()
                if not torch.allclose(dense, copy, rtol=0.0, atol=0.0, equal_nan=True):
                    self.overwritten.setdefault(name, self.updates - age)
        copies = []
        for path, value in leaves(output, has_means=False):
            if isinstance(value, Tensor):
                copy = value.detach().to_dense().clone()
                copies.append((path or "output", value, copy))
        self._returned.append(copies)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_capturing():
            return
        self._optimizer_settings = torch_settings.read()
        # Until a closure computes the gradients, these are the ones of the last update.
        if _has_closure(args, kwargs):
            return
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                self._record(parameter, _recorded(parameter.grad))

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_capturing():
            return
        self._trained |= {
            id(parameter): parameter
            for parameter in _parameters(optimizer)
            if parameter.grad is not None
        }
        if _has_closure(args, kwargs):
            for parameter in _parameters(optimizer):
                if parameter.grad is not None:
                    self._record(parameter, _recorded(parameter.grad))
            return
        # An optimizer that removes a gradient scaler's factor itself overwrites the gradients.
        unscales = getattr(optimizer, "grad_scale", None) is not None
        for parameter in _parameters(optimizer):
            recorded = self._gradients.get(id(parameter))
            if recorded is None:
                continue
            tensor = recorded.tensor
            copy = tensor.detach().clone() if unscales else recorded.copy
            self._record(parameter, _OptimizerGradient(tensor, tensor._version, copy))

    def _record(self, parameter: Tensor, gradient: _OptimizerGradient) -> None:
        self._gradients[id(parameter)] = gradient
        self._gradients[id(gradient.tensor)] = gradient

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
            last_gradients = dict(self.subject.gradients())
        else:
            last_gradients = {
                name: self._last_gradient(parameter)
                for name, parameter in named_parameters(self.subject).items()
            }
        gradients = {
            Location(slot, "gradient", name, visit): self._before_step(gradient)
            for name, gradient in last_gradients.items()
            if gradient is not None
        }
        return outputs | gradients | self._state(slot, visit)

    def _last_gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns a parameter's gradient, or the recorded one if the step has deleted it."""
        recorded = self._gradients.get(id(parameter))
        if parameter.grad is None and recorded is not None:
            return recorded.copy
        return parameter.grad

    def _before_step(self, gradient: Tensor) -> Tensor:
        """Returns a gradient, dense, as it was at the start of its optimizer's step."""
        recorded = self._gradients.get(id(gradient))
        if recorded is not None and gradient._version == recorded.version:
            gradient = recorded.copy
        return gradient.to_dense() if gradient.layout != torch.strided else gradient

    def _state(self, slot: str, visit: int = 0) -> Frame:
        return {
            Location(slot, "state", path, visit): value
            for name, stateful in self.subject.state.items()
            for path, value in leaves(stateful.state_dict(), name)
        }


def output_frame(output: Any, slot: str = STEP, visit: int = 0) -> Frame:
    """Returns the numbers and tensors that a slot has returned; None is ignored."""
    return {
        Location(slot, "output", path or "output", visit): value
        for path, value in leaves(output)
        if value is not None
    }


def copy_outputs(output: Any) -> Frame:
    """Returns copies of everything that an update has returned, of None as well."""
    return {
        Location(STEP, "output", path or "output"): clones(value)
        for path, value in leaves(output)
    }


def _address(value: Any) -> int | None:
    """Returns the address of a tensor's memory; None for anything without memory."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    # A subclass may have no memory of its own.
    try:
        return value.untyped_storage().data_ptr() or None
    except RuntimeError:
        return None


def _recorded(gradient: Tensor) -> _OptimizerGradient:
    """Returns a gradient with a copy of its current numbers."""
    copy = gradient.detach().clone()
    return _OptimizerGradient(gradient, gradient._version, copy)


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether these arguments of an optimizer's step have a function that computes
    gradients.
    """
    # The first argument is the optimizer itself.
    return any(callable(value) for value in (*args[1:], *kwargs.values()))


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (
        parameter for group in optimizer.param_groups for parameter in group["params"]
    )


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
