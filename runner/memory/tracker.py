"""Bytes of an update by kind and by holder, at the moment when most are in use."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.mem_tracker import (
    MemTracker,
    _MemRefType,
    _RefType,
    _State,
    _UpdateType,
    _WeakRefInfo,
)
from torch.utils.weak import WeakIdKeyDictionary

from runner.memory.kinds import Holder, Kind, Usage
from runner.memory.module_stack import OUTSIDE
from runner.memory.operands import copied_bytes, reused_bytes
from runner.system.tensor_trees import stored_tensors

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from runner.memory.call_stack import CallStack
    from runner.memory.module_stack import ModuleStack


class _BatchRefType(_RefType):
    """Kind of reference that torch's tracker does not have."""

    BATCH = "Batch"


_KINDS: Mapping[_RefType, Kind] = {
    _MemRefType.PARAM: Kind.parameters,
    _MemRefType.BUFFER: Kind.unattributed,
    _MemRefType.GRAD: Kind.gradients,
    _MemRefType.OPT: Kind.optimizer,
    _MemRefType.ACT: Kind.activations,
    _MemRefType.TEMP: Kind.temporaries,
    _MemRefType.OTH: Kind.unattributed,
    _BatchRefType.BATCH: Kind.batch,
}
BATCH = Holder(OUTSIDE, "batch")
"""Holder of the batch and of its noise."""
EXISTING = Holder("", "")
"""Holder of tensors that existed before an update."""
_INDEXED = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)
"""Operations whose results depend on the numbers of a mask."""


def _ignore(total: int) -> None:
    """Receives the bytes after an operation and does nothing."""


