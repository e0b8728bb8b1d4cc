"""Optimizers as a recipe names them: any of ``torch.optim``, with the settings of its signature.

The signatures are read from torch's source text, so that validating a recipe does not import torch.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
    create_model,
    model_serializer,
)
from pydantic_core import to_jsonable_python

from runner.plugin.config import Config
from runner.system.tensor_trees import map_tensors, tensors

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from runner.plugin.context import Slots

IMPLEMENTATION_SETTINGS = ("foreach", "fused", "capturable", "differentiable")
"""Settings of torch that stages make, not recipes."""
Spared = Literal["biases", "norms", "embeddings"]
SPARED: tuple[Spared, ...] = get_args(Spared)
RUNNER_SETTINGS = ("max_grad_norm", "spare", "groups", "layer_decay")
"""Settings that torch does not have."""
ROLE_SETTINGS = ("groups", "layer_decay")
"""Settings that concern the parameters of one role."""

_DESCRIPTIONS = {
    "adjust_lr_fn": "Adjustment of the learning rate to a matrix's shape: original (also null) "
    "or match_rms_adamw.",
    "alpha": "Smoothing constant of the average of squared gradients; of asgd, the power of the "
    "step size.",
    "amsgrad": "Whether the maximum of past second moments is used.",
    "beta2_decay": "Exponent of the decay of the second moment's average.",
    "betas": "Decay rates of the averages of the gradient and of its square.",
    "centered": "Whether the gradient is divided by an estimate of its standard deviation.",
    "d": "Threshold at which an update is clipped.",
    "dampening": "Share of the gradient that momentum leaves out.",
    "decoupled_weight_decay": "Whether weight decay is applied to the parameters only, as adamw "
    "does.",
    "eps": "Term added to a denominator for numerical stability; of adafactor a pair, the second "
    "for parameter scales.",
    "etas": "Factors by which a step size falls and rises.",
    "initial_accumulator_value": "First value of the sum of squared gradients.",
    "lambd": "Decay of the parameters in each step.",
    "lr_decay": "Decay of the learning rate with the number of updates.",
    "maximize": "Whether the loss is maximized instead of minimized.",
    "momentum": "Momentum factor.",
    "momentum_decay": "Decay of the momentum factor.",
    "nesterov": "Whether momentum is Nesterov's.",
    "ns_coefficients": "Coefficients of the Newton-Schulz polynomial.",
    "ns_steps": "Number of Newton-Schulz iterations.",
    "rho": "Decay rate of the averages of squared gradients and updates.",
    "step_sizes": "Smallest and largest step size.",
    "t0": "Update after which parameters are averaged.",
    "weight_decay": "Weight decay; parameters listed in spare have none.",
}


def _as_written(value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
    """Returns an integer unchanged, so that a lock has the same text as its recipe."""
    check(value)
    if info.field_name == "lr" and value < 0:
        raise ValueError("should not be below 0")
    return value


_Number = Annotated[float, WrapValidator(_as_written)]


@dataclass(frozen=True)
class Clipping:
    """Clips gradients before a step. A compiler traces it, which it could not with settings."""

    max_norm: float

    def __call__(
        self, slots: Slots, optimizer: Optimizer, parameters: Sequence[Tensor]
    ) -> None:
        """Clips the gradients of an optimizer's parameters to the norm."""
        slots.unscale(optimizer)
        slots.clip(parameters, self.max_norm)


