"""Trees of tensors: mappings, lists and tuples in one another; and which of their entries have one row per sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    Index = slice | Tensor

_DESCRIBED = 12
"""Tensors of a tree that a message names."""


def children(tree: Any) -> Mapping[Any, Any] | None:
    """Returns the children of a mapping, list or tuple, by key; None for anything else."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        return dict(tree._asdict())
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    return tree if _is_mapping(tree.__class__) else None


@cache
def _is_mapping(kind: type) -> bool:
    """Returns whether a type is one of mappings; the check takes ten times as long as the others."""
    return issubclass(kind, Mapping)


def leaves(
    tree: Any, path: str = "", inside: Callable[[Any], Mapping[Any, Any] | None] = children
) -> Iterator[tuple[str, Any]]:
    """Yields every leaf of a tree with its dotted path; ``inside`` returns the children of a
    node.
    """
    # A stack instead of recursion: a leaf would pass through a generator for every level above it.
    remaining = [(path, tree)]
    while remaining:
        path, node = remaining.pop()
        items = inside(node)
        if items is None:
            yield path, node
            continue
        nodes = [(_joined(path, key), child) for key, child in items.items()]
        nodes.reverse()
        remaining += nodes


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in a tree, in order."""
    import torch

    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def stored_tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in a tree as they are in memory: of one that is made of others (integers and their scale), those."""
    for tensor in tensors(tree):
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from stored_tensors([getattr(tensor, name) for name in names])
        else:
            yield tensor


def nbytes(tree: Any) -> int:
    """Bytes of the tensors in a tree, as they are in memory."""
    return sum(tensor.nbytes for tensor in stored_tensors(tree))


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns the same tree with every tensor changed; other values stay the same objects."""
    import torch

    return map_leaves(change, tree, (torch.Tensor,))


def map_leaves(change: Callable[[Any], Any], tree: Any, types: tuple[type, ...]) -> Any:
    """Returns the same tree with all values of these types changed, in order; others
    stay the same objects.
    """
    if isinstance(tree, types):
        return change(tree)
    if isinstance(tree, MutableMapping):
        result = copy.copy(tree)
        for key, child in tree.items():
            result[key] = map_leaves(change, child, types)
        return result
    if isinstance(tree, list | tuple):
        # A named tuple takes its fields one by one.
        make = getattr(tree, "_make", type(tree))
        return make([map_leaves(change, child, types) for child in tree])
    return tree


def real_numbers(tensor: Tensor) -> Tensor:
    """Returns a dense tensor of real numbers: complex numbers as pairs of them, quantised ones as the
    numbers that they stand for.
    """
    import torch

    if tensor.is_quantized:
        return tensor.dequantize()
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def stored_numbers(tensor: Tensor) -> Tensor:
    """Returns the numbers of a tensor, of a sparse one those that it stores; all others are zero."""
    import torch

    if tensor.layout == torch.strided:
        return tensor
    # A tensor of coordinates may have several summands of one number.
    return tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()


def as_float64(value: Any) -> Tensor:
    """Returns a number or a tensor of numbers as a tensor of float64 (complex: pairs of them) on
    the host.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        # Without a type, torch would round a number to its default type.
        is_complex = isinstance(value, complex)
        value = torch.tensor(value, dtype=torch.complex128 if is_complex else torch.float64)
    return real_numbers(value.detach()).to("cpu", torch.float64)


