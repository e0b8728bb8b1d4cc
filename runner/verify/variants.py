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
AGAIN = "baseline again"
"""A second measurement of the baseline, for comparisons of A with A."""
BASELINES = (BASELINE, AGAIN)
"""The references of variants."""
ONE_PROCESS = "one process"
"""The baseline in a single process, where several processes are measured."""
ALL = "all"
USUAL = "usual"
"""The stages that a training script usually has."""
Group = Literal["alone", "phases", "all", "all_but", "usual"]
GROUPS: tuple[Group, ...] = get_args(Group)
_FETCHING = frozenset({"draw", "next_batch", "transfer"})
"""Slots that act before an update has its batch."""


@dataclass(frozen=True)
class Variant:
    """A set of stages.

    Attributes:
        name: The name of the set.
        stages: Kinds of its stages, in the order in which they attach; none for the
            baseline.
        also: Alternative names of the same set, which is measured once.
    """

    name: str
    stages: tuple[str, ...]
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names of the variant."""
        return (self.name, *self.also)


@dataclass(frozen=True)
class VariantSet:
    """The variants of one recipe, and those that are impossible.

    Attributes:
        variants: The baseline, and then the variants in the order of their importance.
        inactive: Stages that have nothing to do on this machine, with the reason.
        refused: Variants that cannot exist, with the reason.
    """

    variants: tuple[Variant, ...]
    inactive: Mapping[str, str]
    refused: Mapping[str, str]

    def find(self, stages: Collection[str]) -> Variant | None:
        """Returns the variant with exactly these stages."""
        for variant in self.variants:
            if set(variant.stages) == set(stages):
                return variant
        return None

    def named(self, name: str) -> Variant | None:
        """Returns the variant of that name."""
        for variant in self.variants:
            if name in variant.names:
                return variant
        return None


def variants_of(
    recipe: Recipe,
    device: torch.device,
    groups: Collection[Group] = GROUPS,
    processes: int = 1,
) -> VariantSet:
    """Returns the baseline, and sets of the active stages, of these groups.

    Args:
        recipe: The recipe.
        device: The device of the training.
        groups: The groups.
        processes: Number of processes of the training; if there are several, the baseline in one
            is a variant, too.

    Raises:
        UsageError: None of them may run on this machine.
    """
    inactive = inactive_stages(recipe, recipe.stages, device, processes)
    if processes > 1:
        inactive |= _reasons_for_one_process(recipe, device, processes)
    active = [kind for kind in recipe.stages if kind not in inactive]
    # A set with several names is measured once.
    names_of_sets: dict[tuple[str, ...], list[str]] = {}
    refused: dict[str, str] = {}
    for name, stages in _named_sets(recipe.stages, active, groups):
        try:
            idle = inactive_stages(recipe, stages, device, processes)
        except UsageError as error:
            refused[name] = str(error)
            continue
        if idle:
            reasons = (
                f"{kind} would be inactive: {reason}" for kind, reason in idle.items()
            )
            refused[name] = "; ".join(reasons)
        else:
            names_of_sets.setdefault(stages, []).append(name)
    # The complete recipe has this name, too, if it was requested with another one.
    names_of_all = names_of_sets.get(tuple(active), [])
    # Without stages, several processes are compared with one.
    has_all = active or processes == 1
    if has_all and ALL not in names_of_all:
        names_of_all.append(ALL)
    variants = [
        Variant(name, stages, tuple(also))
        for stages, (name, *also) in names_of_sets.items()
    ]
    if processes > 1:
        # After all stages together, which are measured first if there is little time.
        variants.insert(2, Variant(ONE_PROCESS, ()))
    return VariantSet(tuple(variants), inactive, refused)


def names(recipe: Recipe) -> set[str]:
    """Returns the names of the variants of a recipe if all of its stages are active."""
    sets = _named_sets(recipe.stages, list(recipe.stages), GROUPS)
    return {name for name, _ in sets}


def _reasons_for_one_process(
    recipe: Recipe, device: torch.device, processes: int
) -> dict[str, str]:
    """Returns the stages that are for one process, with the reason."""
    from runner.distributed.refusals import reason_for_one_process
    from runner.training.pipeline import setting_of

    setting = setting_of(recipe, device, processes=processes)
    reasons = {
        kind: reason_for_one_process(stage, setting)
        for kind, stage in recipe.stages.items()
    }
    return {kind: reason for kind, reason in reasons.items() if reason is not None}


def required(stages: Mapping[str, StageConfig], kind: str) -> set[str]:
    """Returns all stages that a stage requires, directly or indirectly."""
    direct = set(stages[kind].requires)
    return direct.union(*(required(stages, needed) for needed in direct))


def usual_stages(
    stages: Mapping[str, StageConfig], active: Sequence[str]
) -> tuple[str, ...]:
    """Returns the active stages that a training script usually has, and what they require."""
    usual = {kind for kind in active if stages[kind].usual}
    usual |= set().union(*(required(stages, kind) for kind in usual))
    return tuple(kind for kind in active if kind in usual)


def _named_sets(
    stages: Mapping[str, StageConfig], active: list[str], groups: Collection[Group]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields names and sets, the most important ones first."""

    def ordered(kinds: Collection[str]) -> tuple[str, ...]:
        return tuple(kind for kind in active if kind in kinds)

    yield BASELINE, ()
    if "all" in groups and active:
        yield ALL, tuple(active)
    usual = usual_stages(stages, active)
    # A single stage is a set anyway.
    if "usual" in groups and len(usual) > 1:
        yield USUAL, usual
    if "phases" in groups:
        phases = sorted({stages[kind].phase for kind in active})
        for last in phases:
            name = f"phases {phases[0]}-{last}"
            if last == phases[0]:
                name = f"phase {last}"
            yield name, tuple(kind for kind in active if stages[kind].phase <= last)
    if "alone" in groups:
        for kind in active:
            needed = required(stages, kind)
            # The gain of the stage is relative to the stages that it requires.
            if needed:
                yield " + ".join(ordered(needed)), ordered(needed)
            yield kind, ordered({kind} | needed)
    if "all_but" in groups:
        for kind in active:
            dependent = {
                candidate for candidate in active if kind in required(stages, candidate)
            }
            yield f"all but {kind}", ordered(set(active) - dependent - {kind})


