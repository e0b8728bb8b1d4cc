"""Whether what stages hold is used: a stage whose slots the learner never calls has nothing to do."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runner.plugin.context import Slots
    from runner.plugin.stage import StageConfig

RUNNERS = frozenset({"draw", "transfer", "next_batch", "update"})
"""Slots that the training step calls itself."""
ONCE = "make_optimizer"
"""Is called before the first update."""


class Watch:
    """Remembers which of the slots that stages hold are called by the first updates.

    Its wrappers are the outermost while they are there, and nothing of it stays. None is there when a slot that is
    traced (compiled) is called: what is called inside cannot be seen then, and is believed to be.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.held: dict[str, frozenset[str]] = {}
        """Slots by stage."""
        self.called: set[str] = set()
        self.updates = 0
        self._traced: set[str] = set()
        self._covered: dict[str, Any] = {}

    @contextmanager
    def attaching(self, stage: StageConfig) -> Iterator[None]:
        """Sees which slots the stage takes hold of inside the ``with``."""
        before = dict(vars(self.slots))
        yield
        taken = {name for name, step in vars(self.slots).items() if step is not before.get(name)}
        if stage.traces:
            self._traced |= taken
        self.held[stage.kind] = frozenset(taken if stage.works_through is None else stage.works_through) - RUNNERS

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remembers what is called inside the ``with``."""
        for name in frozenset().union(*self.held.values()) - self.called:
            self._covered[name] = getattr(self.slots, name)
            vars(self.slots)[name] = partial(self._seen, name, self._covered[name])
        try:
            yield
        finally:
            self._uncover()

    def idle(self) -> dict[str, str]:
        """Stages of which no slot was called, with the reason."""
        unused = {}
        for kind, held in self.held.items():
            if held and not held & self.called:
                slots = f"any of its slots {', '.join(sorted(held))}" if len(held) > 1 else f"its slot '{min(held)}'"
                unused[kind] = f"the learner never calls {slots}"
        return unused

    def _seen(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.called.add(name)
        if name in self._traced:
            self.called |= self._covered.keys() - {ONCE}
            self._uncover()
        return step(*args, **kwargs)

    def _uncover(self) -> None:
        vars(self.slots).update(self._covered)
        self._covered.clear()
