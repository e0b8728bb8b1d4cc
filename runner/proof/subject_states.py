"""Batches and states as they are compared: what is in them, copies of them, and how a subject is given one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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
from runner.system.tensor_trees import map_tensors

# The types of most leaves.
_LEAVES = frozenset({Tensor, nn.Parameter, float, int, bool, str, type(None)})
# Settings of an optimizer's implementation, which stay.
OWN_WAY = ("foreach", "fused", "capturable", "differentiable")
_OWN_SETTING = re.compile(rf"param_groups\.\d+\.({'|'.join(OWN_WAY)})$")


def leaves(value: Any, path: str = "", *, has_means: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields every leaf of nested mappings, sequences, dataclasses and rings, with its dotted path.

    It is a tensor, a number, a text or None; of anything else only what kind of thing it is. A sum with its count
    becomes the mean, because the parts of a batch may be counted otherwise; without ``has_means``, they stay the very
    tensors that they are.
    """
    for name, leaf in tensor_trees.leaves(value, path, _inside if has_means else _inside_of_all):
        if _OWN_SETTING.search(name):
            continue
        found = leaf
        if isinstance(leaf, np.ndarray | np.generic):
            found = torch.as_tensor(leaf)
        elif isinstance(leaf, torch.dtype | torch.device):
            found = str(leaf)
        elif leaf is not None and not isinstance(leaf, Tensor | bool | int | float | complex | str | bytes):
            found = type(leaf).__qualname__
        yield _plain_name(name), found


def have_equal_leaves(left: Any, right: Any) -> bool:
    """Returns whether all leaves of two trees of the same form are equal."""
    pairs = zip(leaves(left), leaves(right), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b) for (_, a), (_, b) in pairs)


def _inside(value: Any) -> Mapping[Any, Any] | None:
    if type(value) in _LEAVES:
        return None
    if isinstance(value, Mean) and not _is_counted(value.sum):
        return {"mean": _mean(value)}
    return _inside_of_all(value)


def _inside_of_all(value: Any) -> Mapping[Any, Any] | None:
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


def _mean(value: Mean) -> Any:
    """Returns the mean; the sum if nothing was counted, because the mean is undefined."""
    if not isinstance(value.count, Tensor) and not value.count:
        return value.sum
    return value.sum / value.count


def _plain_name(name: str) -> str:
    """A parameter's name without what ``torch.compile`` adds to it."""
    return name.replace("_orig_mod.", "")


def clones(value: Any) -> Any:
    """Returns a copy whose tensors have separate memory."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value)


def on_host(value: Any) -> Any:
    """A copy whose tensors are in the host's memory."""
    return map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), value)


def to_float64(value: Any) -> Any:
    """A copy whose floating-point tensors are float64, and whose complex ones are complex128."""
    return map_tensors(_double, clones(value))


def _double(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.to(torch.promote_types(tensor.dtype, torch.float64))
    return tensor


def put(value: Any, place: Any, in_memory: bool = True) -> Any:
    """Copies a content into the objects of another tree, as far as the two are alike, and
    optionally into its memory.
    """
    if in_memory and isinstance(value, Tensor) and isinstance(place, Tensor) and value.shape == place.shape:
        place.data.copy_(value)  # without a change of its version
        return place
    inside, there = tensor_trees.children(value), tensor_trees.children(place)
    if inside is None or there is None or inside.keys() != there.keys():
        return value
    items = {key: put(child, there[key], in_memory) for key, child in inside.items()}
    if isinstance(place, MutableMapping | list):
        for key, item in items.items():
            place[key] = item
        return place
    make = getattr(place, "_make", type(place))
    return make(items.values())


def widen(subject: Subject) -> None:
    """Makes modules float64; a parameter that insists on another type is an error."""
    for part in subject.state.values():
        if isinstance(part, nn.Module):
            part._apply(_double)  # type: ignore[no-untyped-call]  # ``double`` leaves complex numbers out
    for name, parameter in named_parameters(subject).items():
        if _double(parameter) is not parameter:
            raise TypeError(f"'{name}' is still {parameter.dtype}; build it in the default type, torch.float64 here")


def named_parameters(subject: Subject) -> dict[str, Tensor]:
    """The trainable parameters."""
    if subject.parameters is not None:
        found = list(subject.parameters())
    else:
        modules = [(name, part) for name, part in subject.state.items() if isinstance(part, nn.Module)]
        found = [(f"{name}.{own}", each) for name, module in modules for own, each in module.named_parameters()]
    return {_plain_name(name): parameter for name, parameter in found if parameter.requires_grad}


def saved(subject: Subject) -> dict[str, Any]:
    """A copy of a subject's state that nothing changes any more."""
    return {name: clones(part.state_dict()) for name, part in subject.state.items()}


def load(subject: Subject, states: Mapping[str, Any]) -> None:
    """Gives a subject a state that another one had; parts that only one of the two has stay as they are.

    Optimizers keep the types of their numbers, also where a part of the subject loads them for itself.
    """
    own = {name: part.state_dict() for name, part in subject.state.items() if name in states}
    with _exact_optimizers(_have_same_types(own, states)):
        for name, state in own.items():
            subject.state[name].load_state_dict(_adapted(clones(states[name]), state))


def _have_same_types(own: Mapping[str, Any], states: Mapping[str, Any]) -> bool:
    """Returns whether what both have of modules and the like, but not of optimizers, is
    of the same types.
    """
    types = {name: leaf.dtype for name, leaf in _tensors(states) if ".state." not in name}
    return all(types.get(name, leaf.dtype) == leaf.dtype for name, leaf in _tensors(own))


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, leaf) for name, leaf in leaves(state) if isinstance(leaf, Tensor))


@contextmanager
def _exact_optimizers(keep_saved_types: bool) -> Iterator[None]:
    """Makes ``load_state_dict`` of every optimizer keep types inside the ``with``;
    torch's method converts them.
    """
    load = Optimizer.load_state_dict

    def load_with_types(optimizer: Optimizer, state_dict: Any) -> None:
        load_exactly(optimizer, state_dict, load, keep_saved_types)

    Optimizer.load_state_dict = load_with_types  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Optimizer.load_state_dict = load  # type: ignore[method-assign]


def _adapted(state: Any, own: Any) -> Any:
    """Returns a state with the names and the implementation settings of ``own``."""
    if isinstance(state, Mapping) and isinstance(own, Mapping):
        names = {_plain_name(str(key)): key for key in own}
        keys = {key: names.get(_plain_name(str(key)), key) for key in state}
        result: dict[Any, Any] = {keys[key]: _adapted(child, own.get(keys[key])) for key, child in state.items()}
        if "params" in own:  # a group of an optimizer
            result |= {name: own[name] for name in OWN_WAY if name in own}
            result |= _rate_of_its_kind(result.get("lr"), own.get("lr"))
        return result
    if isinstance(state, list) and isinstance(own, Sequence) and len(state) == len(own):
        return [_adapted(child, mine) for child, mine in zip(state, own, strict=True)]
    return state


def _rate_of_its_kind(rate: Any, own: Any) -> dict[str, Any]:
    """Returns a learning rate in the type of the group's rate: as a tensor, which a graph reads, or
    as a number.
    """
    if isinstance(own, Tensor) and isinstance(rate, float | int):
        return {"lr": torch.full_like(own, rate)}
    if isinstance(own, float | int) and isinstance(rate, Tensor):
        return {"lr": rate.item()}
    return {}
