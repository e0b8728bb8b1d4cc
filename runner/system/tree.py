"""Trees of tensors: dictionaries, lists and tuples in one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def children(tree: Any) -> dict[Any, Any] | None:
    """What is directly in a dictionary, list or tuple, by key; None of anything else."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        return dict(tree._asdict())
    return dict(enumerate(tree)) if isinstance(tree, list | tuple) else None


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a tree that is no dictionary, list or tuple, with its dotted path."""
    inside = children(tree)
    if inside is None:
        yield path, tree
    else:
        for key, child in inside.items():
            yield from leaves(child, f"{path}.{key}" if path else str(key))


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in a tree, in order."""
    import torch

    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with every tensor changed; what is no tensor stays the same object."""
    import torch

    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(change, child) for key, child in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(change, child) for child in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(change, child) for child in tree)
    return tree