def has_arithmetic(tensor: Tensor) -> bool:
    """Returns whether it holds floating-point numbers with which torch computes: more than 8 bits."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def widened(tensor: Tensor) -> Tensor:
    """Returns a tensor of float64 or complex128 if it holds floating-point or complex numbers; those
    of 8 bits stay, because code that uses them converts them.
    """
    import torch

    if has_arithmetic(tensor) or tensor.is_complex():
        return tensor.to(torch.promote_types(tensor.dtype, torch.float64))
    return tensor


def summable(value: Any) -> Any:
    """Returns a number or a tensor in a type for sums: integers and truth values in int64,
    floating-point numbers of fewer bits in float32.

    torch adds truth values by OR; sums in uint8 wrap around, and those in 16 bits lose digits.
    """
    import torch

    if not isinstance(value, torch.Tensor) or value.is_complex():
        return value
    if value.is_floating_point():
        return value.float() if value.dtype.itemsize < torch.float32.itemsize else value
    return value.to(torch.int64)


@dataclass(frozen=True)
class BatchLayout:
    """Entries of a batch without one row per sample; all others have one row per sample.

    A number without dimensions and any other value without rows belongs to the entire batch.

    Attributes:
        shared: Dotted names of entries that belong to the entire batch (a table, a mask
            over positions).
        columns: Dotted names of tensors whose dimension 1 is the samples.
        lists: Dotted names of lists with one item per sample. A list of strings or
            numbers need not be named.
        unknown: Dotted names of entries that may be either; a batch with such an entry
            is never cut.
        totals: Dotted names of numbers without dimensions that grow with the samples,
            such as a count of tokens.
    """

    shared: Collection[str] = frozenset()
    columns: Collection[str] = frozenset()
    lists: Collection[str] = frozenset()
    unknown: Collection[str] = frozenset()
    totals: Collection[str] = frozenset()

    def size(self, batch: Any) -> int:
        """Number of samples of a batch: the rows of its first entry that has rows."""
        # Rows of an entry that may belong to the entire batch need not be those of samples.
        entries = iter(sorted(self._entries(batch, ""), key=lambda entry: entry[0] in self.unknown))
        sizes = (entry.shape[1] if name in self.columns else len(entry) for name, entry in entries)
        size = next(sizes, None)
        if size is None:
            raise ValueError("no entry of the batch has one row per sample, so its size is unknown")
        return size

    def take(self, batch: Any, index: Index, size: int | None = None) -> Any:
        """Returns a batch of the samples with these numbers.

        Args:
            batch: The batch.
            index: A slice, or the numbers of samples, on any device.
            size: Number of samples of the batch; None infers it.

        Raises:
            ValueError: An entry has not one row per sample.
        """
        return _taken(self, batch, index, self.size(batch) if size is None else size, "")

    def _entries(self, tree: Any, name: str) -> Iterator[tuple[str, Any]]:
        """Entries with one row per sample, by dotted name."""
        if name in self.shared or self._is_empty(tree, name):
            return
        if name in self.unknown or self._has_rows(tree, name):
            yield name, tree
            return
        for key, child in (children(tree) or {}).items():
            yield from self._entries(child, _joined(name, key))

    def _is_empty(self, entry: Any, name: str) -> bool:
        """Returns whether all parts of an entry are the same, because it has no rows."""
        import torch

        return name in self.unknown and isinstance(entry, torch.Tensor) and entry.shape[:1] == (0,)

    def _has_rows(self, entry: Any, name: str) -> bool:
        import torch

        if isinstance(entry, torch.Tensor):
            return entry.dim() > 0
        if not isinstance(entry, list | tuple) or hasattr(entry, "_fields"):
            return False
        return name in self.lists or (bool(entry) and not any(map(_is_nested, entry)))


def _is_nested(item: Any) -> bool:
    import torch

    return isinstance(item, torch.Tensor) or children(item) is not None


def _taken(layout: BatchLayout, tree: Any, index: Index, size: int, name: str) -> Any:
    if name in layout.shared or layout._is_empty(tree, name):
        return tree
    if name in layout.unknown:
        raise ValueError(f"'{name}' may not have one row per sample")
    if name in layout.columns:
        if tree.shape[1] != size:
            raise ValueError(f"'{name}' has {tree.shape[1]:,} columns in a batch of {size:,} samples")
        return _rows(tree.movedim(1, 0), index).movedim(0, 1)
    if layout._has_rows(tree, name):
        if len(tree) != size:
            raise ValueError(f"'{name}' has {len(tree):,} rows in a batch of {size:,} samples")
        return _rows(tree, index)
    if isinstance(tree, MutableMapping):
        result = copy.copy(tree)
        for key, child in tree.items():
            result[key] = _taken(layout, child, index, size, _joined(name, key))
        return result
    if isinstance(tree, list | tuple):
        make = getattr(tree, "_make", type(tree))
        items = (children(tree) or {}).items()
        return make([_taken(layout, item, index, size, _joined(name, key)) for key, item in items])
    return tree


def _rows(entry: Any, index: Index) -> Any:
    import torch

    if isinstance(entry, torch.Tensor):
        return entry[index if isinstance(index, slice) else index.to(entry.device)]
    if isinstance(index, slice):
        return entry[index]
    return type(entry)(entry[number] for number in index.tolist())


def inferred_layout(batch: Any, repeat: Callable[[int], Any]) -> BatchLayout:
    """Infers a layout from batches of different sizes.

    Args:
        batch: A batch of one sample.
        repeat: Makes a batch of one sample, repeated that many times.
    """
    try:
        double = repeat(2)
    except Exception:
        # Some data can only be trained on sample by sample. Such batches need not be cut.
        return BatchLayout(unknown={""})
    differences = list(_differences(batch, double, ""))
    names: dict[str, set[str]] = {kind: set() for kind in ("shared", "lists", "unknown", "rows", "totals")}
    for kind, name in differences:
        names[kind].add(name)
    # Data that ignore which samples are requested consist of one sample (a graph).
    if not (names["lists"] or names["unknown"] or names["rows"]):
        return BatchLayout()
    return BatchLayout(
        shared=frozenset(names["shared"]),
        lists=frozenset(names["lists"]),
        unknown=frozenset(names["unknown"]),
        totals=frozenset(names["totals"]),
    )


def _differences(single: Any, double: Any, name: str) -> Iterator[tuple[str, str]]:
    """Compares a batch of one sample with one of two.

    Yields:
        For every entry, the attribute of ``BatchLayout`` to which its dotted name belongs, or "rows".
    """
    import torch

    if isinstance(single, torch.Tensor) and isinstance(double, torch.Tensor):
        if single.dim() or double.dim():
            yield _tensor_difference(single, double), name
        elif not torch.equal(single, double):
            yield "totals", name
        return
    if isinstance(single, int | float) and single != double:
        yield "totals", name
        return
    entries = children(single)
    double_entries = children(double)
    if entries is None or double_entries is None:
        return
    is_list = isinstance(single, list | tuple) and not hasattr(single, "_fields")
    if is_list and len(entries) == 1 and len(double_entries) == 2:
        yield "lists", name
    elif entries.keys() != double_entries.keys():
        yield "unknown", name
    elif is_list and entries and not any(map(_is_nested, entries.values())):
        yield "shared", name
    else:
        for key, child in entries.items():
            yield from _differences(child, double_entries[key], _joined(name, key))


def _tensor_difference(single: Tensor, double: Tensor) -> str:
    if single.shape[:1] == (1,) and double.shape[:1] == (2,) and single.shape[1:] == double.shape[1:]:
        return "rows"
    # Other samples may have elements in it, one after another.
    if single.shape != double.shape or not single.numel():
        return "unknown"
    return "shared"


def described(tree: Any) -> str:
    """The tensors of a tree by name, with their types and shapes, for a message."""
    descriptions = [f"{name} {_description(leaf)}".strip() for name, leaf in leaves(tree)]
    hidden = len(descriptions) - _DESCRIBED
    if hidden > 0:
        descriptions[_DESCRIBED:] = [f"and {hidden} more"]
    return ", ".join(descriptions) or "empty"


def _description(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return type(leaf).__name__


def same_tensors(first: Any, second: Any) -> bool:
    """Returns whether two trees have the same tensors, to the bit."""
    import torch

    first_tensors = list(tensors(first))
    second_tensors = list(tensors(second))
    if len(first_tensors) != len(second_tensors):
        return False
    pairs = zip(first_tensors, second_tensors, strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