class UpdateTracker(MemTracker):  # type: ignore[no-untyped-call]
    """Tracks what holds which bytes, on one device.

    Torch's tracker follows storages from their creation to their end. This one also remembers what
    was running when a storage was made, and counts bytes by kind and holder. A module may be called
    several times in an update, which torch's table of modules does not allow.

    Tensors may be fake: then their numbers are assumed where an operation needs them.

    Args:
        device: Only storages on this device are counted.
        stack: What is running. ``MemTracker`` uses it as its tracker of modules.
        listener: Called with the total of bytes after every operation.
    """

    def __init__(
        self,
        device: torch.device,
        stack: ModuleStack | CallStack,
        listener: Callable[[int], None] = _ignore,
    ) -> None:
        super().__init__()
        self._mod_tracker: Any = stack
        self._stack = stack
        self._device_type = device.type
        self._listener = listener
        self._bytes: dict[tuple[Kind, Holder], int] = defaultdict(int)
        self._holders: dict[_WeakRefInfo, Holder] = {}
        self._owners = WeakIdKeyDictionary()
        """Modules of parameters, by storage."""
        self._hooks: list[RemovableHandle] = []
        self.total = 0
        """Bytes that are in use."""
        self.peak = 0
        self.usage: Usage = {}
        """Bytes at the peak by kind and holder."""

    # --- labels -------------------------------------------------------------------------------

    def label_existing(self, tensors: Iterable[Tensor]) -> None:
        """Labels tensors that are neither parameters nor gradients nor states of optimizers."""
        for tensor in tensors:
            self._label(tensor, _MemRefType.OTH)

    def label_state(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Iterable[optim.Optimizer],
    ) -> None:
        """Labels everything that exists before the first update, and follows gradients.

        Args:
            modules: Modules by name, as a learner returns them.
            optimizers: All of them.
        """
        for info, _ in [*self._WINFO.values()]:  # type: ignore[no-untyped-call]
            self._relabel(info, _MemRefType.OTH)
        for name, module in modules.items():
            for path, submodule in module.named_modules(prefix=name):
                self._label_module(path, submodule)
        for optimizer in optimizers:
            self._track_optimizer_states(_MemRefType.OPT, optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._label(parameter, _MemRefType.PARAM, self._owner(parameter))
                    self.follow_gradient(parameter)

    def _label_module(self, path: str, module: nn.Module) -> None:
        for buffer in module.buffers(recurse=False):
            self._label(buffer, _MemRefType.BUFFER, Holder(OUTSIDE, path))
        for parameter in module.parameters(recurse=False):
            for storage in get_untyped_storages(parameter):
                self._owners.setdefault(storage, path)  # type: ignore[no-untyped-call]
            self._label(parameter, _MemRefType.PARAM, self._owner(parameter))

    def label_batch(self, *trees: Any) -> None:
        """Labels the tensors of a batch, and of its noise."""
        for tensor in stored_tensors(trees):
            self._label(tensor, _BatchRefType.BATCH, BATCH)

    def hold_existing(self) -> None:
        """Attributes everything that exists to no slot and no module."""
        for info in [*self._holders]:
            self._move(info, EXISTING)
        # Gradients stay with the slot that computes them.
        self._owners.clear()

    def follow_gradient(self, parameter: Tensor) -> None:
        """Labels the gradient of a leaf, now and whenever one is computed."""
        self._label_gradient(parameter)
        if parameter.is_leaf and parameter.requires_grad:
            hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._label_gradient
            )
            self._hooks.append(hook)

    def reset_peak(self) -> None:
        """Forgets the peak so far, and counts what is in use now as the next one."""
        self.peak = 0
        self.usage = {}
        self._note_peak()

    def bytes_of(self, kind: Kind) -> int:
        """Returns the bytes of a kind that are in use."""
        return sum(
            size for (used_for, _), size in self._bytes.items() if used_for is kind
        )

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().__exit__(*error)

    def _owner(self, parameter: Tensor) -> Holder | None:
        """Returns the module of a parameter; None if it is not known."""
        storages = get_untyped_storages(parameter)
        paths = [self._owners.get(storage) for storage in storages]  # type: ignore[no-untyped-call]
        path = next((path for path in paths if path is not None), None)
        return None if path is None else Holder(OUTSIDE, path)

    def _label_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._label(parameter.grad, _MemRefType.GRAD, self._owner(parameter))

    def _label(
        self, tensor: Tensor, kind: _RefType, holder: Holder | None = None
    ) -> None:
        for info in self._update_and_maybe_create_winfos(tensor, kind):
            if holder is not None:
                self._move(info, holder)

    def _relabel(self, info: _WeakRefInfo, kind: _RefType) -> None:
        previous = info.reftype
        info.reftype = kind
        self._update_snap(_UpdateType.REF, info, old_reftype=previous)

    def _move(self, info: _WeakRefInfo, holder: Holder) -> None:
        previous = self._holders.get(info)
        if previous is None:
            return
        kind = _KINDS[info.reftype]
        self._bytes[kind, previous] -= info.mem_consumed
        self._bytes[kind, holder] += info.mem_consumed
        self._holders[info] = holder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _number(args[0])
        if func in _INDEXED and any(map(_is_mask, args[1])):
            args = (args[0], _assumed_indices(args[1]), *args[2:])
        options = kwargs or {}
        beside = copied_bytes(func, args, options) - reused_bytes(func, args, options)
        with self._holding(beside):
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def _holding(self, size: int) -> Iterator[None]:
        """Counts temporary copies inside the ``with``.

        Args:
            size: Bytes of the copies; negative for a result that takes the place of an operand.
        """
        if not size or self._device_type != "cpu":
            yield
            return
        holder = self._stack.holder
        self._add(Kind.temporaries, holder, size)
        try:
            yield
        finally:
            self._add(Kind.temporaries, holder, -size)

    # --- what torch's tracker calls -----------------------------------------------------------

    def _update_snap(
        self,
        u_type: _UpdateType,
        winfo: _WeakRefInfo,
        old_mem_consumed: int | None = None,
        old_reftype: _RefType | None = None,
    ) -> None:
        if winfo.device.type != self._device_type:
            return
        kind = _KINDS[winfo.reftype]
        size = winfo.mem_consumed
        holder = self._holders.get(winfo)
        if holder is None:
            holder = self._holders[winfo] = self._stack.holder
            if u_type is not _UpdateType.DEL:
                self._add(kind, holder, size)
        elif u_type is _UpdateType.DEL:
            self._add(kind, holder, -size)
            del self._holders[winfo]
        elif u_type is _UpdateType.REF and old_reftype is not None:
            self._bytes[_KINDS[old_reftype], holder] -= size
            self._bytes[kind, holder] += size
        elif u_type is _UpdateType.SIZE and old_mem_consumed is not None:
            self._add(kind, holder, size - old_mem_consumed)

    def _add(self, kind: Kind, holder: Holder, size: int) -> None:
        self._bytes[kind, holder] += size
        self.total += size

    def _track(self, reftype: _RefType, t: Tensor) -> None:
        # Tensors of an optimizer's step are temporary, except for its state afterwards.
        temporary = reftype is _MemRefType.OPT
        super()._track(_MemRefType.TEMP if temporary else reftype, t)

    def _update_peak_stats(self, peak_state: _State) -> None:
        self._note_peak()
        self._listener(self.total)

    def _note_peak(self) -> None:
        # A copy at each new maximum, because the storages are freed later.
        if self.total > self.peak:
            self.peak = self.total
            self.usage = {key: size for key, size in self._bytes.items() if size}

    def _track_optimizer_states(
        self, reftype: _RefType, optimizer: optim.Optimizer
    ) -> None:
        for parameter, state in optimizer.state.items():
            for tensor in stored_tensors(state):
                self._label(tensor, reftype, self._owner(parameter))

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        # A forward inside a backward is the second one of a checkpointed module.
        if self._mod_tracker.is_bw and self._ac_mod is None:
            self._ac_mod = weakref.ref(module)
            self._in_ac = True

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._ac_mod is not None and self._ac_mod() is module:
            self._ac_mod = None
            self._in_ac = False

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        """Does nothing, because this tracker has no table of modules."""

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        """Does nothing, because this tracker has no table of modules."""


def _is_mask(index: Any) -> bool:
    return isinstance(index, FakeTensor) and index.dtype is torch.bool


def _assumed_indices(indices: Iterable[Any]) -> list[Any]:
    """Returns numbers in the place of masks, as if all in a mask were true."""
    assumed: list[Any] = []
    for index in indices:
        if _is_mask(index):
            numbers = torch.empty(index.numel(), dtype=torch.int64, device=index.device)
            assumed += [numbers] * index.dim()
        else:
            assumed.append(index)
    return assumed


def _number(tensor: Tensor) -> Any:
    """Returns the number of a tensor; one without numbers is taken to hold one."""
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return tensor.item()
    if tensor.constant is not None:
        return tensor.constant.item()
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1
