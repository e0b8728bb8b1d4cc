"""Batches and states for comparisons: their leaves, copies, and loading them into a subject."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.plugin.contract import Mean
from runner.plugin.optimizer import load_exactly
from runner.plugin.source import Ring
from runner.proof.subject import Subject
from runner.system import tensor_trees
from runner.system.tensor_trees import map_tensors, summable, widened

# The types of most leaves.
_LEAVES = frozenset({Tensor, nn.Parameter, float, int, bool, str, type(None)})
# Types of leaves that are yielded as they are.
_VALUES = Tensor | bool | int | float | complex | str | bytes | None
# Settings of an optimizer's implementation, which stay.
IMPLEMENTATION_SETTINGS = ("foreach", "fused", "capturable", "differentiable")
_IMPLEMENTATION_SETTING = re.compile(
    rf"param_groups\.\d+\.({'|'.join(IMPLEMENTATION_SETTINGS)})$"
)


def leaves(
    value: Any, path: str = "", *, has_means: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yields every leaf of nested mappings, sequences, dataclasses and rings, with its dotted path.

    It is a tensor, a number, a text or None; of anything else only the name of its class. A sum
    with its count becomes the mean, because the parts of a batch may be counted otherwise; without
    ``has_means``, sums and counts stay the same tensors.
    """
    children = _children if has_means else _children_with_sums
    for name, leaf in tensor_trees.leaves(value, path, children):
        if name.endswith(IMPLEMENTATION_SETTINGS) and _IMPLEMENTATION_SETTING.search(
            name
        ):
            continue
        # Most leaves are of these types; the checks below take longer than all the rest.
        if type(leaf) in _LEAVES:
            yield _plain_name(name), leaf
            continue
        comparable: Any = leaf
        if isinstance(leaf, np.ndarray | np.generic):
            comparable = torch.as_tensor(leaf)
        elif isinstance(leaf, torch.dtype | torch.device):
            comparable = str(leaf)
        elif not isinstance(leaf, _VALUES):
            comparable = type(leaf).__qualname__
        yield _plain_name(name), comparable


def have_equal_leaves(left: Any, right: Any) -> bool:
    """Returns whether all leaves of two trees of the same form are equal."""
    for (_, a), (_, b) in zip(leaves(left), leaves(right), strict=True):
        is_equal = torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
        if not is_equal:
            return False
    return True


def _children(value: Any) -> Mapping[Any, Any] | None:
    if type(value) in _LEAVES:
        return None
    if isinstance(value, Mean):
        # Parts of a batch are added up in wider types.
        total, count = map(summable, value)
        if not _is_counted(total):
            return {"mean": _mean(total, count)}
        # Integers are compared as they are, and not by their rounding errors.
        if isinstance(count, float) and count.is_integer():
            count = int(count)
        return {"sum": total, "count": count}
    return _children_with_sums(value)


def _children_with_sums(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Ring):
        rows = [rows for _, rows in value.pieces()]
        return {"written": value.written, "rows": torch.cat(rows) if rows else None}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return tensor_trees.children(value)


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


def _plain_name(name: str) -> str:
    """Returns a parameter's name without the prefix that ``torch.compile`` adds to it."""
    return name.replace("_orig_mod.", "")


def clones(value: Any) -> Any:
    """Returns a copy whose tensors have separate memory."""
    return map_tensors(_clone, value)


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
        return tensor * factor if tensor.is_floating_point() else tensor

    return map_tensors(scale, value)


def with_first_row(value: Any, identity: int, number: float) -> Any:
    """Returns a copy with a number in the first row of the tensor that has this id."""

    def fill(tensor: Tensor) -> Tensor:
        copy = _clone(tensor)
        if id(tensor) == identity:
            with torch.no_grad():
                (copy[:1] if copy.dim() else copy).fill_(number)
        return copy

    return map_tensors(fill, value)


def put(value: Any, target: Any, in_memory: bool = True) -> Any:
    """Copies a value into the objects of another tree, as far as both have the same form,
    and optionally into its memory.
    """
    are_tensors = isinstance(value, Tensor) and isinstance(target, Tensor)
    if in_memory and are_tensors and value.shape == target.shape:
        # ``data`` is written without a change of the tensor's version.
        target.data.copy_(value)
        return target
    children = tensor_trees.children(value)
    targets = tensor_trees.children(target)
    if children is None or targets is None or children.keys() != targets.keys():
        return value
    items = {
        key: put(child, targets[key], in_memory) for key, child in children.items()
    }
    if isinstance(target, MutableMapping | list):
        for key, item in items.items():
            target[key] = item
        return target
    # A named tuple takes its fields one by one.
    make = getattr(target, "_make", type(target))
    return make(items.values())


def widen(subject: Subject) -> None:
    """Makes modules float64.

    Raises:
        TypeError: A parameter has another type nevertheless.
    """
    for stateful in subject.state.values():
        if isinstance(stateful, nn.Module):
            # ``double`` leaves complex numbers out.
            stateful._apply(widened)  # type: ignore[no-untyped-call]
    parameters = named_parameters(subject)
    widen_complex(parameters.values())
    for name, parameter in parameters.items():
        if widened(parameter).dtype != parameter.dtype:
            hint = "build it in the default type, torch.float64 here"
            raise TypeError(f"'{name}' is still {parameter.dtype}; {hint}")


