"""Batches that never repeat within a measurement, so that remembering one gains nothing."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.proof.difference import digest
from runner.proof.trees import clones, leaves, map_named, named_tensors
from runner.system.tensor_trees import has_arithmetic

POOL = 16
"""Batches from which further ones are made if a callable or an iterator has repeated one."""
SHRINKAGE = 1e-3
"""Largest share by which numbers become smaller where samples cannot be exchanged."""
ATTEMPTS = 20


class FreshBatches:
    """Draws batches that all have different content.

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
        ValueError: There is no batch, or no further batch can be made of the given ones.
    """

    def __init__(
        self,
        batches: Sequence[Any] | Iterable[Any] | Callable[[], Any],
        *,
        may_repeat: bool = False,
    ) -> None:
        self._may_repeat = may_repeat
        self._source = _endless(batches)
        self._pool: deque[Any] = deque(maxlen=POOL)
        self._digests: set[bytes] = set()
        self._generator = torch.Generator().manual_seed(0)
        self._mixes = True
        self._source_count = 0
        self._is_mixed = False

    def draw(self) -> Any:
        """Returns a batch in separate memory, with a content that no batch had before."""
        self._is_mixed = False
        source_batch = next(self._source, _EXHAUSTED)
        if source_batch is not _EXHAUSTED:
            self._source_count += 1
            # Copies, because a loader may reuse the memory of its batches, and a step may write
            # into it.
            self._pool.append(clones(source_batch))
            # Without a batch, the step draws its data itself.
            if source_batch is None:
                return None
            batch = clones(source_batch)
            if self._is_new(batch):
                return batch
        if not self._pool:
            raise ValueError(
                "batches: there is none, and a measurement needs one at least"
            )
        if all(batch is None for batch in self._pool):
            return None
        for attempt in range(ATTEMPTS):
            shrinks_integers = attempt > ATTEMPTS // 2
            batch = self._make(shrinks=attempt > 0, shrinks_integers=shrinks_integers)
            if self._is_new(batch):
                return batch
        if self._may_repeat:
            return clones(self._pool[-1])
        raise ValueError(
            f"batches: {self._source_count} are too few for steps that never get the same one "
            "again, and no further ones can be made of them; give a function that returns a new "
            "batch at each call"
        )

    def give(self, step: Callable[[Any], object], batch: Any) -> None:
        """Makes a step with the batch drawn last; if it fails and samples were mixed, they are
        not mixed any more.
        """
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
            batch = self._make(shrinks=False)
            if self._is_mixed:
                self.give(step, batch)

    def _is_new(self, batch: Any) -> bool:
        content = hashlib.sha1(usedforsecurity=False)
        for name, value in leaves(batch):
            # Names count, because tensors may exchange their contents.
            content.update(name.encode(errors="surrogatepass"))
            content.update(digest(value))
        identity = content.digest()
        is_new = identity not in self._digests
        self._digests.add(identity)
        return is_new

    def _make(self, *, shrinks: bool, shrinks_integers: bool = False) -> Any:
        """Returns a batch made of one or two earlier ones.

        Args:
            shrinks: Whether floating-point numbers become smaller.
            shrinks_integers: Whether tensors that contain integers only become smaller, too.
        """
        first = self._draw_from_pool()
        second = self._draw_from_pool()
        if _form(second) != _form(first):
            second = first
        rows = _rows(first)
        self._is_mixed = rows > 1 and self._mixes
        if self._is_mixed:
            order = torch.randperm(2 * rows, generator=self._generator)[:rows]
            mixed = _map_pairs(partial(_take, order), first, second)
        else:
            mixed = self._reordered(first)
            shrinks = True
        if not shrinks:
            return mixed

        def shrink(value: Tensor, _: Tensor) -> Tensor:
            return self._shrunk(value, shrinks_integers)

        return _map_pairs(shrink, mixed, mixed)

    def _draw_from_pool(self) -> Any:
        number = torch.randint(len(self._pool), (), generator=self._generator)
        return self._pool[int(number)]

    def _shrunk(self, value: Tensor, shrinks_integers: bool) -> Tensor:
        if not has_arithmetic(value) or value.layout != torch.strided:
            return value.detach().clone()
        if not shrinks_integers and bool((value == value.round()).all()):
            return value.detach().clone()
        share = max(SHRINKAGE, 4 * torch.finfo(value.dtype).eps)
        factor = 1 - share * torch.rand(value.shape, generator=self._generator)
        return value.detach() * factor.to(value)

    def _reordered(self, batch: Any) -> Any:
        """Puts single sequences of integers in another order, the same for all tensors."""
        values = list(named_tensors(batch).values())
        lengths = {value.shape[-1] for value in values if value.ndim}
        has_floats = any(value.is_floating_point() for value in values)
        has_rows = any(len(value) > 1 for value in values if value.ndim > 1)
        if has_floats or has_rows or len(lengths) != 1:
            return batch
        order = torch.randperm(lengths.pop(), generator=self._generator)

        def reorder(value: Tensor, _: Tensor) -> Tensor:
            return value[..., order.to(value.device)] if value.ndim else value.clone()

        return _map_pairs(reorder, batch, batch)


_EXHAUSTED = object()


def _endless(
    batches: Sequence[Any] | Iterable[Any] | Callable[[], Any],
) -> Iterator[Any]:
    """Returns the source as an iterator, which starts a loader again at its end."""
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


def _rows(batch: Any) -> int:
    """Returns the number of samples; 0 if tensors have different first dimensions, or there is
    none.
    """
    counts = set()
    for value in named_tensors(batch).values():
        if not value.ndim:
            continue
        if value.layout != torch.strided:
            return 0
        counts.add(len(value))
    return counts.pop() if len(counts) == 1 else 0


def _form(batch: Any) -> list[Any]:
    """Returns names, types and shapes: batches with the same form can exchange samples."""
    form: list[Any] = []
    for name, leaf in leaves(batch, has_means=False):
        if isinstance(leaf, Tensor):
            form.append((name, leaf.dtype, leaf.shape))
        else:
            form.append((name, repr(leaf)))
    return form


def _take(order: Tensor, first: Tensor, second: Tensor) -> Tensor:
    if not first.ndim:
        return first.clone()
    return torch.cat([first, second])[order.to(first.device)]


def _map_pairs(
    change: Callable[[Tensor, Tensor], Tensor], first: Any, second: Any
) -> Any:
    """Applies a function to the tensors and arrays of two trees of one form, as tensors."""
    seconds = named_tensors(second)

    def changed(name: str, value: Tensor) -> Tensor:
        return change(value, seconds[name]).requires_grad_(value.requires_grad)

    return map_named(changed, first)