class GroupSettings(Config):
    """Settings of a group of parameters; those that are left out are the optimizer's.

    ``settings_of`` a kind adds those of torch.
    """

    spare: tuple[Annotated[Spared, WithJsonSchema({"enum": list(SPARED)})], ...] = (
        SPARED
    )
    """Parameters of the group without weight decay."""

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the settings of the optimizer's signature that the group has."""
        assigned = self.model_fields_set - {"spare"}
        return {name: value for name, value in self if name in assigned}

    @model_serializer(mode="wrap")
    def _dumped(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        assigned = self.model_fields_set
        return {name: value for name, value in dump(self).items() if name in assigned}


class OptimizerSettings(Config):
    """The optimizer of one role; ``settings_of`` a kind has all parameters of its signature except
    those of the implementation.
    """

    kind: ClassVar[str]
    """Name of a class in ``torch.optim``, in lower case: ``adamw``, ``sgd``."""
    elsewhere: ClassVar = {
        **dict.fromkeys(
            IMPLEMENTATION_SETTINGS,
            "selects an implementation, which is the task of stages (fused_optimizer, cuda_graph)",
        ),
        **dict.fromkeys(
            ("kind", "max_grad_norm", "groups", "layer_decay"),
            "is a setting of the optimizer, for all of its groups",
        ),
    }

    lr: _Number
    """The learning rate before any schedule."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """To which gradients are clipped; null leaves them as they are."""
    spare: tuple[Annotated[Spared, WithJsonSchema({"enum": list(SPARED)})], ...] = (
        SPARED
    )
    """Parameters without weight decay."""
    groups: Mapping[str, GroupSettings] = Field(default_factory=dict)
    """Settings of parameters by pattern of their names; the first pattern that matches applies."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor between the learning rates of a block of the model and of the block above it; null has
    one rate for all blocks.
    """

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the settings of the optimizer's signature."""
        return {name: value for name, value in self if name not in RUNNER_SETTINGS}

    def values(self) -> dict[str, Any]:
        """Returns the values in the form of a recipe."""
        # The settings of torch are first, as in its signature.
        values = to_jsonable_python({"kind": self.kind, **self.settings, **dict(self)})
        # A list keeps the order of the patterns, which matters, in every file.
        groups = values.pop("groups")
        if groups:
            values["groups"] = [
                {pattern: settings} for pattern, settings in groups.items()
            ]
        if self.layer_decay is None:
            del values["layer_decay"]
        return dict(values)

    def optimizer(self) -> type[Optimizer]:
        """Returns the class in ``torch.optim``."""
        import torch

        name, _ = kinds()[self.kind]
        cls: type[Optimizer] = getattr(torch.optim, name)
        return cls

    def make(self, slots: Slots, parameters: Sequence[Any]) -> Optimizer:
        """Makes the optimizer of parameters, or of groups of them, with the slot of that name."""
        cls = self.optimizer()
        optimizer: Optimizer = slots.make_optimizer(cls, parameters, **self.settings)
        return optimizer

    def clipping(self) -> Clipping | None:
        """Returns how gradients are clipped before a step; None if they are not."""
        return None if self.max_grad_norm is None else Clipping(self.max_grad_norm)

    def parameter_groups(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module] = (),
        *,
        frozen: bool = True,
    ) -> list[dict[str, Any]]:
        """Returns the parameter groups of a module, as the recipe divides its parameters.

        Args:
            module: The module.
            blocks: Its blocks, first to last, for ``layer_decay``.
            frozen: Whether frozen parameters are in the groups, so that they are trained as soon as
                ``requires_grad_(True)`` unfreezes them. Without a gradient, an optimizer passes
                them over.
        """
        # The module imports torch, which the validation of a recipe does not need.
        from runner.plugin.parameter_groups import parameter_groups

        return parameter_groups(self, module, blocks, frozen=frozen)


