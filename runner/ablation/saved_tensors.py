"""Bytes that autograd holds for a backward pass, counted exactly as they are saved and released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from runner.memory.call_stack import CallStack
from runner.memory.kinds import Holder


class _Saved:
    """Saved tensor that stops counting when autograd releases it."""

    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._release = release

    def __del__(self) -> None:
        self._release()


class SavedTensors:
    """Counts the storages that are held for backward, each once, by slot and module.

    Not counted are parameters and buffers, which exist anyway, and the batch with its noise. Not
    seen are the tensors that a checkpoint computes again during the backward pass, because it
    keeps them itself.

    Args:
        stack: The stack whose labels are on the pipeline's slots.
        excluded: Tensors whose storages are not counted.
    """

    def __init__(self, stack: CallStack, excluded: Iterable[Tensor]) -> None:
        self._stack = stack
        self._excluded = {
            address for tensor in excluded if (address := _address(tensor))
        }
        self._references: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._holders: dict[int, Holder] = {}
        self.held = 0
        self.peak = 0
        self.peak_holders: Counter[Holder] = Counter()

    def measure(self, update: Callable[[], object]) -> int:
        """Runs one update and returns the most bytes that were held at one moment of it."""
        with ExitStack() as contexts:
            contexts.enter_context(self._stack.watching())
            contexts.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            )
            update()
        return self.peak

    def _pack(self, tensor: Tensor) -> Any:
        address = _address(tensor)
        # The wrapper costs time, so what is not counted goes without one.
        if address is None or address in self._excluded:
            return tensor
        self._references[address] += 1
        # Several operators may save one storage, also as different views.
        if self._references[address] == 1:
            size = tensor.untyped_storage().nbytes()
            self._sizes[address] = size
            self._holders[address] = self._stack.holder
            self._add(size)
        return _Saved(tensor, lambda: self._let_go(address))

    def _add(self, size: int) -> None:
        self.held += size
        if self.held > self.peak:
            self.peak = self.held
            self.peak_holders = Counter()
            for address, holder in self._holders.items():
                self.peak_holders[holder] += self._sizes[address]

    def _let_go(self, address: int) -> None:
        self._references[address] -= 1
        if not self._references[address]:
            del self._references[address]
            del self._holders[address]
            self.held -= self._sizes.pop(address)

    def _unpack(self, saved: Any) -> Tensor:
        tensor: Tensor = saved.tensor if isinstance(saved, _Saved) else saved
        return tensor


def _address(tensor: Tensor) -> int | None:
    """Returns the address of a storage; None for sparse tensors and empty storages."""
    if tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or None