def inactive_stages(
    recipe: Recipe, kinds: Collection[str], device: torch.device, processes: int = 1
) -> dict[str, str]:
    """Returns the stages among these that have nothing to do when exactly these are
    active, with the reason.

    Raises:
        UsageError: One of them may not run on this machine.
    """
    # Files of ablations are read without torch, which comes with this import.
    from runner.training.pipeline import setting_of

    setting = setting_of(recipe, device, kinds, processes)
    reasons: dict[str, str] = {}
    for kind, stage in setting.stages.items():
        try:
            reason = stage.inactive(setting)
        except UsageError as error:
            raise UsageError(f"{kind}: {error}") from None
        for needed in stage.requires:
            is_missing = needed in reasons or needed not in setting.stages
            if reason is None and is_missing:
                cause = reasons.get(needed, "it is off")
                reason = f"it requires '{needed}', which is inactive: {cause}"
        if reason is not None:
            reasons[kind] = reason
    return reasons


def nothing_to_judge(recipe: Recipe, inactive: Mapping[str, str]) -> UsageError:
    """Returns the error about a recipe none of whose stages does anything on this machine.

    Args:
        recipe: The recipe.
        inactive: Its inactive stages, with the reason.
    """
    if not inactive:
        hint = "switch one on with --set optimization.STAGE=on"
        return UsageError(f"recipe '{recipe.name}' has no stage to verify; {hint}")
    reasons = "; ".join(f"{kind}: {reason}" for kind, reason in inactive.items())
    return UsageError(
        f"no stage of recipe '{recipe.name}' does anything here ({reasons})"
    )


def weakest(recipe: Recipe, stages: Collection[str], processes: int = 1) -> Contract:
    """Returns the contract of several stages together, which is the weakest of theirs."""
    contracts = [contract_of(recipe, kind, processes) for kind in stages]

    def weakness(contract: Contract) -> int:
        return (Exact, Close, Statistical).index(type(contract))

    return max(contracts, key=weakness, default=Exact())


def contract_of(recipe: Recipe, kind: str, processes: int = 1) -> Contract:
    """Returns the contract of a recipe's stage on this machine."""
    from runner.training.pipeline import resolve_device, setting_of

    device = resolve_device(recipe.device)
    setting = setting_of(recipe, device, processes=processes)
    return recipe.stages[kind].contract(setting)


def beyond_updates(recipe: Recipe, stages: Sequence[str]) -> str | None:
    """Returns a stage that is not Exact and acts where batches come from, which recorded
    batches cannot show; None without one.
    """
    for kind in stages:
        stage = recipe.stages[kind]
        fetches = stage.prepares or (stage.claims | stage.wraps) & _FETCHING
        if fetches and not isinstance(contract_of(recipe, kind), Exact):
            return kind
    return None
