"""Batches and states as trees: their leaves, copies, and copies with other numbers.

Nodes are mappings, sequences, dataclasses and objects. Arrays of numbers count as tensors.
"""

from __future__ import annotations

import copy
import re
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.plugin.contract import Mean
from runner.plugin.ring import Ring
from runner.system import tensor_trees
from runner.system.tensor_trees import has_arithmetic, summable, widened

# The types of most leaves.
_LEAVES = frozenset({Tensor, nn.Parameter, float, int, bool, str, type(None)})
# Types of leaves that are yielded as they are.
_VALUES = Tensor | bool | int | float | complex | str | bytes | None
# Objects that are defined by their name.
_NAMED = type | FunctionType | BuiltinFunctionType | MethodType | ModuleType
_WITHOUT_CONTENTS = _VALUES | _NAMED
_SETS = (set, frozenset)
# Times that the contents of one object are yielded.
_MOST_VISITS = 8
# Settings of an optimizer's implementation, which stay.
IMPLEMENTATION_SETTINGS = ("foreach", "fused", "capturable", "differentiable")
_IMPLEMENTATION_SETTING = re.compile(
    rf"param_groups\.\d+\.({'|'.join(IMPLEMENTATION_SETTINGS)})$"
)


def leaves(
    value: Any, path: str = "", *, has_means: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yields every leaf of a tree with its dotted path.

    It is a tensor, a number, a text or None. The leaves of an object are those that ``pickle``
    would save; an object that cannot be pickled is one leaf, the name of its class. A sum with its
    count becomes the mean, because the parts of a batch may be counted otherwise; without
    ``has_means``, sums and counts stay the same tensors.
    """
    # Objects may refer to one another in a circle. A reference keeps their ids from being reused.
    visits: dict[int, tuple[Any, int]] = {}

    def children(node: Any) -> Mapping[Any, Any] | None:
        if type(node) in _LEAVES:
            return None
        if isinstance(node, Mean) and has_means:
            return _mean_or_sum(node)
        nodes = containers(node)
        if nodes is not None:
            return nodes
        _, count = visits.get(id(node), (node, 0))
        if count == _MOST_VISITS or isinstance(node, _WITHOUT_CONTENTS):
            return None
        visits[id(node)] = (node, count + 1)
        return _contents(node)

    for name, leaf in tensor_trees.leaves(value, path, children):
        if name.endswith(IMPLEMENTATION_SETTINGS) and _IMPLEMENTATION_SETTING.search(
            name
        ):
            continue
        # Most leaves are of these types; the checks below take longer than all the rest.
        is_comparable = type(leaf) in _LEAVES
        yield plain_name(name), leaf if is_comparable else _comparable(leaf)


def _comparable(leaf: Any) -> Any:
    """Returns a value that can be compared: of an array a tensor, of an object its class."""
    if isinstance(leaf, np.ndarray | np.generic):
        tensor = _as_tensor(leaf)
        return str(leaf) if tensor is None else tensor
    if isinstance(leaf, torch.dtype | torch.device):
        return str(leaf)
    if isinstance(leaf, _VALUES):
        return leaf
    if isinstance(leaf, _NAMED):
        return getattr(leaf, "__qualname__", repr(leaf))
    return type(leaf).__qualname__


def _as_tensor(array: np.ndarray[Any, Any] | np.generic) -> Tensor | None:
    """Returns a copy of an array as a tensor; None if torch has no type for its elements."""
    # torch knows one byte order.
    dtype = array.dtype.newbyteorder("=")
    return torch.as_tensor(np.array(array, dtype)) if _is_known(dtype) else None


@cache
def _is_known(dtype: np.dtype[Any]) -> bool:
    """Returns whether torch has a type for elements of an array."""
    try:
        torch.as_tensor(np.empty(0, dtype))
    except TypeError:
        return False
    return True


def containers(value: Any) -> Mapping[Any, Any] | None:
    """Returns the children of a mapping, sequence, dataclass or ring by key; None for others."""
    if isinstance(value, Ring):
        rows = [rows for _, rows in value.pieces()]
        return {"written": value.written, "rows": torch.cat(rows) if rows else None}
    if isinstance(value, deque):
        return dict(enumerate(value))
    # A mapping that is a dataclass, too, may lack some of its fields.
    children = tensor_trees.children(value)
    if children is None and is_dataclass(value) and not isinstance(value, type):
        return _attributes(value)
    return children


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of a dataclass that exist and are not computed from others."""
    names = [field.name for field in fields(value) if hasattr(value, field.name)]
    names += [name for name in getattr(value, "__dict__", {}) if name not in names]
    return {name: getattr(value, name) for name in names if not _is_cached(value, name)}


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), cached_property)


