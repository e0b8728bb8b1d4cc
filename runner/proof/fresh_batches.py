"""Batches that never repeat within a measurement, so that remembering one gains nothing."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.proof.difference import digest
from runner.proof.subject_states import leaves
from runner.system import tensor_trees

POOL = 16
"""Batches from which further ones are drawn where a callable or an iterator has repeated one."""
SHRINKAGE = 1e-3
"""Largest share by which numbers become smaller where samples cannot be exchanged."""
ATTEMPTS = 20


class FreshBatches:
    """Draws batches of which no two have the same content.

    Batches come from the given source first. When that is exhausted, or repeats itself, further
    batches are made of earlier ones. Samples (rows of the first dimension, if all tensors have the
    same number of them) are mixed at random, unless a step cannot use such a batch. Where samples
    cannot be mixed, floating-point numbers become smaller by up to a thousandth, except in tensors
    that contain integers only; a single sequence of integers is put in another order.

    Args:
        batches: A sequence of batches, an iterable or iterator of them, or a function that returns
            a new batch at each call. ``None`` as a batch is returned again and again.
        may_repeat: Whether a batch may come again where no new one can be made: for the source of a
            recipe, which then gives a training the same ones, too.

    Raises:
        ValueError: There is no batch, or no further batch can be made of those given.
    """

    def __init__(self, batches: Sequence[Any] | Iterable[Any] | Callable[[], Any], *, may_repeat: bool = False) -> None:
        self._may_repeat = may_repeat
        self._source = _endless(batches)
        self._pool: deque[Any] = deque(maxlen=POOL)
        self._digests: set[bytes] = set()
        self._generator = torch.Generator().manual_seed(0)
        self._mixes = True
        self._given = 0
        self._is_mixed = False

    def draw(self) -> Any:
        """Returns a batch in separate memory, with a content that no batch had before."""
        self._is_mixed = False
        given = next(self._source, _EXHAUSTED)
        if given is not _EXHAUSTED:
            self._given += 1
            self._pool.append(_copy(given))
            if given is None:  # the step draws its data itself
                return None
            batch = _copy(given)
            if self._is_new(batch):
                return batch
        if not self._pool:
            raise ValueError("batches: there is none, and a measurement needs one at least")
        if all(batch is None for batch in self._pool):
            return None
        for attempt in range(ATTEMPTS):
            batch = self._made(shrinks=attempt > 0, whole=attempt > ATTEMPTS // 2)
            if self._is_new(batch):
                return batch
        if self._may_repeat:
            return _copy(self._pool[-1])
        raise ValueError(
            f"batches: {self._given} are too few for steps that never get the same one again, and no "
            "further ones can be made of them; give a function that returns a new batch at each call"
        )

    def give(self, step: Callable[[Any], object], batch: Any) -> None:
        """Makes a step with the batch drawn last; if it fails and samples were mixed, they are not mixed any more."""
        if not self._is_mixed:
            step(batch)
            return
        try:
            step(batch)
        except Exception:
            # Some steps need samples in an order (packed sequences), or labels that are missing in
            # a mixture.
            self._mixes = False
            step(self.draw())

    def probe(self, step: Callable[[Any], object]) -> None:
        """Makes a step with a batch of mixed samples, if further batches will be made that way."""
        if any(batch is not None for batch in self._pool):
            batch = self._made(shrinks=False)
            if self._is_mixed:
                self.give(step, batch)

    def _is_new(self, batch: Any) -> bool:
        content = hashlib.sha1(usedforsecurity=False)
        for name, value in leaves(batch):
            content.update(name.encode(errors="surrogatepass"))
            content.update(digest(value))
        known = content.digest() in self._digests
        self._digests.add(content.digest())
        return not known

    def _made(self, *, shrinks: bool, whole: bool = False) -> Any:
        """Returns a batch made of one or two that were given, if needed with changed integers."""
        first = self._pool[self._below(len(self._pool))]
        second = self._pool[self._below(len(self._pool))]
        if _form(second) != _form(first):
            second = first
        rows = _rows(first)
        self._is_mixed = rows > 1 and self._mixes
        if self._is_mixed:
            order = torch.randperm(2 * rows, generator=self._generator)[:rows]
            mixed = _map_pairs(lambda one, other: _take(one, other, order), first, second)
        else:
            mixed = self._reordered(first)
            shrinks = True
        return _map_pairs(lambda one, _: self._shrunk(one, whole), mixed, mixed) if shrinks else mixed

    def _below(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self._generator))

    def _shrunk(self, value: Tensor, whole: bool) -> Tensor:
        is_dense = value.is_floating_point() and value.layout == torch.strided
        if not is_dense or (not whole and bool((value == value.round()).all())):
            return value.detach().clone()
        share = max(SHRINKAGE, 4 * torch.finfo(value.dtype).eps)
        factor = 1 - share * torch.rand(value.shape, generator=self._generator)
        return value.detach() * factor.to(value)

    def _reordered(self, batch: Any) -> Any:
        """Puts single sequences of integers in another order, the same for all tensors."""
        lengths = {value.shape[-1] for value in _arrays(batch) if value.ndim}
        has_floats = any(torch.as_tensor(value).is_floating_point() for value in _arrays(batch))
        if has_floats or len(lengths) != 1 or any(len(value) > 1 for value in _arrays(batch) if value.ndim > 1):
            return batch
        order = torch.randperm(lengths.pop(), generator=self._generator)

        def reorder(value: Tensor, _: Tensor) -> Tensor:
            return value[..., order.to(value.device)] if value.ndim else value.clone()

        return _map_pairs(reorder, batch, batch)


_EXHAUSTED = object()


def _endless(batches: Sequence[Any] | Iterable[Any] | Callable[[], Any]) -> Iterator[Any]:
    """The source as an iterator; an iterable that can be started again (a loader) is."""
    if callable(batches) and not isinstance(batches, Iterable):
        return iter(batches, _EXHAUSTED)
    if isinstance(batches, Sequence | Iterator):
        return iter(batches)
    return _restarted(batches)


def _restarted(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty:
            return


def _arrays(batch: Any) -> Iterator[Any]:
    for _, leaf in tensor_trees.leaves(batch):
        if isinstance(leaf, Tensor | np.ndarray):
            yield leaf


def _rows(batch: Any) -> int:
    """The number of samples; 0 if tensors have different first dimensions, or there is none."""
    arrays = [value for value in _arrays(batch) if value.ndim]
    if any(isinstance(value, Tensor) and value.layout != torch.strided for value in arrays):
        return 0
    counts = {len(value) for value in arrays}
    return counts.pop() if len(counts) == 1 else 0


def _form(batch: Any) -> list[Any]:
    """Names, types and shapes: batches with the same form can exchange samples."""
    form = []
    for name, leaf in tensor_trees.leaves(batch):
        is_array = isinstance(leaf, Tensor | np.ndarray)
        form.append((name, leaf.dtype, leaf.shape) if is_array else (name, repr(leaf)))
    return form


def _take(one: Tensor, other: Tensor, order: Tensor) -> Tensor:
    return torch.cat([one, other])[order.to(one.device)] if one.ndim else one.clone()


def _copy(batch: Any) -> Any:
    return _map_pairs(lambda one, _: one.detach().clone(), batch, batch)


def _map_pairs(change: Callable[[Tensor, Tensor], Tensor], first: Any, second: Any) -> Any:
    """Applies a function to the tensors and arrays of two trees of one form, as tensors."""
    others = _arrays(second)

    def changed(value: Any) -> Any:
        other = next(others)
        if isinstance(value, np.ndarray):
            return change(torch.from_numpy(value), torch.from_numpy(other)).numpy()
        return change(value, other).requires_grad_(value.requires_grad)

    return tensor_trees.map_leaves(changed, first, (Tensor, np.ndarray))
