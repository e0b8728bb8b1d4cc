"""The state of a subject: copies of it, loading one, and its conversion to float64."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.plugin.optimizer import load_exactly
from runner.plugin.ring import Ring
from runner.proof.subject import Stateful, Subject
from runner.proof.trees import (
    IMPLEMENTATION_SETTINGS,
    clones,
    containers,
    map_tensors,
    named_tensors,
    plain_name,
    to_float64,
)
from runner.system import tensor_trees
from runner.system.tensor_trees import widened


def widen(subject: Subject) -> None:
    """Makes the state float64.

    Raises:
        TypeError: A parameter has another type nevertheless.
    """
    for stateful in subject.state.values():
        if isinstance(stateful, nn.Module):
            # ``double`` leaves complex numbers out.
            stateful._apply(widened)  # type: ignore[no-untyped-call]
        else:
            _widen_state(stateful)
    parameters = named_parameters(subject)
    widen_complex(parameters.values())
    for name, parameter in parameters.items():
        if widened(parameter).dtype != parameter.dtype:
            hint = "build it in the default type, torch.float64 here"
            raise TypeError(f"'{name}' is still {parameter.dtype}; {hint}")


def _widen_state(stateful: Stateful) -> None:
    """Makes the state of an object float64: it may be made of parameters before these are
    float64, as the first sums of an optimizer are.
    """
    # Counts of steps have their own types, and an optimizer keeps the types of what it loads.
    if isinstance(stateful, Optimizer):
        for entry in stateful.state.values():
            for key in entry.keys() - {"step"}:
                entry[key] = map_tensors(widened, entry[key])
        return
    state = stateful.state_dict()
    tensors = named_tensors(state).values()
    if any(widened(tensor).dtype != tensor.dtype for tensor in tensors):
        with _exact_optimizers(keep_saved_types=True):
            stateful.load_state_dict(to_float64(state))


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
        plain_name(name): parameter
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
            yield plain_name(name), leaf.dtype


def _children_with_first_rows(value: Any) -> Mapping[Any, Any] | None:
    """Returns the children as ``containers`` does, but not all rows of a ring: their type is
    that of the first ones, and to join them copies a complete buffer.
    """
    if isinstance(value, Ring):
        first = next((rows for _, rows in value.pieces()), None)
        return {"rows": first}
    return containers(value)


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
        names = {plain_name(str(key)): key for key in current}
        result = _emptied(state, current)
        for key, child in state.items():
            name = names.get(plain_name(str(key)), key)
            result[name] = _adapted(child, current.get(name))
        # Only a group of an optimizer has parameters under this name.
        if "params" in current:
            for name in IMPLEMENTATION_SETTINGS:
                if name in current:
                    result[name] = current[name]
            result.update(_rate_of_its_kind(result.get("lr"), current.get("lr")))
        return result
    are_lists = isinstance(state, list) and isinstance(current, Sequence)
    if are_lists and len(state) == len(current):
        pairs = zip(state, current, strict=True)
        return [_adapted(child, current_child) for child, current_child in pairs]
    return state


def _emptied(state: Mapping[Any, Any], current: Any) -> dict[Any, Any]:
    """Returns a dictionary of the same type without items, with the versions of modules by the
    current names: a module of version 2 would convert a state without a version.
    """
    # A shallow copy of another mapping may share its items with the original.
    if not isinstance(state, dict):
        return {}
    result = copy.copy(state)
    result.clear()
    versions = getattr(state, "_metadata", None)
    if isinstance(versions, Mapping):
        current_names = getattr(current, "_metadata", {})
        names = {_module_name(name): name for name in current_names}
        # The metadata is an attribute of an ordered dictionary.
        result._metadata = {  # type: ignore[attr-defined]
            names.get(_module_name(name), name): version
            for name, version in versions.items()
        }
    return result


def _module_name(name: str) -> str:
    """Returns the name of a module without the module that ``torch.compile`` adds around it."""
    return plain_name(f"{name}.").removesuffix(".")


def _rate_of_its_kind(rate: Any, current: Any) -> dict[str, Any]:
    """Returns a learning rate in the type of the group's rate: as a tensor, which a graph reads, or
    as a number.
    """
    if isinstance(current, Tensor) and isinstance(rate, float | int):
        return {"lr": torch.full_like(current, rate)}
    if isinstance(current, float | int) and isinstance(rate, Tensor):
        return {"lr": rate.item()}
    return {}
