"""Named steps of a pipeline that stages may replace or wrap."""

from collections.abc import Callable, Iterator
from typing import Any

Step = Callable[..., Any]
WRAPPED = "_wraps_a_slot"
PIPELINE = frozenset(
    {
        *("draw", "transfer", "next_batch", "update"),
        *("make_optimizer", "precision", "zero_grad", "backward", "unscale", "clip", "optimizer_step"),
    }
)
"""The steps that every pipeline has: those of a training step, and those that every learner is built from."""


class Slots:
    """The steps of one pipeline, called as attributes: ``slots.critic_step(batch, targets)``.

    The owner of a step defines it once; a stage then replaces it or wraps it. Steps are plain instance attributes, so
    that a call costs one dictionary look-up and ``torch.compile`` can trace through it.
    """

    def __getattr__(self, name: str) -> Step:
        raise AttributeError(f"no slot '{name}'; the pipeline has: {', '.join(sorted(self))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def define(self, **steps: Step) -> None:
        """Adds steps under their names; a name that is taken is a ValueError."""
        for name, step in steps.items():
            if name in self.__dict__:
                raise ValueError(f"slot '{name}' is defined twice")
            self.__dict__[name] = step

    def replace(self, name: str, step: Step) -> None:
        """Puts ``step`` in the place of an existing one; one that is wrapped already is a ValueError."""
        if hasattr(getattr(self, name), WRAPPED):
            raise ValueError(f"slot '{name}' is wrapped already: replacing it would discard the wrapper")
        self.__dict__[name] = step

    def wrap(self, name: str, wrapper: Callable[[Step], Step]) -> None:
        """Replaces a step by ``wrapper(step)``, a function."""
        wrapped = wrapper(getattr(self, name))
        setattr(wrapped, WRAPPED, True)
        self.__dict__[name] = wrapped
