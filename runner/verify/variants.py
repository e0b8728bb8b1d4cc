"""The sets of stages that an ablation compares."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from runner.plugin.configs import StageConfig
from runner.plugin.contract import Close, Contract, Exact, Statistical
from runner.recipe.recipe import Recipe
from runner.system.errors import UsageError

if TYPE_CHECKING:
    import torch

BASELINE = "baseline"
AGAIN = "baseline again"  # the second child that measures the baseline, for A/A
BASELINES = (BASELINE, AGAIN)  # the references of variants
ALL = "all"
Group = Literal["alone", "phases", "all", "all_but"]
GROUPS: tuple[Group, ...] = get_args(Group)
_FETCHING = frozenset(
    {"draw", "next_batch", "transfer"}
)  # slots that act before an update has its batch


@dataclass(frozen=True)
class Variant:
    """A set of stages."""

    name: str
    stages: tuple[
        str, ...
    ]  # kinds that are on, in the order in which they attach; none is the baseline
    also: tuple[str, ...] = ()  # other names of the same set, which is measured once

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names of the variant."""
        return (self.name, *self.also)


@dataclass(frozen=True)
class VariantSet:
    """The variants of one recipe, and what cannot be one."""

    variants: tuple[Variant, ...]  # the baseline first, then those that matter most
    inactive: Mapping[
        str, str
    ]  # stages that have nothing to do on this machine, with the reason
    refused: Mapping[str, str]  # variants that cannot exist, with the reason

    def find(self, stages: Collection[str]) -> Variant | None:
        """The variant with exactly these stages."""
        return next(
            (
                variant
                for variant in self.variants
                if set(variant.stages) == set(stages)
            ),
            None,
        )

    def named(self, name: str) -> Variant | None:
        """The variant of that name."""
        return next(
            (variant for variant in self.variants if name in variant.names), None
        )


def variants_of(
    recipe: Recipe, device: torch.device, groups: Collection[Group] = GROUPS
) -> VariantSet:
    """The baseline, and sets of the stages that are on, of these kinds; ``UsageError`` if none may run here."""
    inactive = _inactive(recipe, recipe.stages, device)
    active = [kind for kind in recipe.stages if kind not in inactive]
    found: dict[tuple[str, ...], list[str]] = {}
    refused: dict[str, str] = {}
    for name, stages in _wanted(recipe.stages, active, groups):
        try:
            idle = _inactive(recipe, stages, device)
        except UsageError as error:
            refused[name] = str(error)
            continue
        if idle:
            refused[name] = "; ".join(
                f"{kind} would be inactive: {reason}" for kind, reason in idle.items()
            )
        else:
            found.setdefault(stages, []).append(name)
    if ALL not in (whole := found.get(tuple(active), [])):
        whole.append(ALL)  # whatever name it was requested with
    variants = tuple(
        Variant(name, stages, tuple(also)) for stages, (name, *also) in found.items()
    )
    return VariantSet(variants, inactive, refused)


def names(recipe: Recipe) -> set[str]:
    """Returns the names of the variants of a recipe if all of its stages are active."""
    return {name for name, _ in _wanted(recipe.stages, list(recipe.stages), GROUPS)}


def required(stages: Mapping[str, StageConfig], kind: str) -> set[str]:
    """Returns all stages that a stage requires, directly or indirectly."""
    direct = set(stages[kind].requires)
    return direct.union(*(required(stages, other) for other in direct))


def _wanted(
    stages: Mapping[str, StageConfig], active: list[str], groups: Collection[Group]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and sets, the most important ones first."""

    def ordered(kinds: Collection[str]) -> tuple[str, ...]:
        return tuple(kind for kind in active if kind in kinds)

    yield BASELINE, ()
    if "all" in groups and active:
        yield ALL, tuple(active)
    if "phases" in groups:
        phases = sorted({stages[kind].phase for kind in active})
        for last in phases:
            name = (
                f"phase {last}" if last == phases[0] else f"phases {phases[0]}-{last}"
            )
            yield name, tuple(kind for kind in active if stages[kind].phase <= last)
    if "alone" in groups:
        for kind in active:
            below = required(stages, kind)
            if below:  # the reference for the gain of the stage
                yield " + ".join(ordered(below)), ordered(below)
            yield kind, ordered({kind} | below)
    if "all_but" in groups:
        for kind in active:
            without = {kind} | {
                other for other in active if kind in required(stages, other)
            }
            yield f"all but {kind}", ordered(set(active) - without)


def _inactive(
    recipe: Recipe, kinds: Collection[str], device: torch.device
) -> dict[str, str]:
    """The stages among these that have nothing to do when exactly these are on, with the reason."""
    from runner.training.pipeline import (
        setting_of,
    )  # torch comes with it, and a file of an ablation is read without

    setting = setting_of(recipe, device, kinds)
    reasons: dict[str, str] = {}
    for kind, stage in setting.stages.items():
        try:
            reason = stage.inactive(setting)
        except UsageError as error:
            raise UsageError(f"{kind}: {error}") from None
        lacking = next(
            (
                other
                for other in stage.requires
                if other in reasons or other not in setting.stages
            ),
            None,
        )
        if reason is None and lacking is not None:
            reason = f"it requires '{lacking}', which is inactive: {reasons.get(lacking, 'it is off')}"
        if reason is not None:
            reasons[kind] = reason
    return reasons


def weakest(recipe: Recipe, stages: Collection[str]) -> Contract:
    """Returns the contract of several stages together, which is the weakest of theirs."""
    contracts = [contract_of(recipe, kind) for kind in stages]
    return max(
        contracts,
        key=lambda each: (Exact, Close, Statistical).index(type(each)),
        default=Exact(),
    )


def contract_of(recipe: Recipe, kind: str) -> Contract:
    """Returns the contract of a recipe's stage on this machine."""
    from runner.training.pipeline import resolve_device, setting_of

    return recipe.stages[kind].contract(
        setting_of(recipe, resolve_device(recipe.device))
    )


def beyond_updates(recipe: Recipe, stages: Sequence[str]) -> str | None:
    """A stage that acts where batches come from, which recorded batches cannot show, and is not Exact."""
    for kind in stages:
        stage = recipe.stages[kind]
        fetches = stage.prepares or (stage.claims | stage.wraps) & _FETCHING
        if fetches and not isinstance(contract_of(recipe, kind), Exact):
            return kind
    return None