def restore(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Loads a state of an optimizer that may have used other kernels; the kernels of
    this one are unchanged.

    All entries are loaded, also those that an optimizer adds in its own ``state_dict``.
    """
    # Copied, because torch would use the passed tensors themselves. The saved state may be loaded
    # again, so it must not change.
    entries = {
        name: map_tensors(_copied, entry)
        for name, entry in saved.items()
        if name != "param_groups"
    }
    if "param_groups" in saved:
        entries["param_groups"] = _with_kernels_of(optimizer, saved["param_groups"])
    if {"state", "param_groups"} <= entries.keys():
        is_recast = _is_recast(optimizer, entries["state"])
        load_exactly(optimizer, entries, keep_saved_types=not is_recast)
    else:
        optimizer.load_state_dict(entries)


def _with_kernels_of(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns copies of saved parameter groups with the implementation of an optimizer."""
    import torch

    groups = [copy.deepcopy(dict(group)) for group in saved]
    for group, present in zip(groups, optimizer.param_groups, strict=True):
        for name in IMPLEMENTATION_SETTINGS:
            if name in present:
                group[name] = present[name]
        group["lr"] = float(group["lr"])
        # A captured graph reads the learning rate from a tensor.
        if isinstance(present["lr"], torch.Tensor):
            group["lr"] = torch.full_like(present["lr"], group["lr"])
    return groups


def _is_recast(optimizer: Optimizer, saved: Mapping[Any, Any]) -> bool:
    """Returns whether a state of float32 parameters is loaded for float64 ones, or vice versa."""
    import torch

    single = {torch.float32}
    double = {torch.float64}
    parameters = {parameter.dtype for parameter in _parameters(optimizer)}
    moments = set()
    for entry in saved.values():
        # An optimizer with its own state may have other entries.
        if not isinstance(entry, Mapping):
            continue
        # Counts of steps are float32 whatever the parameters are.
        values = {key: value for key, value in entry.items() if key != "step"}
        for tensor in tensors(values):
            if tensor.is_floating_point():
                moments.add(tensor.dtype)
    return (parameters, moments) in ((single, double), (double, single))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    groups = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def _copied(tensor: Tensor) -> Tensor:
    """Returns an independent copy."""
    import torch

    # A sparse tensor, such as a moment of a sparse gradient, has no order of memory.
    if tensor.layout != torch.strided:
        return tensor.clone()
    return tensor.clone(memory_format=torch.contiguous_format)


def load_exactly(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    load: Callable[[Optimizer, Any], None] | None = None,
    keep_saved_types: bool = True,
) -> None:
    """Loads a state without the conversions that ``Optimizer.load_state_dict`` makes.

    torch converts loaded numbers to the type of the parameter, and the count of steps of a
    capturable optimizer to float32: a moment in float32 of a parameter in bfloat16 is rounded, an
    index becomes a floating-point number, and the bias correction of a float64 training has eight
    digits. Here a number keeps the type that the optimizer has for it already, or else the type in
    which it was saved.

    Args:
        optimizer: Receives the state.
        saved: The result of ``state_dict`` of an optimizer.
        load: Loads it; ``load_state_dict`` of the optimizer's class by default.
        keep_saved_types: Whether numbers that this optimizer does not have yet keep the
            type in which they were saved. If not, only single numbers do, and others
            get the type of their parameter.
    """
    previous = {
        parameter: dict(entry)
        for parameter, entry in optimizer.state.items()
        if isinstance(entry, Mapping)
    }
    if load is None:
        optimizer.load_state_dict(dict(saved))
    else:
        load(optimizer, saved)
    names = [name for group in saved["param_groups"] for name in group["params"]]
    fused: set[int] = set()
    for group in optimizer.param_groups:
        if group.get("fused"):
            fused.update(map(id, group["params"]))
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        loaded = optimizer.state.get(parameter)
        if not isinstance(loaded, MutableMapping):
            continue
        present = previous.get(parameter, {})
        for key, value in saved["state"].get(name, {}).items():
            if not _are_plain_tensors(value, loaded.get(key)):
                continue
            dtype = loaded[key].dtype
            is_single = value.dim() == 0 and (key == "step" or parameter.dim() > 0)
            # A fused kernel reads its count of steps as float32, whatever another kernel has
            # saved.
            is_fused_step = key == "step" and id(parameter) in fused
            if _are_plain_tensors(present.get(key)):
                dtype = present[key].dtype
            elif (keep_saved_types or is_single) and not is_fused_step:
                dtype = value.dtype
            exact = loaded[key]
            if dtype != exact.dtype:
                exact = value.to(exact.device, dtype)
            loaded[key] = _laid_out_as(exact, present.get(key), parameter)


def _are_plain_tensors(*values: Any) -> bool:
    """Returns whether all values are dense tensors without a subclass or a special layout."""
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    return all(
        type(value) in kinds and value.layout == torch.strided for value in values
    )


def _laid_out_as(value: Tensor, present: Any, parameter: Tensor) -> Tensor:
    """Returns the value with the strides of the previous value, or else of its
    parameter, if it has that shape.

    Fused kernels go through a parameter and its state in the order of memory.
    """
    like = present if _are_plain_tensors(present) else parameter
    if value.shape != like.shape or value.stride() == like.stride():
        return value
    return value.new_empty_strided(value.shape, like.stride()).copy_(value)


@cache
def kinds() -> dict[str, tuple[str, Path]]:
    """Returns class and file of every kind, sorted; without LBFGS, which needs a closure that
    evaluates the loss again.
    """
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "optim")
    classes: dict[str, tuple[str, Path]] = {}
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level > 1:
            continue
        path = folder / f"{node.module.rpartition('.')[2]}.py"
        if path.stem in ("optimizer", "lbfgs", "lr_scheduler", "swa_utils"):
            continue
        for alias in node.names:
            if alias.name[0].isupper():
                classes[alias.name.lower()] = (alias.name, path)
    return dict(sorted(classes.items()))


