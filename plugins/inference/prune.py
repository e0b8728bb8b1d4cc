"""Heads and hidden units that matter least are taken out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from runner.api import (
    Pipeline,
    Progress,
    Prunable,
    Setting,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from runner.api import GradientLearner

Share = Annotated[float, Field(ge=0, lt=1)]
BATCHES = 8
"""From which gradients are taken."""
NAMES = {"heads": "heads", "ff": "inner units"}
SIZES = ("out_features", "out_channels", "num_channels"), ("in_features", "in_channels")
"""Attributes that hold the size of a layer's outputs, and of its inputs."""


class PruneConfig(StageConfig):
    """Takes attention heads and hidden units out of the network, and rebuilds its layers smaller.

    In every layer, the least important units are removed: by the sum of the absolute weights that
    write and read them (Li et al. 2017, arXiv 1608.08710), or by the change of the loss without
    each, which needs a few batches (Michel et al. 2019, arXiv 1905.10650). The smaller network
    computes the same as the complete one with those units at zero. With ``updates``, the run's
    training continues for a while, at a small learning rate.

    When it helps: networks that are larger than their task; time and memory fall with
    the parameters.
    When it hurts: small networks, in which every unit is needed; and a large share without updates.
    """

    kind: ClassVar[str] = "prune"
    phase: ClassVar[int] = 1

    heads: Share = 0.25
    """Share of the attention heads of every layer that goes."""
    ff: Share = 0.25
    """Share of the units inside every feed-forward layer or residual block."""
    importance: Literal["gradients", "weights"] = "gradients"
    """By what units are compared."""
    updates: Annotated[int, Field(ge=0)] = 0
    """Number of updates after pruning."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Initial learning rate; it ends at zero."""

    def contract(self, setting: Setting) -> Statistical:
        """Something is lost."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if both shares are zero."""
        return (
            None if self.heads or self.ff else "heads and ff are 0: nothing is removed"
        )

    def implementation(self) -> type[Stage]:
        """Returns the implementation."""
        return Prune


class Prune(Stage):
    """Makes the network smaller."""

    def attach(self, pipeline: Pipeline) -> None:
        """Cuts every layer that the learner names, and trains what is left.

        Raises:
            UsageError: the learner names none, or the shares are less than one unit of any layer.
        """
        from .network import digest, parameters, settled, trained

        config = self.config
        learner = settled(pipeline, config.kind)
        before = parameters(learner.module)
        key = digest(learner.module, config.model_dump(), learner.context.seed)
        cuts = self._cuts(learner)
        scores = (
            _changes(learner, pipeline, cuts)
            if config.importance == "gradients"
            else [*map(_weights, cuts)]
        )
        for (group, gone), score in zip(cuts.items(), scores, strict=True):
            _cut(group, score.topk(group.units - gone).indices.sort().values)
        learner.configure_optimizers()
        if config.updates:
            trained(
                pipeline,
                self,
                f"{config.kind}-{key}",
                learner.module,
                lambda: self._train(learner, pipeline),
            )
        left = parameters(learner.module)
        said = " and ".join(
            _said(cuts, kind)
            for kind in NAMES
            if any(group.kind == kind for group in cuts)
        )
        pipeline.note(
            f"without {said}: {before:,} parameters are {left:,} ({left / before:.2f}x)"
        )

    def _cuts(self, learner: GradientLearner) -> dict[Prunable, int]:
        """Returns how many units of every group are removed."""
        groups = list(learner.prunable())
        if not groups:
            raise UsageError(
                f"prune: learner '{learner.config.kind}' has no removable units (Learner.prunable)"
            )
        gone = {
            group: int(getattr(self.config, group.kind) * group.units + 1e-9)
            for group in groups
        }
        if not any(gone.values()):
            of = ", ".join(
                f"{kind}: {getattr(self.config, kind)}"
                for kind in sorted({group.kind for group in groups})
            )
            raise UsageError(
                f"prune: {of} is less than one unit of any layer; take more, or switch the "
                f"stage off"
            )
        return {group: count for group, count in gone.items() if count}

    def _train(self, learner: GradientLearner, pipeline: Pipeline) -> None:
        """Trains for the configured number of updates."""
        updates = self.config.updates
        for done, (batch, noise) in enumerate(islice(pipeline.batches(), updates)):
            for _, optimizer in learner.optimizers():
                for group in optimizer.param_groups:
                    group["lr"] = self.config.lr * (1 - done / updates)
            learner.update(batch, noise, Progress("updates", updates, updates=updates))


