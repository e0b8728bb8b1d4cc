"""Nested states, outputs and batches: their leaves by name, copies of them, and how a state moves between subjects."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.compare.subject import Subject
from runner.plugin.source import Ring
from runner.system import tree
from runner.system.tree import map_tensors

OWN_WAY = ("foreach", "fused", "capturable", "differentiable")
"""Settings of torch's optimizers that say how to compute, not what; they stay with the optimizer that has them."""
_GROUPS = "param_groups"
_OWN_SETTING = re.compile(rf"{_GROUPS}\.\d+\.({'|'.join(OWN_WAY)})$")
_COMPILED = "_orig_mod."


def canonical(name: str) -> str:
    """A parameter's name without what ``torch.compile`` adds to it."""
    return name.replace(_COMPILED, "")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested mappings, sequences, dataclasses and rings that is none of these, with its dotted path."""
    for name, leaf in tree.leaves(value, path, _inside):
        if not _OWN_SETTING.search(name):
            yield canonical(name), _leaf(leaf)


def _inside(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Ring):
        rows = [rows for _, rows in value.pieces()]
        return {"written": value.written, "rows": torch.cat(rows) if rows else None}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return tree.children(value)


def _leaf(value: Any) -> Any:
    """A tensor, a number, a text or None; of anything else only what kind of thing it is."""
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(value)
    if value is None or isinstance(value, Tensor | bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return type(value).__qualname__


def clones(value: Any) -> Any:
    """A copy whose tensors have memory of their own."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value)


def to_float64(value: Any) -> Any:
    """A copy whose floating-point tensors are float64."""
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, clones(value))


def saved(subject: Subject) -> dict[str, Any]:
    """A copy of a subject's state that nothing changes any more."""
    return {name: map_tensors(_kept, part.state_dict()) for name, part in subject.state.items()}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def load(subject: Subject, states: Mapping[str, Any]) -> None:
    """Gives a subject a state that another one had; parts that only one of the two has stay as they are."""
    for name, part in subject.state.items():
        if name in states:
            part.load_state_dict(_adapted(map_tensors(_kept, states[name]), part.state_dict()))


def _adapted(state: Any, own: Any) -> Any:
    """A state in the words of a thing whose own state is ``own``: its names, and its own way to compute."""
    if isinstance(state, Mapping) and isinstance(own, Mapping):
        names = {canonical(str(key)): key for key in own}
        keys = {key: names.get(canonical(str(key)), key) for key in state}
        result = {keys[key]: _adapted(child, own.get(keys[key])) for key, child in state.items()}
        if _GROUPS in result and _GROUPS in own:
            result[_GROUPS] = [
                group | {name: mine[name] for name in OWN_WAY if name in mine}
                for group, mine in zip(result[_GROUPS], own[_GROUPS], strict=True)
            ]
        return result
    if isinstance(state, list) and isinstance(own, Sequence) and len(state) == len(own):
        return [_adapted(child, mine) for child, mine in zip(state, own, strict=True)]
    return state


def named_parameters(subject: Subject) -> dict[str, Tensor]:
    """The trainable parameters."""
    if subject.parameters is not None:
        found = list(subject.parameters())
    else:
        modules = [(name, part) for name, part in subject.state.items() if isinstance(part, nn.Module)]
        found = [(f"{name}.{own}", each) for name, module in modules for own, each in module.named_parameters()]
    return {canonical(name): parameter for name, parameter in found if parameter.requires_grad}
