"""Bytes of an update by kind and by module, at the moment when most are in use."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

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
from torch.distributed._tools.mod_tracker import ModTracker
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from runner.memory.kinds import Kind, Usage
from runner.system.tree import stored_tensors


class _Modules(ModTracker):
    """Follows modules also in gradients with respect to a leaf, such as a penalty's."""

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:  # noqa: A002 (torch's name)
        # No hook may wait for the gradient of a leaf while torch.autograd.grad computes one.
        super()._fw_pre_hook(mod, tree_map_only(Tensor, _without_leaf, input))  # type: ignore[no-untyped-call]


def _without_leaf(tensor: Tensor) -> Tensor | None:
    return None if tensor.is_leaf else tensor


class _BatchRefType(_RefType):
    """Kind of reference that torch's tracker does not have."""

    BATCH = "Batch"


_KINDS: Mapping[_RefType, Kind] = {
    _MemRefType.PARAM: Kind.parameters,
    _MemRefType.BUFFER: Kind.other,
    _MemRefType.GRAD: Kind.gradients,
    _MemRefType.OPT: Kind.optimizer,
    _MemRefType.ACT: Kind.activations,
    _MemRefType.TEMP: Kind.temporaries,
    _MemRefType.OTH: Kind.other,
    _BatchRefType.BATCH: Kind.batch,
}
BATCH = "batch"
"""Holder of the batch and of its noise."""
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default)
"""Operations whose results depend on the numbers of a mask."""
OUTSIDE = "update"
"""Holder of what is made while no module is active."""


class UpdateTracker(MemTracker):  # type: ignore[no-untyped-call]
    """Tracks which module holds which bytes, on one device.

    Torch's tracker follows storages from their creation to their end. This one also remembers the
    module that was active when a storage was made, and counts bytes by kind and module. A module
    may be called several times in an update, which torch's own table of modules does not allow.

    Args:
        device: Only storages on a device of this type are counted.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._mod_tracker = _Modules()  # type: ignore[no-untyped-call]
        self._device_type = device.type
        self._bytes: dict[tuple[Kind, str], int] = defaultdict(int)
        self._holders: dict[_WeakRefInfo, str] = {}
        self._total = 0
        self._owners = WeakIdKeyDictionary()
        """Modules of parameters, by storage."""
        self.peak = 0
        self.usage: Usage = {}
        """Bytes at the peak by kind and holder."""

    # --- labels -------------------------------------------------------------------------------

    def label_state(self, modules: Mapping[str, nn.Module], optimizers: Iterable[optim.Optimizer]) -> None:
        """Labels everything that exists before the first update, and follows gradients from then on.

        Args:
            modules: Modules by name, as a learner returns them.
            optimizers: All of them.
        """
        for info, _ in [*self._WINFO.values()]:  # type: ignore[no-untyped-call]
            self._relabel(info, _MemRefType.OTH)
        for name, module in modules.items():
            self._mod_tracker._known_modules[module] = name
            self._mod_tracker._get_mod_name(module)  # type: ignore[no-untyped-call]
            for path, part in module.named_modules(prefix=name):
                self._label_module(path, part)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._label(parameter, _MemRefType.PARAM, self._owner(parameter))
                    self._follow_gradient(parameter)

    def _label_module(self, path: str, module: nn.Module) -> None:
        for buffer in module.buffers(recurse=False):
            self._label(buffer, _MemRefType.BUFFER, path)
        for parameter in module.parameters(recurse=False):
            for storage in get_untyped_storages(parameter):
                self._owners.setdefault(storage, path)  # type: ignore[no-untyped-call]
            self._label(parameter, _MemRefType.PARAM, self._owner(parameter))

    def label_batch(self, *trees: Any) -> None:
        """Labels the tensors of a batch, and of its noise."""
        for tensor in stored_tensors(trees):
            self._label(tensor, _BatchRefType.BATCH, BATCH)

    def reset_peak(self) -> None:
        """Forgets the peak so far."""
        self.peak = 0
        self.usage = {}

    def _owner(self, parameter: Tensor) -> str:
        owners = (self._owners.get(storage) for storage in get_untyped_storages(parameter))  # type: ignore[no-untyped-call]
        return next((owner for owner in owners if owner is not None), OUTSIDE)

    def _follow_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._label(parameter.grad, _MemRefType.GRAD, self._owner(parameter))
        if parameter.is_leaf and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._label_gradient)  # type: ignore[no-untyped-call]

    def _label_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._label(parameter.grad, _MemRefType.GRAD, self._owner(parameter))

    def _label(self, tensor: Tensor, kind: _RefType, holder: str | None = None) -> None:
        for info in self._update_and_maybe_create_winfos(tensor, kind):
            if holder is not None:
                self._move(info, holder)

    def _relabel(self, info: _WeakRefInfo, kind: _RefType) -> None:
        previous = info.reftype
        info.reftype = kind
        self._update_snap(_UpdateType.REF, info, old_reftype=previous)

    def _move(self, info: _WeakRefInfo, holder: str) -> None:
        previous = self._holders.get(info)
        if previous is None:
            return
        kind = _KINDS[info.reftype]
        self._bytes[kind, previous] -= info.mem_consumed
        self._bytes[kind, holder] += info.mem_consumed
        self._holders[info] = holder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _number(args[0])
        if func in _INDEXED and any(map(_is_mask, args[1])):
            args = (args[0], _assumed_indices(args[1]), *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

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
            holder = self._holders[winfo] = self._active()
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

    def _add(self, kind: Kind, holder: str, size: int) -> None:
        self._bytes[kind, holder] += size
        self._total += size

    def _active(self) -> str:
        """Returns the innermost module that computes, forward or backward."""
        names = self._mod_tracker.parents - {"Global"}
        return max(names, key=lambda name: name.count("."), default=OUTSIDE)

    def _track(self, reftype: _RefType, t: Tensor) -> None:
        # What an optimizer makes in a step is temporary, except for what is its state afterwards.
        super()._track(_MemRefType.TEMP if reftype is _MemRefType.OPT else reftype, t)

    def _update_peak_stats(self, peak_state: _State) -> None:
        if self._total > self.peak:
            self.peak = self._total
            self.usage = {key: size for key, size in self._bytes.items() if size}

    def _track_optimizer_states(self, reftype: _RefType, optimizer: optim.Optimizer) -> None:
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
        """Does nothing: modules have no tables of their own."""

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        """Does nothing: modules have no tables of their own."""


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
