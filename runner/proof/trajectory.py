"""Sequences of updates, on which subjects are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.proof.isolation import Frame, Isolation
from runner.proof.subject import Build
from runner.proof.subject_states import clones, put, to_float64


@dataclass(frozen=True)
class Update:
    """A batch for one update, with another state."""

    batch: Any  # updates with the same object get the same one again
    states: Mapping[str, Any] | None = None  # loaded before the update
    seed: int | None = None  # for the global random generators, with that state
    place: Any = None  # the batch of an update before, in whose objects and memory this one comes
    in_memory: bool = True  # otherwise only in its objects, with separate tensors


@dataclass(frozen=True)
class Trajectory:
    """A sequence of updates, from the same seed for every subject; optionally with batches and
    subjects in float64.
    """

    batches: Sequence[Any]  # or an ``Update``, where a state is loaded
    seed: int
    float64: bool = False
    as_trained: bool = False  # whether compiled code draws as it does in a training

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("nothing to compare: no batch")

    @property
    def updates(self) -> list[Update]:
        """Returns one update for each batch."""
        return [each if isinstance(each, Update) else Update(each) for each in self.batches]

    def isolated(self, build: Build) -> Isolation:
        """A subject that has not moved yet."""
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
        """The batches, in copies, again and again."""
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
            yield isolation.step(self.prepare(isolation, update, copies))

    @staticmethod
    def prepare(isolation: Isolation, update: Update, copies: Mapping[int, Any]) -> Any:
        """Loads the state of an update, and returns its batch."""
        if update.states is not None:
            isolation.load(update.states, update.seed)
        batch = copies[id(update.batch)]
        return batch if update.place is None else put(batch, copies[id(update.place)], update.in_memory)

    def copies(self) -> dict[int, Any]:
        """A copy of every batch, by the number of the object."""
        copied = to_float64 if self.float64 else clones
        return {id(update.batch): copied(update.batch) for update in self.updates}
