"""Trees of tensors: mappings, lists and tuples in one another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def children(tree: Any) -> Mapping[Any, Any] | None:
    """What is directly in a mapping, list or tuple, by key; None of anything else."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        return dict(tree._asdict())
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    return tree if isinstance(tree, Mapping) else None  # which takes ten times as long to ask


def leaves(
    tree: Any, path: str = "", inside: Callable[[Any], Mapping[Any, Any] | None] = children
) -> Iterator[tuple[str, Any]]:
    """Everything in a tree in which nothing is, with its dotted path; ``inside`` says what is in a thing."""
    found = inside(tree)
    if found is None:
        yield path, tree
    else:
        for key, child in found.items():
            yield from leaves(child, f"{path}.{key}" if path else str(key), inside)


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
    """The same tree with every tensor changed; what is no tensor stays the same object."""
    import torch

    return map_leaves(change, tree, (torch.Tensor,))


def map_leaves(change: Callable[[Any], Any], tree: Any, types: tuple[type, ...]) -> Any:
    """The same tree with everything of these types changed, in order; the rest stays the same object."""
    if isinstance(tree, types):
        return change(tree)
    if isinstance(tree, MutableMapping):
        result = copy.copy(tree)
        for key, child in tree.items():
            result[key] = map_leaves(change, child, types)
        return result
    if isinstance(tree, list | tuple):
        make = getattr(tree, "_make", type(tree))  # a named tuple takes its fields one by one
        return make([map_leaves(change, child, types) for child in tree])
    return tree
