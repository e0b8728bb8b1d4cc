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
    """The state of a stage that the recipe switches on.

    Attributes:
        kind: The stage.
        active: Whether it has an effect.
        reason: Why it is not active.
        notes: Remarks of the stage on this run.
    """

    kind: str
    active: bool
    reason: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Watch:
    """Records which slots are called: a stage whose slots are never called has no effect.

    Its wrappers are the outermost while they are there, and nothing of it stays. Inside of a slot
    that is traced (compiled) no wrapper is there: its calls cannot be seen, and all are assumed.

    Attributes:
        slots: The slots of a pipeline.
        outer_slots: Slots that the training step or the source calls, or that answer a request.
        slots_by_stage: The slots that stages have changed.
        undeclared: Slots that a stage changes although its settings do not declare them.
        called: Slots that were called.
        updates: Updates that were watched.
    """

    slots: Slots
    outer_slots: frozenset[str]
    slots_by_stage: dict[str, frozenset[str]] = field(default_factory=dict)
    undeclared: dict[str, list[str]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    updates: int = 0
    _traced: set[str] = field(default_factory=set)

    @contextmanager
    def attaching(
        self, stage: StageConfig, report: StageReport, compilable: Collection[str]
    ) -> Iterator[None]:
        """Records which slots the stage changes inside the ``with``."""
        originals = dict(vars(self.slots))
        yield
        steps = vars(self.slots)
        changed = {
            name for name, step in steps.items() if step is not originals.get(name)
        }
        if (stage.claims or stage.wraps) and not changed:
            report.active = False
            report.reason = "it changes none of the slots that it declares"
        # The slots of a source cannot be declared.
        declared = stage.claims | stage.wraps | (self.outer_slots - STEP)
        if stage.traces:
            declared |= {*compilable}
            self._traced |= changed
        self.undeclared[stage.kind] = sorted(changed - declared)
        effective = changed if stage.works_through is None else stage.works_through
        self.slots_by_stage[stage.kind] = frozenset(effective - self.outer_slots)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records the slots that are called inside the ``with``."""
        # Only slots that were not called yet are of interest.
        names = frozenset().union(*self.slots_by_stage.values()) - self.called
        steps = {name: getattr(self.slots, name) for name in names}

        def record(name: str, *args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            if name in self._traced:
                # Optimizers are made before the first update, outside of any traced slot.
                self.called |= steps.keys() - {"make_optimizer"}
                vars(self.slots).update(steps)
            return steps[name](*args, **kwargs)

        vars(self.slots).update({name: partial(record, name) for name in steps})
        try:
            yield
        finally:
            vars(self.slots).update(steps)
