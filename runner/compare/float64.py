"""The same subject and the same updates in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from runner.compare.isolation import StepError
from runner.compare.state import doubled, named_parameters
from runner.compare.subject import Build, Subject
from runner.compare.trajectory import Play, Turn


class NotWideError(Exception):
    """A subject cannot be had, or cannot be stepped, in float64; the message says why."""

    @classmethod
    def stepping(cls, who: str, error: StepError) -> NotWideError:
        """What to say when a step fails in float64."""
        return cls(f"the algebra cannot be compared: in float64 {who} raises {error}")


def wide_play(turns: Sequence[Turn], seed: int) -> Play:
    """The same updates in float64."""
    wide = {id(turn.batch): doubled(turn.batch) for turn in turns}
    return Play([Turn(wide[id(turn.batch)], turn.states) for turn in turns], seed, torch.float64)


def wide_build(build: Build) -> Build:
    """Makes the same subject in float64, if it is called under that default type.

    Raises:
        NotWideError: when it is called, and cannot be built, or a parameter insists on another type.
    """

    def built() -> Subject:
        try:
            subject = build()
        except (TypeError, ValueError, RuntimeError) as error:
            raise NotWideError(f"the algebra cannot be compared: it cannot be built in float64: {error}") from error
        for part in subject.state.values():
            if isinstance(part, nn.Module):
                part.double()
        for name, parameter in named_parameters(subject).items():
            if parameter.is_floating_point() and parameter.dtype != torch.float64:
                raise NotWideError(
                    f"the algebra cannot be compared: under torch.set_default_dtype(torch.float64) '{name}' is still "
                    f"{parameter.dtype}; build it in the default type"
                )
        return subject

    return built