def widen_complex(parameters: Iterable[Tensor]) -> None:
    """Makes complex parameters complex128: no default type makes complex64 wider."""
    for parameter in parameters:
        if parameter.is_complex():
            parameter.data = widened(parameter.data)


def widen_held_modules(owner: Any, trained: Iterable[nn.Module]) -> None:
    """Makes modules in attributes of an object, also in lists, float64: a frozen teacher, which may
    have been loaded from a file, is in no state.

    Args:
        owner: The object.
        trained: Modules that stay as they are.
    """
    layers = {layer for module in trained for layer in module.modules()}
    for _, module in tensor_trees.leaves(dict(vars(owner))):
        if isinstance(module, nn.Module) and module not in layers:
            module._apply(widened)  # type: ignore[no-untyped-call]


def widen_inputs(modules: Iterable[nn.Module]) -> None:
    """Makes modules, and those inside them, convert their inputs to float64: held-out batches have
    the type of their source.
    """
    for module in modules:
        for submodule in module.modules():
            submodule.register_forward_pre_hook(
                lambda _, inputs: map_tensors(widened, inputs)
            )


def named_parameters(subject: Subject) -> dict[str, Tensor]:
    """Returns the trainable parameters."""
    if subject.parameters is not None:
        parameters = list(subject.parameters())
    else:
        parameters = [
            (f"{owner}.{name}", parameter)
            for owner, module in subject.state.items()
            if isinstance(module, nn.Module)
            for name, parameter in module.named_parameters()
        ]
    return {
        _plain_name(name): parameter
        for name, parameter in parameters
        if parameter.requires_grad
    }


def saved(subject: Subject) -> dict[str, Any]:
    """Returns a copy of a subject's state."""
    return {
        name: clones(stateful.state_dict()) for name, stateful in subject.state.items()
    }


def load(subject: Subject, states: Mapping[str, Any]) -> None:
    """Gives a subject the state of another one; parts that only one of the two has are unchanged.

    Optimizers keep the types of their numbers, also if a part of the subject loads them itself.
    """
    current = {
        name: stateful.state_dict()
        for name, stateful in subject.state.items()
        if name in states
    }
    with _exact_optimizers(_have_same_types(current, states)):
        for name, state in current.items():
            adapted = _adapted(clones(states[name]), state)
            subject.state[name].load_state_dict(adapted)


def _have_same_types(current: Mapping[str, Any], states: Mapping[str, Any]) -> bool:
    """Returns whether the tensors that both have, except those of optimizers, are of the same
    types.
    """
    types = {name: dtype for name, dtype in _types(states) if ".state." not in name}
    return all(types.get(name, dtype) == dtype for name, dtype in _types(current))


def _types(state: Any) -> Iterator[tuple[str, torch.dtype]]:
    """Yields the types of all tensors, with their dotted paths."""
    for name, leaf in tensor_trees.leaves(state, inside=_children_with_first_rows):
        if isinstance(leaf, Tensor):
            yield _plain_name(name), leaf.dtype


def _children_with_first_rows(value: Any) -> Mapping[Any, Any] | None:
    """Returns the children as ``leaves`` does, but not all rows of a ring: their type is that of
    the first ones, and to join them copies a complete buffer.
    """
    if isinstance(value, Ring):
        first = next((rows for _, rows in value.pieces()), None)
        return {"rows": first}
    return _children(value)


@contextmanager
def _exact_optimizers(keep_saved_types: bool) -> Iterator[None]:
    """Makes ``load_state_dict`` of every optimizer keep types inside the ``with``;
    torch's method converts them.
    """
    # The class is changed, because a part of the subject may load an optimizer inside of it.
    load = Optimizer.load_state_dict

    def load_with_types(optimizer: Optimizer, state_dict: Any) -> None:
        load_exactly(optimizer, state_dict, load, keep_saved_types)

    Optimizer.load_state_dict = load_with_types  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Optimizer.load_state_dict = load  # type: ignore[method-assign]


def _adapted(state: Any, current: Any) -> Any:
    """Returns a state with the names and the implementation settings of the current one."""
    if isinstance(state, Mapping) and isinstance(current, Mapping):
        names = {_plain_name(str(key)): key for key in current}
        result: dict[Any, Any] = {}
        for key, child in state.items():
            name = names.get(_plain_name(str(key)), key)
            result[name] = _adapted(child, current.get(name))
        # Only a group of an optimizer has parameters under this name.
        if "params" in current:
            for name in IMPLEMENTATION_SETTINGS:
                if name in current:
                    result[name] = current[name]
            result |= _rate_of_its_kind(result.get("lr"), current.get("lr"))
        return result
    are_lists = isinstance(state, list) and isinstance(current, Sequence)
    if are_lists and len(state) == len(current):
        pairs = zip(state, current, strict=True)
        return [_adapted(child, current_child) for child, current_child in pairs]
    return state


def _rate_of_its_kind(rate: Any, current: Any) -> dict[str, Any]:
    """Returns a learning rate in the type of the group's rate: as a tensor, which a graph reads, or
    as a number.
    """
    if isinstance(current, Tensor) and isinstance(rate, float | int):
        return {"lr": torch.full_like(current, rate)}
    if isinstance(current, float | int) and isinstance(rate, Tensor):
        return {"lr": rate.item()}
    return {}
