"""The same subject and the same updates in float64."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.compare.isolation import Isolation, StepError
from runner.compare.state import clones, named_parameters, to_float64
from runner.compare.subject import Build, Subject
from runner.compare.trajectory import Trajectory, Update


class NotFloat64Error(Exception):
    """A subject cannot be had, or cannot be stepped, in float64; the message says why."""

    @classmethod
    def stepping(cls, who: str, error: StepError) -> NotFloat64Error:
        """What to say when a step fails in float64."""
        return cls(f"the algebra cannot be compared: in float64 {who} raises {error}")


def float64_trajectory(updates: Sequence[Update], seed: int) -> Trajectory:
    """The same updates in float64."""
    converted = {id(update.batch): to_float64(update.batch) for update in updates}
    return Trajectory([Update(converted[id(update.batch)], update.states) for update in updates], seed, torch.float64)


def float64_build(build: Build) -> Build:
    """Makes the same subject in float64, if it is called under that default type.

    Raises:
        NotFloat64Error: when it is called, and cannot be built, or a parameter insists on another type.
    """

    def built() -> Subject:
        try:
            subject = build()
        except (TypeError, ValueError, RuntimeError) as error:
            raise NotFloat64Error(f"the algebra cannot be compared: it cannot be built in float64: {error}") from error
        for part in subject.state.values():
            if isinstance(part, nn.Module):
                part.double()
        for name, parameter in named_parameters(subject).items():
            if parameter.is_floating_point() and parameter.dtype != torch.float64:
                raise NotFloat64Error(
                    f"the algebra cannot be compared: under torch.set_default_dtype(torch.float64) '{name}' is still "
                    f"{parameter.dtype}; build it in the default type"
                )
        return subject

    return built


@dataclass(frozen=True)
class Narrowing:
    """The first place where a step in float64 makes numbers of fewer digits from those that it has."""

    dtype: torch.dtype
    where: str

    @property
    def tolerance(self) -> float:
        """Share of a group's largest number by which rounding there may change outputs and gradients."""
        return min(1000 * torch.finfo(self.dtype).eps, 0.1)

    def __str__(self) -> str:
        return (
            f"the algebra cannot be compared: in float64 the baseline itself rounds to {self.dtype} ({self.where}); "
            "cast to the wider of two types there, torch.promote_types(x.dtype, torch.float32)"
        )


def narrowing(isolation: Isolation, batch: Any) -> Narrowing | None:
    """Looks for a cast from float64 to something narrower in one update of a subject in float64.

    Raises:
        StepError: it fails.
    """
    casts = _Casts()
    with casts:
        isolation.step(clones(batch))
    return casts.found


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Remembers the first operation that makes narrower numbers from float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Narrowing | None = None

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.found is None and any(_is_float64(each) for each in tree_leaves((args, kwargs))):
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < 64:
                    self.found = Narrowing(tensor.dtype, _caller())
                    break
        return output


def _is_float64(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def _caller() -> str:
    """The innermost line that is neither torch's nor this package's."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(ours)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name}"
