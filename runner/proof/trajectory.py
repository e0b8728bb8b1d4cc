"""Sequences of updates, on which subjects are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.proof.isolation import Frame, Isolation, StepError
from runner.proof.subject import Build
from runner.proof.trees import clones, put, to_float64
from runner.system.errors import RunnerError


@dataclass(frozen=True)
class Update:
    """A batch for one update, with another state.

    Attributes:
        batch: Updates with the same object get the same one again.
        states: The state that is loaded before the update.
        seed: For the global random generators, with that state.
        place: The batch of an earlier update, whose objects and memory this one gets.
        in_memory: Whether it gets the memory of that batch; otherwise only its objects, with
            separate tensors.
    """

    batch: Any
    states: Mapping[str, Any] | None = None
    seed: int | None = None
    place: Any = None
    in_memory: bool = True


@dataclass(frozen=True)
class Trajectory:
    """A sequence of updates, from the same seed for every subject; optionally with batches and
    subjects in float64.

    Attributes:
        batches: A batch for each update, or an ``Update`` if a state is loaded.
        seed: Of the global random generators.
        float64: Whether batches and subjects are converted.
        as_trained: Whether compiled code draws as it does in a training.
    """

    batches: Sequence[Any]
    seed: int
    float64: bool = False
    as_trained: bool = False

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("nothing to compare: no batch")

    @property
    def updates(self) -> list[Update]:
        """Returns one update for each batch."""
        return [
            batch if isinstance(batch, Update) else Update(batch)
            for batch in self.batches
        ]

    def isolated(self, build: Build) -> Isolation:
        """Returns a subject before its first update."""
        return Isolation(build, self.seed, self.float64, as_trained=self.as_trained)

    def watched(self, build: Build, number: int) -> tuple[Frame, list[str]]:
        """Returns the visible values of one update, with the results of slots; and the
        names of the subject's parts.
        """
        isolation = Isolation(build, self.seed, self.float64, watching=True)
        frames = self.frames(isolation)
        for _ in range(number):
            next(frames)
        isolation.events = {}
        return next(frames), list(isolation.subject.state)

    def endless(self) -> Iterator[Any]:
        """Yields the batches, in copies, again and again."""
        return itertools.cycle(list(self.copies().values()))

    def frames(self, isolation: Isolation) -> Iterator[Frame]:
        """Yields the visible values before the first update, and after each."""
        yield isolation.initial()
        yield from self.updated(isolation)

    def updated(self, isolation: Isolation) -> Iterator[Frame]:
        """Yields the visible values after each update; raises a ``StepError`` if the subject
        fails.
        """
        copies = self.copies()
        for update in self.updates:
            with isolation.entered():
                frame = isolation.step(self.prepare(isolation, update, copies))
            yield frame

    def first_frame(self, isolation: Isolation) -> Frame | None:
        """Returns the visible values after the first update; None if it raises."""
        try:
            return next(self.updated(isolation))
        except (StepError, RunnerError):
            return None

    @staticmethod
    def prepare(isolation: Isolation, update: Update, copies: Mapping[int, Any]) -> Any:
        """Loads the state of an update, and returns its batch."""
        if update.states is not None:
            isolation.load(update.states, update.seed)
        batch = copies[id(update.batch)]
        if update.place is None:
            return batch
        return put(batch, copies[id(update.place)], update.in_memory)

    def copies(self) -> dict[int, Any]:
        """Returns a copy of every batch, by the id of the object."""
        # By id, so that updates with the same batch get the same copy, and may find it in a
        # cache.
        copy = to_float64 if self.float64 else clones
        return {id(update.batch): copy(update.batch) for update in self.updates}
