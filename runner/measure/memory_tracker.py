"""Memory of one update by slot and module: torch's ``MemTracker`` with a call stack of ours.

torch's stack of modules (``ModTracker``) raises on a backward pass inside a module, on
``autograd.grad`` of a leaf and on a module that is called twice, and learners do all three. So
only the accounting of storages is torch's. Hooks and wrapped slots report what is running.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _UpdateType
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from runner.plugin.context import PIPELINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.train.assemble import Assembly

OUTSIDE = "(no module)"
"""Module of what is allocated while none is running, as in a loss."""
GENERIC = PIPELINE - {"make_optimizer", "precision"}
"""Slots that every pipeline has and that take memory."""
KINDS = {
    "Parameter": "parameters",
    "Buffer": "parameters",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "temporaries",
    "Other": "other state",
}
"""The categories of ``MemTracker`` and the names under which they are reported."""


class Holder(NamedTuple):
    """Slot and module that allocated memory, or saved it for backward."""

    slot: str
    module: str


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
    def on(cls, pipeline: Assembly) -> CallStack:
        """Puts labels on the slots of a pipeline, and returns their stack."""
        stack = cls.of(pipeline.learner.modules())
        slots = (*GENERIC, *pipeline.learner.config.slots)
        for name in dict.fromkeys(slots):
            pipeline.slots.wrap(name, partial(stack.label, name))
        return stack

    def label(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step of a slot, which is on the stack while it runs."""

        def labelled(*arguments: Any, **named: Any) -> Any:
            # A change of the stack would break a compiled graph in two.
            if torch.compiler.is_compiling() or not self.recording:
                return step(*arguments, **named)
            self.slots.append(name)
            try:
                return step(*arguments, **named)
            finally:
                self.slots.pop()

        return labelled

    @property
    def holder(self) -> Holder:
        """The innermost slot of the learner, and the innermost module.

        Slots that every learner has (backward, clip, optimizer_step) are shown in the place of
        the module, because they run outside of any.
        """
        slot = next((name for name in reversed(self.slots) if name not in GENERIC), "update")
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
            self.modules.append((module, self.names.get(id(module), type(module).__name__)))

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


@dataclass(frozen=True)
class MemorySample:
    """Memory of the update after one operator.

    Attributes:
        seconds: Time since the update began. Tracking slows every operator, so only the order and
            the rough proportions are those of an update that is not tracked.
        bytes: Update memory.
        slot: The innermost slot.
    """

    seconds: float
    bytes: int
    slot: str


@dataclass(frozen=True)
class MemoryPeak:
    """The most memory that one update held.

    Attributes:
        total: Bytes of all tensors at the peak.
        resident: Bytes of what is there between two updates, without gradients.
        kinds: Bytes at the peak by kind, as in ``KINDS``.
        holders: Bytes at the peak that the update itself had allocated, by slot and module.
        slot: The innermost slot that was running at the peak.
        samples: Update memory over the time of the update.
    """

    total: int
    resident: int
    kinds: Mapping[str, int]
    holders: Mapping[Holder, int]
    slot: str
    samples: Sequence[MemorySample]

    @property
    def update(self) -> int:
        """Update memory: what an update holds at its peak beyond what is resident anyway."""
        return self.total - self.resident


class SlotMemoryTracker(MemTracker):  # type: ignore[no-untyped-call]
    """Counts the storages of a pipeline during one update.

    Everything that exists before is tracked as state: parameters, buffers, gradients and
    optimizers as what they are, all other tensors (batch, averages, caches) as other state.

    Args:
        pipeline: The assembled pipeline, between two updates.
        stack: The stack whose labels are on the pipeline's slots.
    """

    def __init__(self, pipeline: Assembly, stack: CallStack) -> None:
        super().__init__()
        self._mod_tracker: Any = stack
        self._stack = stack
        self._device = pipeline.device
        self._held: Counter[Holder] = Counter()
        self._holders: dict[int, Holder] = {}
        self._largest = 0
        self._peak_held: Counter[Holder] = Counter()
        self._peak_slot = ""
        self._samples: list[MemorySample] = []
        self._started = 0.0

        gc.collect()
        tensors = living_tensors()
        # Later calls decide the kind of a storage that several objects share.
        self.track_external(*tensors)
        self.track_external(*pipeline.learner.modules().values())
        self.track_external(*(optimizer for _, optimizer in pipeline.learner.optimizers()))
        self._leaves = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
        for leaf in self._leaves:
            self._note_gradient(leaf)
        # Gradients of the previous update are freed in this one, so they are not state.
        kinds = self._kinds("current")
        self._resident = sum(kinds.values()) - kinds["gradients"]
        # What exists already belongs to no slot.
        self._holders.clear()
        self._held.clear()

    def measure(self, update: Callable[[], object]) -> MemoryPeak:
        """Runs one update and returns its peak."""
        with ExitStack() as hooks:
            for leaf in self._leaves:
                handle = leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._note_gradient
                )
                hooks.callback(handle.remove)
            hooks.enter_context(self._stack.watching())
            self._started = time.perf_counter()
            with self:
                # Without it, an update that only frees memory would have no peak.
                self._sample()
                update()
        kinds = self._kinds("peak")
        return MemoryPeak(
            total=sum(kinds.values()),
            resident=self._resident,
            kinds=kinds,
            holders=+self._peak_held,
            slot=self._peak_slot,
            samples=tuple(self._samples),
        )

    def _kinds(self, moment: str) -> Counter[str]:
        """Returns the bytes of each kind, now or at the peak."""
        kinds = Counter(dict.fromkeys(KINDS.values(), 0))
        snapshot = self.get_tracker_snapshot(moment).get(self._device, {})
        for kind, size in snapshot.items():
            # The total has a plain string for a key.
            if isinstance(kind, _MemRefType):
                kinds[KINDS[kind.value]] += size
        return kinds

    def _note_gradient(self, leaf: Tensor) -> None:
        """Marks the gradient of a leaf as one."""
        if leaf.grad is not None:
            self._update_and_maybe_create_winfos(leaf.grad, _MemRefType.GRAD)

    def _update_snap(self, u_type: _UpdateType, winfo: Any, *values: Any, **named: Any) -> None:
        """Counts a change of one storage and of its holder."""
        super()._update_snap(u_type, winfo, *values, **named)
        if winfo.device != self._device:
            return
        if u_type is _UpdateType.ADD:
            self._holders[id(winfo)] = self._stack.holder
            self._held[self._stack.holder] += winfo.mem_consumed
        elif (holder := self._holders.get(id(winfo))) is None:
            return
        elif u_type is _UpdateType.DEL:
            del self._holders[id(winfo)]
            self._held[holder] -= winfo.mem_consumed
        elif u_type is _UpdateType.SIZE:
            self._held[holder] += winfo.mem_consumed - named["old_mem_consumed"]

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Takes a sample after every operator."""
        super()._update_peak_stats(peak_state)
        self._sample()

    def _sample(self) -> None:
        total = self._curr_mem_snap.get(self._device, {}).get("Total", 0)
        slot = self._stack.holder.slot
        seconds = time.perf_counter() - self._started
        self._samples.append(MemorySample(seconds, total - self._resident, slot))
        # A copy at each new maximum, because the storages are freed later.
        if total > self._largest:
            self._largest = total
            self._peak_held = Counter(self._held)
            self._peak_slot = slot


def living_tensors() -> list[Tensor]:
    """Returns all tensors that Python references and that have real memory.

    The fake tensors of a compiler are left out.
    """
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    tensors = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor | FunctionalTensor)]
    return [tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta]