def _said(cuts: dict[Prunable, int], kind: str) -> str:
    """Returns how many units of a kind are removed, as text."""
    own = {group: gone for group, gone in cuts.items() if group.kind == kind}
    return f"{sum(own.values())} of {sum(group.units for group in own)} {NAMES[kind]}"


# --- which units matter
# -----------------------------------------------------------------------------------------------


def _weights(group: Prunable) -> Tensor:
    """The sum of the absolute weights of every unit, [units]."""
    import torch

    made = [
        layer.weight.detach()
        .abs()
        .flatten(1)
        .sum(1)
        .view(times, group.units, -1)
        .sum((0, 2))
        for layer, times in group.made_by
        if layer.weight.dim() > 1
    ]
    read = [
        layer.weight.detach()
        .abs()
        .transpose(0, 1)
        .flatten(1)
        .sum(1)
        .view(group.units, -1)
        .sum(1)
        for layer in group.read_by
    ]
    return torch.stack([*made, *read]).sum(0)


def _changes(
    learner: GradientLearner, pipeline: Pipeline, groups: Iterable[Prunable]
) -> list[Tensor]:
    """Returns the absolute change of the loss of a batch without the values of every unit, [units]
    for each group.

    The derivative with respect to a factor before a unit is the sum of its weights times their
    gradients.
    """
    import torch

    learner.module.eval()
    weights = [[layer.weight for layer in group.read_by] for group in groups]
    scores = [torch.zeros(group.units, device=learner.device) for group in groups]
    for batch, noise in islice(pipeline.batches(), BATCHES):
        with torch.enable_grad():
            loss = learner.slots.loss(batch, noise, Progress("updates", 1, updates=1))
            flat = torch.autograd.grad(
                loss.sum / loss.count, [weight for each in weights for weight in each]
            )
        gradients = iter(flat)
        for score, own in zip(scores, weights, strict=True):
            for weight in own:
                change = (
                    (weight * next(gradients))
                    .detach()
                    .transpose(0, 1)
                    .flatten(1)
                    .sum(1)
                )
                score += change.view(len(score), -1).sum(1).abs()
    return scores


# --- what goes ----------------------------------------------------------------------------------
# ----------------------


def _cut(group: Prunable, kept: Tensor) -> None:
    """Leaves these units of a group, by their numbers."""
    for layer, times in group.made_by:
        _shrink(layer, 0, times, group.units, kept)
    for reader in group.read_by:
        _shrink(reader, 1, 1, group.units, kept)
    for owner, attribute in group.counted:
        setattr(owner, attribute, len(kept))


def _shrink(layer: nn.Module, side: int, times: int, units: int, kept: Tensor) -> None:
    """Selects units of the outputs (side 0) or the inputs (side 1) of a layer, which
    has them ``times`` times.
    """
    import torch

    for name, parameter in list(layer.named_parameters(recurse=False)):
        # A bias has no inputs.
        if parameter.dim() <= side:
            continue
        index = (
            torch.arange(parameter.shape[side], device=kept.device)
            .view(times, units, -1)[:, kept]
            .flatten()
        )
        smaller = parameter.detach().index_select(side, index)
        setattr(
            layer,
            name,
            torch.nn.Parameter(smaller, requires_grad=parameter.requires_grad),
        )
        for attribute in SIZES[side]:
            if hasattr(layer, attribute):
                setattr(layer, attribute, len(index))