# Reading the source of torch takes milliseconds, and a recipe is validated many times.
@cache
def settings_of(kind: str) -> type[OptimizerSettings]:
    """Returns the settings of a kind, with their defaults."""
    name, path = kinds()[kind]
    module = ast.parse(path.read_text(encoding="utf-8"))
    fields: dict[str, Any] = {}
    for argument, expression in _arguments(module, name):
        if argument.arg in IMPLEMENTATION_SETTINGS or argument.annotation is None:
            continue
        # A recipe cannot contain the default of every argument, such as that of ``params``.
        with suppress(ValueError):
            default = ast.literal_eval(expression)
            # A later torch may have settings that are not listed here.
            description = _DESCRIPTIONS.get(argument.arg, f"See torch.optim.{name}.")
            if argument.arg == "lr":
                description = "The learning rate before any schedule."
            annotation = _type(ast.unparse(argument.annotation), default)
            field = Field(default=default, description=description)
            fields[argument.arg] = (annotation, field)
    settings = create_model(
        name,
        __base__=OptimizerSettings,
        **fields,
        groups=_groups_field(name, fields),
    )
    settings.kind = kind
    return settings


def _groups_field(name: str, fields: Mapping[str, Any]) -> Any:
    """Returns the field of the groups of an optimizer, which may have its settings."""
    group_fields: dict[str, Any] = {}
    for setting, (annotation, field) in fields.items():
        # A setting that is left out is the optimizer's, so the default has no meaning.
        default = Field(default=None, description=field.description)
        group_fields[setting] = (annotation, default)
    group = create_model(
        f"{name}Group",
        __base__=GroupSettings,
        **group_fields,
    )
    return dict[str, group], Field(default_factory=dict)  # type: ignore[valid-type]


def _arguments(module: ast.Module, class_name: str) -> Iterator[tuple[ast.arg, str]]:
    """Yields the arguments of a class with the expressions of their defaults.

    Names of constants of the module are replaced by their values.
    """
    constants = {}
    for node in module.body:
        if isinstance(node, ast.Assign):
            constants[ast.unparse(node.targets[0])] = ast.unparse(node.value)
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            definition = node
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments = node.args
    positional = arguments.args[-len(arguments.defaults) :]
    pairs = [
        *zip(positional, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]

    def value_of(constant: re.Match[str]) -> str:
        return constants.get(constant[0], constant[0])

    for argument, default in pairs:
        if default is not None:
            expression = re.sub(r"\b[A-Z]\w*", value_of, ast.unparse(default))
            yield argument, expression


def _type(annotation: str, default: Any) -> Any:
    """Returns the type of a recipe's setting for a parameter of torch; a recipe cannot
    contain a tensor.
    """
    if isinstance(default, tuple):
        item: Any = _Number | None if None in default else _Number
        length = len(default)
        schema = {
            "type": "array",
            "items": TypeAdapter(item).json_schema(),
            "minItems": length,
            "maxItems": length,
        }
        return Annotated[GenericAlias(tuple, (item,) * length), WithJsonSchema(schema)]
    types: dict[str, Any] = {"bool": bool, "int": int, "str": str}
    item_type = types.get(annotation.split()[0], _Number)
    return item_type | None if default is None else item_type
