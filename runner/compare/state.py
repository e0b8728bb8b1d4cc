"""Nested states, outputs and batches: their leaves by name, copies of them, and how a state moves between subjects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.api import Ring
from runner.compare.subject import Subject

OWN_WAY = ("foreach", "fused", "capturable", "differentiable")
"""Settings of torch's optimizers that say how to compute, not what; they stay with the optimizer that has them."""
_GROUPS = "param_groups"
_COMPILED = "_orig_mod."


def canonical(name: str) -> str:
    """A parameter's name without what ``torch.compile`` adds to it."""
    return name.replace(_COMPILED, "")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested mappings, sequences, dataclasses and rings that is none of these, with its dotted path."""
    if isinstance(value, Ring):
        rows = [rows for _, rows in value.pieces()]
        yield from leaves({"written": value.written, "rows": torch.cat(rows) if rows else None}, path)
    elif (children := _children(value)) is not None:
        for key, child in children.items():
            name = canonical(str(key))
            if name not in OWN_WAY or not path.rpartition(".")[0].endswith(_GROUPS):
                yield from leaves(child, f"{path}.{name}" if path else name)
    else:
        yield path, _leaf(value)


def _children(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _leaf(value: Any) -> Any:
    """A tensor, a number, a text or None; of anything else only what kind of thing it is."""
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(value)
    if value is None or isinstance(value, Tensor | bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return type(value).__qualname__


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nested value with every tensor changed; what is no tensor and no container stays the same object."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key, child in value.items():
            result[key] = mapped(change, child)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, child) for child in value))
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, child) for child in value])
    return value


def clones(value: Any) -> Any:
    """A copy whose tensors have memory of their own."""
    return mapped(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value)


def to_float64(value: Any) -> Any:
    """A copy whose floating-point tensors are float64."""
    return mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, clones(value))


def saved(subject: Subject) -> dict[str, Any]:
    """A copy of a subject's state that nothing changes any more."""
    return {name: mapped(_kept, part.state_dict()) for name, part in subject.state.items()}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def load(subject: Subject, states: Mapping[str, Any]) -> None:
    """Gives a subject a state that another one had; parts that only one of the two has stay as they are."""
    for name, part in subject.state.items():
        if name in states:
            part.load_state_dict(_adapted(mapped(_kept, states[name]), part.state_dict()))


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
