"""The learner that makes grasps in one step, in torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.api import Batch, Context, Loss, Progress

from .answers import clouds, drawn
from .learner import GraspLearner, weighed
from .network import NUMBERS, GraspNetwork

if TYPE_CHECKING:
    from .config import GraspCvaeConfig
    from .served import GraspRequest


class CvaeNetwork(GraspNetwork):
    """A network with an encoder that predicts the latent distribution of a grasp."""

    def __init__(self, config: GraspCvaeConfig, tables: Mapping[str, Tensor]) -> None:
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
        """Grasps [B, G, 25], scaled, of chance [B, G, latent] and tokens [B, M, width].

        With grasps [B, G, 25] it makes those again, from the chance that they might have come
        from: also mean and logarithm of the variance of that, [B, G, latent] each.
        """
        # Which, unlike len, can be traced.
        time = chance.new_zeros(chance.shape[0])
        if grasp is None:
            return self.transformer(chance, tokens, time)
        seen = torch.cat(
            [grasp, tokens.mean(1, keepdim=True).expand(-1, grasp.shape[1], -1)], -1
        )
        mean, log_variance = self.posterior(seen).float().chunk(2, -1)
        answer = self.transformer(
            mean + (log_variance / 2).exp() * chance, tokens, time
        )
        return answer, mean, log_variance


class GraspCvae(GraspLearner):
    """Makes grasps again from a few numbers, which are kept close to a normal distribution."""

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
            "chance": torch.randn(shape, generator=generator, device=generator.device)
        }

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the reconstruction error, and the divergence from a normal
        distribution with increasing weight.
        """
        grasp = self.straightened(batch)
        tokens = self.slots.encode(batch["cloud"], batch.get("number"))
        answer, mean, log_variance = self.slots.forward(noise["chance"], tokens, grasp)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(
            -1
        ).mean(1)
        grown = (
            min(1.0, progress.fraction / self.config.warmup)
            if self.config.warmup
            else 1.0
        )
        weight = self.config.divergence * grown
        return weighed(
            {**self.slots.restoration(answer, grasp), "divergence": weight * divergence}
        )

    def inputs(self, batch: Batch) -> Any:
        """Clouds, and chance by the number of the row."""
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
    def predict(self, inputs: Any) -> Tensor:
        """Grasps in metres and radians, with proper rotations, [B, G, 25]."""
        with self.evaluating():
            scaled = self.slots.forward(
                inputs["chance"], self.slots.encode(inputs["cloud"])
            )
            return self.placed(scaled, inputs["cloud"])
