"""Divides the parameters of a module into groups of an optimizer: by patterns of names, by blocks,
and by what weight decay spares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from runner.plugin.optimizer import OptimizerSettings

DEFAULT_GROUP = "default"
"""Name of the group of parameters that no pattern matches."""


def parameter_groups(
    settings: OptimizerSettings,
    module: nn.Module,
    blocks: Sequence[nn.Module] = (),
    *,
    frozen: bool = True,
) -> list[dict[str, Any]]:
    """Returns the parameter groups of a module; see ``OptimizerSettings.parameter_groups``.

    A group has only the settings that differ from the optimizer's. If the recipe divides the
    parameters, it has a ``name``, too: its pattern, its block, or ``PATTERN/BLOCK``.
    """
    names = names_of(module)
    sorts = _sorts(module)
    patterns = list(settings.groups)
    layers = blocks_within(module, blocks)
    exponents = None
    if settings.layer_decay is not None:
        exponents = _exponents(module, layers)

    groups: dict[tuple[int, int, bool], dict[str, Any]] = {}
    for parameter in module.parameters():
        if not _can_be_optimized(parameter, frozen):
            continue
        pattern = matching_pattern(patterns, names[parameter])
        number = 0 if pattern is None else 1 + patterns.index(pattern)
        exponent = 0 if exponents is None else exponents[parameter]
        is_spared = _is_spared(settings, pattern, sorts[parameter])
        key = (number, exponent, is_spared)
        if key not in groups:
            groups[key] = {
                "params": [],
                **_group_settings(settings, pattern, exponent, is_spared),
                **_group_name(settings, pattern, exponent, len(layers)),
            }
        groups[key]["params"].append(parameter)
    return [groups[key] for key in sorted(groups)] or [{"params": []}]


def _can_be_optimized(parameter: nn.Parameter, frozen: bool) -> bool:
    """Returns whether an optimizer has the parameter."""
    can_be_unfrozen = parameter.is_floating_point() or parameter.is_complex()
    return parameter.requires_grad or (frozen and can_be_unfrozen)


def names_of(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Returns all names of every parameter; one that layers share has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def matching_pattern(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """Returns the first pattern that matches one of a parameter's names; None without a match."""
    candidates = [prefix for name in names for prefix in prefixes(name)]
    for pattern in patterns:
        if any(fnmatchcase(candidate, pattern) for candidate in candidates):
            return pattern
    return None


def prefixes(name: str) -> Iterator[str]:
    """Yields the modules that contain a parameter, from the outermost, and its name."""
    segments = name.split(".")
    for count in range(1, len(segments) + 1):
        yield ".".join(segments[:count])


def blocks_within(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the blocks that are layers of the module."""
    layers = set(module.modules())
    return [block for block in blocks if block in layers]


def _exponents(
    module: nn.Module, layers: Sequence[nn.Module]
) -> dict[nn.Parameter, int]:
    """Returns the power of ``layer_decay`` in the learning rate of every parameter.

    It is 0 above the last block, 1 in it, and grows by one from block to block; parameters below
    the first block have the largest. A parameter outside of all blocks is below the first one if
    the module registers it before that block, else it is above the last one.
    """
    powers: dict[nn.Parameter, int] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            powers.setdefault(parameter, len(layers) - number)

    outside = len(layers) + 1
    exponents = {}
    for parameter in module.parameters():
        if parameter in powers:
            outside = 0
        exponents[parameter] = powers.get(parameter, outside)
    return exponents


def _sorts(module: nn.Module) -> dict[nn.Parameter, set[str]]:
    """Returns what every parameter is to ``spare``; one that layers share may be two things."""
    sorts: dict[nn.Parameter, set[str]] = {}
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            sort = "norms" if parameter.dim() < 2 else "weights"
            # Recurrent layers and attention of torch have biases such as ``bias_ih_l0``.
            if name.endswith("bias") or name.startswith("bias_"):
                sort = "biases"
            elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                sort = "embeddings"
            sorts.setdefault(parameter, set()).add(sort)
    return sorts


def _is_spared(
    settings: OptimizerSettings, pattern: str | None, sorts: set[str]
) -> bool:
    """Returns whether weight decay, if there is any, leaves a parameter out."""
    decay = getattr(settings, "weight_decay", 0)
    spare = settings.spare
    if pattern is not None:
        group = settings.groups[pattern]
        decay = group.settings.get("weight_decay", decay)
        if "spare" in group.model_fields_set:
            spare = group.spare
    return bool(decay) and not sorts.isdisjoint(spare)


def _group_settings(
    settings: OptimizerSettings, pattern: str | None, exponent: int, is_spared: bool
) -> dict[str, Any]:
    """Returns the settings in which a group differs from the optimizer."""
    values: dict[str, Any] = {}
    if pattern is not None:
        values |= settings.groups[pattern].settings
    if is_spared:
        values["weight_decay"] = 0.0
    if settings.layer_decay is not None:
        rate = values.get("lr", settings.lr)
        values["lr"] = rate * settings.layer_decay**exponent
    return values


def _group_name(
    settings: OptimizerSettings,
    pattern: str | None,
    exponent: int,
    block_count: int,
) -> Mapping[str, str]:
    """Returns the name of a group; none if the recipe does not divide the parameters."""
    segments = []
    if settings.groups:
        segments.append(DEFAULT_GROUP if pattern is None else pattern)
    if settings.layer_decay is not None:
        block = f"block_{block_count - exponent}"
        if exponent == 0:
            block = "above_blocks"
        elif exponent > block_count:
            block = "below_blocks"
        segments.append(block)
    return {"name": "/".join(segments)} if segments else {}
