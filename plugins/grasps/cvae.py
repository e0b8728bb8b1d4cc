"""The learner that makes grasps in one step, in torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.api import Batch, Context, Loss, Mean, Progress

from .answers import clouds, drawn
from .geometry import LimitedGrasps
from .learner import GraspLearner, weighted_loss
from .network import NUMBERS, GraspNetwork

if TYPE_CHECKING:
    from .config import GraspCvaeConfig
    from .served import GraspRequest


class CvaeNetwork(GraspNetwork):
    """A network with an encoder that predicts the latent distribution of a grasp."""

    def __init__(
        self, config: GraspCvaeConfig, tables: Mapping[str, Tensor]
    ) -> None:
        super().__init__(config, config.latent, tables)
        width = config.width
        outputs = 2 * config.latent
        self.posterior = nn.Sequential(
            nn.Linear(NUMBERS + width, 2 * width),
            nn.SiLU(),
            nn.Linear(2 * width, outputs),
        )

    def forward(
        self, chance: Tensor, tokens: Tensor, grasp: Tensor | None = None
    ) -> Any:
        """Returns scaled grasps [B, G, 25] for noise [B, G, latent] and tokens [B, M, width].

        With grasps [B, G, 25] it reconstructs these from their latent distribution, and also
        returns its mean and the logarithm of its variance, [B, G, latent] each.
        """
        # The shape can be traced; ``len`` would become a constant.
        time = chance.new_zeros(chance.shape[0])
        if grasp is None:
            return self.transformer(chance, tokens, time)
        cloud = tokens.mean(1, keepdim=True).expand(-1, grasp.shape[1], -1)
        posterior = self.posterior(torch.cat([grasp, cloud], -1)).float()
        mean, log_variance = posterior.chunk(2, -1)
        # The reparametrization of Kingma and Welling (arXiv 1312.6114) lets gradients through.
        latent = mean + (log_variance / 2).exp() * chance
        answer = self.transformer(latent, tokens, time)
        return answer, mean, log_variance


class GraspCvae(GraspLearner):
    """Makes grasps again from a few numbers, which are kept close to a normal distribution."""

    module: CvaeNetwork
    config: GraspCvaeConfig

    def build(
        self,
        config: GraspCvaeConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """The network."""
        return CvaeNetwork(config, context.tables)

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Chance, [B, G, latent]."""
        shape = (*batch["grasp"].shape[:2], self.config.latent)
        return {
            "chance": torch.randn(
                shape, generator=generator, device=generator.device
            )
        }

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the reconstruction error, and the divergence from a normal
        distribution with increasing weight; the latter is logged in nats, without its weight.
        """
        grasp = self.straightened(batch)
        tokens = self.slots.encode(batch["cloud"], batch.get("number"))
        answer, mean, log_variance = self.slots.forward(
            noise["chance"], tokens, grasp
        )
        elements = mean.square() + log_variance.exp() - 1 - log_variance
        divergence = 0.5 * elements.sum(-1).mean(1)

        # At full weight from the start, the latent numbers would lose all information before
        # the decoder has learned to use them.
        warmup = self.config.warmup
        share = min(1.0, progress.fraction / warmup) if warmup else 1.0
        weight = self.config.divergence * share
        errors = self.slots.restoration(answer, grasp)
        parts = {**errors, "divergence": weight * divergence}
        loss = weighted_loss(
            parts,
            log_variances=self.log_variances(),
            with_samples=self.context.sample_losses,
        )
        # In nats, whatever its weight: a vanished divergence means that the latent numbers
        # contain nothing about the grasp.
        nats = Mean(divergence.detach().sum(), len(divergence))
        return loss._replace(also={**loss.also, "divergence": nats})

    def inputs(self, batch: Batch) -> Any:
        """Returns clouds, and noise that depends on the number of the row."""
        rows, grasps = batch["grasp"].shape[:2]
        generator = self.chance(batch)
        chance = torch.stack(
            [
                torch.randn(grasps, self.config.latent, generator=generator)
                for _ in range(rows)
            ]
        )
        return {"cloud": batch["cloud"], "chance": chance.to(self.device)}

    def requested(self, requests: Sequence[GraspRequest]) -> Any:
        """Clouds and chance."""
        chance = drawn(requests, requests[0].grasps, self.config.latent)
        return {
            "cloud": clouds(requests, self.device),
            "chance": chance.to(self.device),
        }

    @torch.no_grad()
    def predict(self, inputs: Any) -> LimitedGrasps:
        """Returns grasps in metres and radians, with proper rotations and joints within their
        limits, [B, G, 25].
        """
        with self.evaluating():
            scaled = self.slots.forward(
                inputs["chance"], self.slots.encode(inputs["cloud"])
            )
            return self.placed(scaled, inputs["cloud"])
