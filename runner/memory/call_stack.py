"""Slots and modules that are running, by which memory is attributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from runner.memory.kinds import Holder
from runner.plugin.context import PIPELINE

if TYPE_CHECKING:
    from runner.plugin.stage import Pipeline

OUTSIDE = "(no module)"
"""Module of memory that is allocated while none is running, as in a loss."""
GENERIC = PIPELINE - {"make_optimizer", "precision"}
"""Slots that every pipeline has and that take memory."""


@dataclass
class CallStack:
    """Names of the running slots and modules, the innermost last.

    It also implements what ``MemTracker`` calls of its ``ModTracker``.

    Attributes:
        names: Name of every module of the learner, by ``id``.
        slots: Running slots.
        modules: Running modules with their names.
        recording: False outside of a measured update, where labels do nothing.
    """

    names: Mapping[int, str]
    slots: list[str] = field(default_factory=list)
    modules: list[tuple[nn.Module, str]] = field(default_factory=list)
    recording: bool = False
    parents: tuple[str, ...] = ()

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> CallStack:
        """Returns an empty stack that has the names of these modules and all below them."""
        names: dict[int, str] = {}
        for role, root in modules.items():
            for name, module in root.named_modules():
                names.setdefault(id(module), f"{role}.{name}" if name else role)
        return cls(names)

    @classmethod
    def on(cls, pipeline: Pipeline) -> CallStack:
        """Puts labels on the slots of a pipeline, and returns their stack."""
        stack = cls.of(pipeline.learner.modules())
        slots = (*GENERIC, *pipeline.learner.config.slots)
        for name in dict.fromkeys(slots):
            pipeline.slots.surround(name, partial(stack.label, name))
        return stack

    def label(self, name: str) -> AbstractContextManager[None]:
        """Returns a context in which a slot is on the stack."""
        return self._on_stack(name) if self.recording else nullcontext()

    @contextmanager
    def _on_stack(self, name: str) -> Iterator[None]:
        self.slots.append(name)
        try:
            yield
        finally:
            self.slots.pop()

    @property
    def holder(self) -> Holder:
        """The innermost slot of the learner, and the innermost module.

        Slots that every learner has (backward, clip, optimizer_step) are shown in the place of
        the module, because they run outside of any.
        """
        slot = next(
            (name for name in reversed(self.slots) if name not in GENERIC), "update"
        )
        if self.modules:
            return Holder(slot, self.modules[-1][1])
        if self._in_backward:
            return Holder(slot, "(backward)")
        if self.slots and self.slots[-1] in GENERIC - {"update"}:
            return Holder(slot, f"({self.slots[-1]})")
        return Holder(slot, OUTSIDE)

    @property
    def is_bw(self) -> bool:
        """True while a backward pass runs, except in a forward that a checkpoint repeats."""
        return self._in_backward and not self.modules

    @property
    def _in_backward(self) -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def register_user_hooks(self, *hooks: object) -> None:
        """Ignores the hooks of ``MemTracker``, whose statistics by module are not used."""

    def clear_user_hooks(self) -> None:
        """Does nothing: hooks are never registered."""

    def __enter__(self) -> CallStack:
        """Does nothing: ``watching`` follows the modules."""
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows slots and modules inside the ``with``."""

        def enter(module: nn.Module, _inputs: Any) -> None:
            self.modules.append(
                (module, self.names.get(id(module), type(module).__name__))
            )

        def leave(module: nn.Module, _inputs: Any, _output: Any) -> None:
            while self.modules and self.modules.pop()[0] is not module:
                pass

        pre_hook = register_module_forward_pre_hook(enter)
        # A checkpoint leaves the forward that it repeats by an exception, as early as it can.
        post_hook = register_module_forward_hook(leave, always_call=True)
        self.recording = True
        try:
            yield
        finally:
            self.recording = False
            pre_hook.remove()
            post_hook.remove()
            self.modules.clear()
