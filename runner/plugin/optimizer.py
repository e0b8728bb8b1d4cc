"""Optimizers as a recipe names them: any of ``torch.optim``, with the settings of its signature.

The signatures are read from torch's source text, so that validating a recipe does not import torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor, nn
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

    def groups(self, modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Parameter groups: what weight decay leaves alone apart from the rest.

        Args:
            modules: in which the parameters are; they tell biases, norms and embeddings.
            parameters: to optimize, in order.
        """
        if not self.settings.get("weight_decay") or not self.spare:
            return [{"params": list(parameters)}]
        spared = {id(parameter) for module in modules for parameter in _spared(module, self.spare)}
        groups: list[dict[str, Any]] = [
            {"params": [each for each in parameters if id(each) not in spared]},
            {"params": [each for each in parameters if id(each) in spared], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]


def _spared(module: nn.Module, kinds: Sequence[Spared]) -> Iterator[Tensor]:
    from torch import nn

    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            bias = name.endswith("bias")
            embedding = isinstance(part, nn.Embedding | nn.EmbeddingBag)
            norm = parameter.dim() < 2 and not bias and not embedding
            if (bias and "biases" in kinds) or (norm and "norms" in kinds) or (embedding and "embeddings" in kinds):
                yield parameter


@dataclass(frozen=True)
class Argument:
    """One setting of an optimizer's signature."""

    default: Any
    required: bool
    types: str
    """The annotation as written."""

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value; None if nothing is."""
        if value is None:
            return None if self.default is None else "should not be empty"
        match self._form():
            case int(count):
                right = isinstance(value, list | tuple) and len(value) == count
                if right and all(is_number(each) or (each is None and "None" in self.types) for each in value):
                    return None
                return f"should be a list of {count} numbers"
            case "boolean":
                return None if isinstance(value, bool) else "should be true or false"
            case "string":
                return None if isinstance(value, str) else "should be a text"
            case "integer":
                right = isinstance(value, int) and not isinstance(value, bool)
                return None if right else "should be a whole number"
        return None if is_number(value) else "should be a number"

    def schema(self) -> dict[str, Any]:
        """JSON Schema of its values."""
        form = self._form()
        if isinstance(form, int):
            item = {"anyOf": [{"type": "number"}, {"type": "null"}]} if "None" in self.types else {"type": "number"}
            schema: dict[str, Any] = {"type": "array", "items": item, "minItems": form, "maxItems": form}
        else:
            schema = {"type": form}
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


@cache
def kinds() -> tuple[str, ...]:
    """The optimizers of the installed torch that a recipe may name."""
    return tuple(sorted(_classes()))


@cache
def signature(kind: str) -> dict[str, Argument]:
    """The settings of a kind, with their defaults.

    Raises:
        KeyError: there is no such kind.
    """
    name, path = _classes()[kind]
    body = ast.parse(path.read_text(encoding="utf-8")).body
    constants = {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_literal(node.value)
    }
    found = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    init = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    arguments = init.args.args[2:]  # after self and params
    padded = [None] * len(arguments) + [_Named(constants).visit(default) for default in init.args.defaults]
    pairs = [
        *zip(arguments, padded[len(padded) - len(arguments) :], strict=True),
        *zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True),
    ]
    return {
        argument.arg: Argument(
            None if default is None else ast.literal_eval(default),
            default is None,
            ast.unparse(argument.annotation) if argument.annotation else "",
        )
        for argument, default in pairs
        if argument.arg not in HOW_TO_COMPUTE and _is_literal(default)
    }


class _Named(ast.NodeTransformer):
    """Puts constants of a module in the place of their names."""

    def __init__(self, constants: Mapping[str, ast.expr]) -> None:
        self.constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.constants.get(node.id, node)


def _is_literal(default: ast.expr | None) -> bool:
    try:
        return default is None or ast.literal_eval(default) is not Ellipsis
    except ValueError:
        return False


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