def _contents(value: Any) -> Mapping[Any, Any] | None:
    """Returns the values that ``pickle`` would save of an object, by names; None for a leaf."""
    if isinstance(value, np.ndarray | np.generic):
        is_known = _is_known(value.dtype.newbyteorder("="))
        return None if is_known or not value.ndim else dict(enumerate(value.tolist()))
    if isinstance(value, torch.dtype | torch.device):
        return None
    # The methods are the user's, and may raise anything.
    try:
        contents = _set_items(value) if isinstance(value, _SETS) else _reduced(value)
    except Exception:
        return None
    return {"type": type(value), **contents} if contents else None


def _set_items(value: Any) -> dict[Any, Any]:
    """Returns the items of a set in an order that does not depend on addresses."""
    if any(repr(item) == object.__repr__(item) for item in value):
        return {"length": len(value)}
    return dict(enumerate(sorted(value, key=repr)))


def _reduced(value: Any) -> dict[Any, Any]:
    """Returns the values that ``pickle`` would save of an object, except its type."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return {}
    make, arguments, *others = reduced
    state, items, pairs = (*others, None, None, None)[:3]
    # The first argument of this function is the type.
    first = 1 if getattr(make, "__name__", "") == "__newobj__" else 0
    contents: dict[Any, Any] = {
        f"argument {number}": child for number, child in enumerate(arguments[first:])
    }
    if state is not None:
        contents |= state if isinstance(state, Mapping) else {"state": state}
    contents |= dict(enumerate(items or ()))
    contents |= dict(pairs or ())
    return contents


def have_equal_leaves(left: Any, right: Any) -> bool:
    """Returns whether all leaves of two trees of the same form are equal."""
    for (_, a), (_, b) in zip(leaves(left), leaves(right), strict=True):
        is_equal = torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
        if not is_equal:
            return False
    return True


def _mean_or_sum(value: Mean) -> Mapping[Any, Any]:
    # Parts of a batch are added up in wider types.
    total, count = map(summable, value)
    if not _is_counted(total):
        return {"mean": _mean(total, count)}
    # Integers are compared as they are, and not by their rounding errors.
    if isinstance(count, float) and count.is_integer():
        count = int(count)
    return {"sum": total, "count": count}


def _is_counted(total: Any) -> bool:
    """Returns whether a sum is a number of things, as of right answers, which rounding
    may change by one.
    """
    if isinstance(total, Tensor):
        return not (total.is_floating_point() or total.is_complex())
    return not isinstance(total, float)


def _mean(total: Any, count: Any) -> Any:
    """Returns the mean; the sum if nothing was counted, because the mean is undefined."""
    if not isinstance(count, Tensor) and not count:
        return total
    return total / count


def plain_name(name: str) -> str:
    """Returns a parameter's name without the prefix that ``torch.compile`` adds to it."""
    return name.replace("_orig_mod.", "")


def map_named(
    change: Callable[[str, Tensor], Tensor],
    tree: Any,
    change_other: Callable[[Any], Any] = lambda value: value,
    path: str = "",
) -> Any:
    """Returns the same tree with every tensor, and every array of numbers, changed.

    Args:
        change: Returns the new tensor, by the dotted name of the old one. An array is given as a
            tensor with a copy of its numbers.
        tree: The tree.
        change_other: Returns the new value of any other leaf, such as an object.
        path: Dotted name of the tree itself.
    """
    if isinstance(tree, Tensor):
        return change(plain_name(path), tree)
    if type(tree) in _LEAVES or isinstance(tree, Ring):
        return tree
    if type(tree) in (np.ndarray, np.memmap):
        tensor = _as_tensor(tree)
        if tensor is None:
            return change_other(tree)
        array = change(plain_name(path), tensor).numpy()
        # The byte order is that of the original.
        is_same = array.dtype == tree.dtype.newbyteorder("=")
        return array.astype(tree.dtype, copy=False) if is_same else array
    children = containers(tree)
    if children is None:
        return change_other(tree)
    items = {
        key: map_named(
            change, child, change_other, f"{path}.{key}" if path else str(key)
        )
        for key, child in children.items()
    }
    return _with_items(tree, items)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns the same tree with every tensor, and every array of numbers, changed."""
    return map_named(lambda _, tensor: change(tensor), tree)


def _with_items(tree: Any, items: Mapping[Any, Any]) -> Any:
    """Returns a copy of a container with other children."""
    if isinstance(tree, list | tuple):
        # A named tuple takes its fields one by one.
        make = getattr(tree, "_make", type(tree))
        return make([*items.values()])
    if isinstance(tree, Mapping):
        return _mapping(tree, items)
    result = copy.copy(tree)
    if isinstance(result, deque):
        result.clear()
        result.extend(items.values())
        return result
    for name in [*getattr(result, "__dict__", {})]:
        # It was computed from the original's values.
        if _is_cached(result, name):
            del result.__dict__[name]
    for name, item in items.items():
        # A frozen dataclass refuses ``setattr``.
        object.__setattr__(result, name, item)
    return result


def _mapping(tree: Mapping[Any, Any], items: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Returns a mapping of the same type with other items; a dictionary if there can be none."""
    # A shallow copy of another mapping may share its items with the original.
    if isinstance(tree, dict | UserDict):
        result = copy.copy(tree)
        for key, item in items.items():
            result[key] = item
        return result
    # The class is the user's, and may raise anything.
    try:
        return type(tree)(items)  # type: ignore[call-arg]
    except Exception:
        return dict(items)


