"""Heads and hidden units that matter least are taken out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
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
"""Number of batches for gradients."""
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
    implementation = "Prune"
    phase: ClassVar[int] = 1

    heads: Share = 0.25
    """Share of the attention heads of every layer that goes."""
    ff: Share = 0.25
    """Share of the units inside every feed-forward layer or residual block."""
    importance: Literal["gradients", "weights"] = "gradients"
    """Measure by which units are compared."""
    updates: Annotated[int, Field(ge=0)] = 0
    """Number of updates after pruning."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Initial learning rate; it ends at zero."""

    def contract(self, setting: Setting) -> Statistical:
        """Returns ``Statistical``: units are missing."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if both shares are zero."""
        if self.heads or self.ff:
            return None
        return "heads and ff are 0: nothing is removed"


class Prune(Stage):
    """Makes the network smaller."""

    def attach(self, pipeline: Pipeline) -> None:
        """Prunes every layer that the learner names, and trains the pruned network.

        Raises:
            UsageError: the learner names none, or the shares are less than one unit of any layer.
        """
        from .network import digest, parameters, settled, trained

        config = self.config
        learner = settled(pipeline, config.kind)
        size_before = parameters(learner.module)
        key = digest(learner.module, config.model_dump(), learner.context.seed)
        cuts = self._cuts(learner)
        # All scores come before the first cut, which changes the loss.
        if config.importance == "gradients":
            scores = _changes(learner, pipeline, cuts)
        else:
            scores = [_weights(group) for group in cuts]
        for (group, count), score in zip(cuts.items(), scores, strict=True):
            best = score.topk(group.units - count).indices
            _cut(group, best.sort().values)
        # The optimizers hold the parameters of the complete network.
        learner.configure_optimizers()
        if config.updates:
            trained(
                pipeline,
                self,
                f"{config.kind}-{key}",
                learner.module,
                lambda: self._train(learner, pipeline),
            )
        size_after = parameters(learner.module)
        description = " and ".join(
            _description(cuts, kind)
            for kind in NAMES
            if any(group.kind == kind for group in cuts)
        )
        pipeline.note(
            f"without {description}: {size_before:,} parameters are {size_after:,} "
            f"({size_after / size_before:.2f}x)"
        )

    def _cuts(self, learner: GradientLearner) -> dict[Prunable, int]:
        """Returns how many units of every group are removed."""
        groups = list(learner.prunable())
        if not groups:
            raise UsageError(
                f"prune: learner '{learner.config.kind}' has no removable units (Learner.prunable)"
            )
        # The small number corrects products like 0.3 * 10, which is less than 3.
        counts = {
            group: int(getattr(self.config, group.kind) * group.units + 1e-9)
            for group in groups
        }
        if not any(counts.values()):
            settings = ", ".join(
                f"{kind}: {getattr(self.config, kind)}"
                for kind in sorted({group.kind for group in groups})
            )
            raise UsageError(
                f"prune: {settings} is less than one unit of any layer; take more, or switch the "
                f"stage off"
            )
        return {group: count for group, count in counts.items() if count}

    def _train(self, learner: GradientLearner, pipeline: Pipeline) -> None:
        """Trains for the configured number of updates."""
        updates = self.config.updates
        for update, (batch, noise) in enumerate(
            itertools.islice(pipeline.batches(), updates)
        ):
            for _, optimizer in learner.optimizers():
                for group in optimizer.param_groups:
                    group["lr"] = self.config.lr * (1 - update / updates)
            learner.update(batch, noise, Progress("updates", updates, updates=updates))


def _description(cuts: dict[Prunable, int], kind: str) -> str:
    """Returns how many units of a kind are removed, as text."""
    removed = sum(count for group, count in cuts.items() if group.kind == kind)
    units = sum(group.units for group in cuts if group.kind == kind)
    return f"{removed} of {units} {NAMES[kind]}"


def _weights(group: Prunable) -> Tensor:
    """Returns the sum of the absolute weights of every unit, [units]."""
    import torch

    written = [
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
    return torch.stack([*written, *read]).sum(0)


def _changes(
    learner: GradientLearner, pipeline: Pipeline, groups: Iterable[Prunable]
) -> list[Tensor]:
    """Returns for each group the absolute change of the loss without every unit, [units].

    The derivative with respect to a factor before a unit is the sum of its weights times their
    gradients.
    """
    import torch

    learner.module.eval()
    weights = [[layer.weight for layer in group.read_by] for group in groups]
    scores = [torch.zeros(group.units, device=learner.device) for group in groups]
    for batch, noise in itertools.islice(pipeline.batches(), BATCHES):
        with torch.enable_grad():
            loss = learner.slots.loss(batch, noise, Progress("updates", 1, updates=1))
            flat = torch.autograd.grad(
                loss.sum / loss.count, [*itertools.chain.from_iterable(weights)]
            )
        gradients = iter(flat)
        for score, group_weights in zip(scores, weights, strict=True):
            for weight in group_weights:
                product = (weight * next(gradients)).detach()
                change = product.transpose(0, 1).flatten(1).sum(1)
                score += change.view(len(score), -1).sum(1).abs()
    return scores


def _cut(group: Prunable, remaining: Tensor) -> None:
    """Removes all units of a group except those with the remaining numbers."""
    for layer, times in group.made_by:
        _shrink(layer, 0, times, group.units, remaining)
    for reader in group.read_by:
        _shrink(reader, 1, 1, group.units, remaining)
    for owner, attribute in group.counted:
        setattr(owner, attribute, len(remaining))


def _shrink(
    layer: nn.Module, side: int, repeats: int, units: int, remaining: Tensor
) -> None:
    """Selects units of the outputs (side 0) or the inputs (side 1) of a layer.

    The layer has ``repeats`` blocks of the units, for example keys and values of heads.
    """
    import torch

    for name, parameter in list(layer.named_parameters(recurse=False)):
        # A bias has no inputs.
        if parameter.dim() <= side:
            continue
        positions = torch.arange(parameter.shape[side], device=remaining.device)
        index = positions.view(repeats, units, -1)[:, remaining].flatten()
        smaller = parameter.detach().index_select(side, index)
        pruned = torch.nn.Parameter(smaller, requires_grad=parameter.requires_grad)
        setattr(layer, name, pruned)
        for attribute in SIZES[side]:
            if hasattr(layer, attribute):
                setattr(layer, attribute, len(index))
