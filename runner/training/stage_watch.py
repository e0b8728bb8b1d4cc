"""Reports which stages of a pipeline are active, and which of their slots are called."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from runner.plugin.configs import StageConfig
from runner.plugin.context import STEP, Slots


@dataclass
class StageReport:
    """The state of a stage that the recipe switches on."""

    kind: str
    active: bool
    reason: str | None = None
    """Why it is not active."""
    notes: list[str] = field(default_factory=list)
    """Remarks of the stage on this run."""


@dataclass
class Watch:
    """Records which of the slots that stages hold are called: a stage whose slots are never called
    has no effect.

    Its wrappers are the outermost while they are there, and nothing of it stays. None is there when a slot that is
    traced (compiled) is called: what is called inside cannot be seen then, and is believed to be.
    """

    slots: Slots
    outside: frozenset[str]
    """Slots that are called outside of an update: by the training step, by the source, for an answer."""
    held: dict[str, frozenset[str]] = field(default_factory=dict)
    """Slots by stage."""
    undeclared: dict[str, list[str]] = field(default_factory=dict)
    """Slots that a stage changes although its settings do not declare them."""
    called: set[str] = field(default_factory=set)
    updates: int = 0
    _traced: set[str] = field(default_factory=set)

    @contextmanager
    def attaching(
        self, stage: StageConfig, report: StageReport, compilable: Collection[str]
    ) -> Iterator[None]:
        """Records which slots the stage changes inside the ``with``."""
        before = dict(vars(self.slots))
        yield
        taken = {
            name
            for name, step in vars(self.slots).items()
            if step is not before.get(name)
        }
        if (stage.claims or stage.wraps) and not taken:
            report.active, report.reason = (
                False,
                "it changes none of the slots that it declares",
            )
        declared = (
            stage.claims
            | stage.wraps
            | (self.outside - STEP)
            | {*(compilable if stage.traces else ())}
        )
        self.undeclared[stage.kind] = sorted(
            taken - declared
        )  # those of a source cannot be declared
        if stage.traces:
            self._traced |= taken
        works_through = taken if stage.works_through is None else stage.works_through
        self.held[stage.kind] = frozenset(works_through - self.outside)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remembers what is called inside the ``with``."""
        steps = {
            name: getattr(self.slots, name)
            for name in frozenset().union(*self.held.values()) - self.called
        }

        def seen(name: str, *args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            if name in self._traced:
                self.called |= steps.keys() - {
                    "make_optimizer"
                }  # which is called before the first update
                vars(self.slots).update(steps)
            return steps[name](*args, **kwargs)

        vars(self.slots).update({name: partial(seen, name) for name in steps})
        try:
            yield
        finally:
            vars(self.slots).update(steps)
