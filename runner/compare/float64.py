"""The same subject and the same updates in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from runner.compare.isolation import StepError
from runner.compare.state import named_parameters, to_float64
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
