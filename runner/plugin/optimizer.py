"""Optimizers as a recipe names them: any of ``torch.optim``, with the settings of its signature.

The signatures are read from torch's source text, so that validating a recipe does not import torch.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from runner.system.tree import map_tensors

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

HOW_TO_COMPUTE = ("foreach", "fused", "capturable", "differentiable")
"""Settings of torch's optimizers that say how to compute, not what; they belong to stages."""
Spared = Literal["biases", "norms", "embeddings"]
SPARED: tuple[Spared, ...] = get_args(Spared)


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer of one role."""

    kind: str
    """Of ``torch.optim``, in lower case: ``adamw``, ``sgd``."""
    settings: Mapping[str, Any]
    """All of its signature's settings, but those that say how to compute."""
    max_grad_norm: float | None = None
    """To which gradients are clipped."""
    spare: tuple[Spared, ...] = SPARED
    """What weight decay leaves alone."""

    @property
    def lr(self) -> float:
        """The learning rate before any schedule."""
        return float(self.settings["lr"])

    def values(self) -> dict[str, Any]:
        """As a recipe writes them."""
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in self.settings.items()}
        return {"kind": self.kind, **settings, "max_grad_norm": self.max_grad_norm, "spare": list(self.spare)}

    def optimizer(self) -> type[Optimizer]:
        """The class in ``torch.optim``."""
        import torch

        found: type[Optimizer] = getattr(torch.optim, _classes()[self.kind][0])
        return found

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups of a module: what weight decay leaves alone apart from the rest."""
        from torch import nn

        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not self.settings.get("weight_decay") or not self.spare:
            return [{"params": parameters}]
        spared = set()
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                sort = "norms" if parameter.dim() < 2 else "weights"
                if name.endswith("bias"):
                    sort = "biases"
                elif isinstance(part, nn.Embedding | nn.EmbeddingBag):
                    sort = "embeddings"
                if sort in self.spare:
                    spared.add(parameter)
        groups: list[dict[str, Any]] = [
            {"params": [each for each in parameters if each not in spared]},
            {"params": [each for each in parameters if each in spared], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]


def restore(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Loads a state that an optimizer with other kernels may have left; this one keeps its own."""
    import torch

    groups = copy.deepcopy(saved["param_groups"])
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        lr = float(group["lr"])
        in_graph = isinstance(own["lr"], torch.Tensor)  # which reads the learning rate from where it is
        group |= {name: own[name] for name in HOW_TO_COMPUTE if name in own}
        group["lr"] = torch.full_like(own["lr"], lr) if in_graph else lr
    # Copied, because torch would go on with the very tensors that it is given.
    state = map_tensors(lambda tensor: tensor.clone(memory_format=torch.contiguous_format), saved["state"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            same_shape = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if same_shape and value.stride() != parameter.stride():  # fused kernels go through both as they lie
                options = {"dtype": value.dtype, "device": value.device}
                entry[name] = torch.empty_strided(value.shape, parameter.stride(), **options).copy_(value)


@dataclass(frozen=True)
class Argument:
    """One setting of an optimizer's signature."""

    default: Any
    required: bool
    types: str
    """The annotation as written."""

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value; None if nothing is."""
        form = self._form()
        if value is None:
            return None if self.default is None else "should not be empty"
        if isinstance(form, int):
            right = isinstance(value, list | tuple) and len(value) == form
            right = right and all(is_number(each) or (each is None and "None" in self.types) for each in value)
            return None if right else f"should be a list of {form} numbers"
        right, expected = {
            "boolean": (isinstance(value, bool), "true or false"),
            "string": (isinstance(value, str), "a text"),
            "integer": (isinstance(value, int) and not isinstance(value, bool), "a whole number"),
            "number": (is_number(value), "a number"),
        }[form]
        return None if right else f"should be {expected}"

    def schema(self) -> dict[str, Any]:
        """JSON Schema of its values."""
        form = self._form()
        schema: dict[str, Any] = {"type": form}
        if isinstance(form, int):
            item = {"anyOf": [{"type": "number"}, {"type": "null"}]} if "None" in self.types else {"type": "number"}
            schema = {"type": "array", "items": item, "minItems": form, "maxItems": form}
        if self.required:
            return schema
        if self.default is None:
            schema = {"anyOf": [schema, {"type": "null"}]}
        return {**schema, "default": list(self.default) if isinstance(self.default, tuple) else self.default}

    def _form(self) -> int | Literal["boolean", "string", "integer", "number"]:
        """JSON's name for its type; of a list of numbers, how many they are."""
        if isinstance(self.default, tuple) or "tuple" in self.types.lower():
            return len(self.default) if isinstance(self.default, tuple) else 2
        if isinstance(self.default, bool) or self.types.startswith("bool"):
            return "boolean"
        if isinstance(self.default, str) or self.types.startswith("str"):
            return "string"
        return "integer" if self.types.startswith("int") else "number"


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, which a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def kinds() -> tuple[str, ...]:
    """The optimizers of the installed torch that a recipe may name."""
    return tuple(sorted(_classes()))


@cache
def signature(kind: str) -> dict[str, Argument]:
    """The settings of a kind, with their defaults."""
    name, path = _classes()[kind]
    body = ast.parse(path.read_text(encoding="utf-8")).body
    constants = {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    init = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__").args
    arguments = [*init.args[2:], *init.kwonlyargs]  # after self and params
    defaults = [*init.defaults, *init.kw_defaults]
    settings = {}
    for argument, default in zip(arguments, [None] * (len(arguments) - len(defaults)) + defaults, strict=True):
        types = ast.unparse(argument.annotation) if argument.annotation else ""
        try:
            value = None if default is None else ast.literal_eval(_Named(constants).visit(default))
        except ValueError:  # of a setting that no recipe can write
            continue
        if argument.arg not in HOW_TO_COMPUTE:
            settings[argument.arg] = Argument(value, default is None, types)
    return settings


class _Named(ast.NodeTransformer):
    """Puts constants of a module in the place of their names."""

    def __init__(self, constants: Mapping[str, ast.expr]) -> None:
        self.constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.constants.get(node.id, node)


@cache
def _classes() -> dict[str, tuple[str, Path]]:
    """Class and file of every kind; LBFGS is left out, because it asks for a closure that evaluates the loss again."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "optim")
    found: dict[str, tuple[str, Path]] = {}
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.level <= 1:
            path = folder / f"{node.module.rpartition('.')[2]}.py"
            for alias in node.names:
                if path.stem not in ("optimizer", "lbfgs", "lr_scheduler", "swa_utils") and alias.name[0].isupper():
                    found[alias.name.lower()] = alias.name, path
    return found