def named_tensors(tree: Any) -> dict[str, Tensor]:
    """Returns all tensors, and copies of all arrays of numbers, by the names of ``map_named``."""
    tensors: dict[str, Tensor] = {}

    def collect(name: str, tensor: Tensor) -> Tensor:
        tensors[name] = tensor
        return tensor

    map_named(collect, tree)
    return tensors


def clones(value: Any) -> Any:
    """Returns a copy whose tensors, arrays and objects have separate memory; an object that cannot
    be copied is the same.
    """
    # An object that occurs twice is one object in the copy, too.
    memory: dict[int, Any] = {}

    def copied(item: Any) -> Any:
        # The method is the user's, and may raise anything.
        try:
            return copy.deepcopy(item, memory)
        except Exception:
            return item

    return map_named(lambda _, tensor: _clone(tensor), value, copied)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def on_host(value: Any) -> Any:
    """Returns a copy whose tensors are in the host's memory."""
    return map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), value)


def to_float64(value: Any) -> Any:
    """Returns a copy whose floating-point tensors are float64, and whose complex ones are
    complex128.
    """
    return map_tensors(widened, clones(value))


def scaled(factor: float, value: Any) -> Any:
    """Returns a tree whose floating-point tensors are multiplied by a factor."""

    def scale(tensor: Tensor) -> Tensor:
        return tensor * factor if has_arithmetic(tensor) else tensor

    return map_tensors(scale, value)


def with_first_row(value: Any, tensor_name: str, number: float) -> Any:
    """Returns a copy with a number in the first row of the tensor that has this name."""

    def fill(name: str, tensor: Tensor) -> Tensor:
        copied = _clone(tensor)
        if name == tensor_name:
            with torch.no_grad():
                (copied[:1] if copied.dim() else copied).fill_(number)
        return copied

    return map_named(fill, value)


def put(value: Any, target: Any, in_memory: bool = True) -> Any:
    """Copies a value into the objects of another tree, as far as both have the same form,
    and optionally into its memory.
    """
    if in_memory and _fits(value, target):
        # ``data`` is written without a change of the tensor's version.
        memory = target.data if isinstance(target, Tensor) else torch.from_numpy(target)
        memory.copy_(torch.as_tensor(value))
        return target
    if isinstance(value, Ring):
        return value
    children = containers(value)
    targets = containers(target)
    if children is None or targets is None or children.keys() != targets.keys():
        return value
    items = {
        key: put(child, targets[key], in_memory) for key, child in children.items()
    }
    if isinstance(target, MutableMapping | list | deque):
        for key, item in items.items():
            target[key] = item
        return target
    if is_dataclass(target) and not isinstance(target, Mapping):
        for key, item in items.items():
            object.__setattr__(target, key, item)
        return target
    return _with_items(target, items)


def _fits(value: Any, target: Any) -> bool:
    """Returns whether the numbers of a value can be written into the memory of another one."""
    if isinstance(value, Tensor) and isinstance(target, Tensor):
        return value.shape == target.shape
    if not isinstance(value, np.ndarray) or not isinstance(target, np.ndarray):
        return False
    has_form = value.shape == target.shape and value.dtype == target.dtype
    return has_form and target.flags.writeable and _is_known(value.dtype)
