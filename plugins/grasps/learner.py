"""The learner that takes noise out of sets of grasps, in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, GradientLearner, Loss, Mean, Progress, Prunable

from .answers import clouds, drawn, responses
from .decoder import DitBlock
from .diffusion import ddim, ddpm, kept_signal, straight
from .encoder import grouped
from .geometry import (
    JOINTS,
    ROTATION,
    TRANSLATION,
    matrix,
    six_numbers,
    straightening,
    turned,
)
from .network import NUMBERS, DiffusionNetwork, GraspNetwork

if TYPE_CHECKING:
    from .config import GraspDiffusionConfig
    from .served import DiffusionRequest, GraspRequest, GraspResponse

PARTS = {
    "translation": (TRANSLATION, 20.0),
    "rotation": (ROTATION, 20.0),
    "joints": (JOINTS, 1.0),
}
"""Numbers of a grasp, and what their errors count."""
KEYPOINT_SCALE = 10.0
"""By which metres are multiplied before their errors count."""


class GraspLearner(GradientLearner):
    """Base class of learners of grasps."""

    module: GraspNetwork
    sensitive: ClassVar[tuple[str, ...]] = ("encoder", "*.enter", "*.leave", "*.time")

    def blocks(self) -> list[nn.Module]:
        """Returns the blocks of the transformer."""
        return list(self.module.transformer.blocks)

    def prunable(self) -> Iterator[Prunable]:
        """Yields the removable parts of the blocks."""
        for block in self.module.transformer.blocks:
            yield from cast(DitBlock, block).prunable()

    def group(
        self, cloud: Tensor, number: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The neighbourhoods of clouds, by the numbers of their points; clouds that are kept have
        a number, too.
        """
        return grouped(cloud, self.config.centres, self.config.neighbours)

    def encode(self, cloud: Tensor, number: Tensor | None = None) -> Tensor:
        """Returns tokens [B, M, width] of clouds [B, P, 3]; ``number`` [B] identifies clouds that
        the source has stored.
        """
        with torch.no_grad():
            groups = self.slots.group(cloud, number)
            turn = self.straightening(cloud)[:, None]
            # No product of matrices, which rounds by the size of the batch.
            cloud = (turn * cloud[..., None, :]).sum(-1)
        with self.slots.precision():
            tokens: Tensor = self.module.encoder(cloud, *groups)
        return tokens.to(cloud.dtype)

    def straightening(self, cloud: Tensor) -> Tensor:
        """Returns the rotations of clouds and grasps for the network, [B, 3, 3]."""
        if self.config.straighten:
            return straightening(cloud)
        return torch.eye(3, dtype=cloud.dtype, device=cloud.device).expand(
            len(cloud), 3, 3
        )

    def straightened(self, batch: Batch) -> Tensor:
        """Grasps [B, G, 25], scaled, as the network sees them: turned with their clouds."""
        turn = self.straightening(batch["cloud"])[:, None]
        return self.module.scaled(turned(self.module.metric(batch["grasp"]), turn))

    def placed(self, scaled: Tensor, cloud: Tensor) -> Tensor:
        """Grasps in metres and radians, with proper rotations, turned back to where their clouds
        are.
        """
        back = self.straightening(cloud).transpose(1, 2)[:, None]
        return proper(turned(self.module.metric(scaled), back))

    def restoration(self, answer: Tensor, grasp: Tensor) -> dict[str, Tensor]:
        """Returns the errors of scaled grasps: every part's mean over each set, [B]."""

        def error(one: Tensor, other: Tensor) -> Tensor:
            return F.mse_loss(one, other, reduction="none").flatten(1).mean(1)

        keypoints = [
            self.module.hand.keypoints_of(self.module.metric(each)) * KEYPOINT_SCALE
            for each in (answer, grasp)
        ]
        parts = {
            name: weight * error(answer[..., numbers], grasp[..., numbers])
            for name, (numbers, weight) in PARTS.items()
        }
        return {**parts, "keypoints": error(*keypoints)}

    def chance(self, batch: Batch) -> torch.Generator:
        """Returns the generator for the noise of ``inputs``; other held-out scenes have
        other noise.
        """
        return torch.Generator().manual_seed(
            int(batch["draw"][0]) if "draw" in batch else 0
        )

    def example_request(self) -> Mapping[str, Any]:
        """Returns points on the faces of a cube, and one grasp to make."""
        half = 0.03
        axis = torch.arange(-1, 2) * half
        grid = torch.cartesian_prod(axis, axis, axis)
        on_surface = grid[grid.abs().amax(1) == half]
        cloud = [[round(value, 3) for value in point] for point in on_surface.tolist()]
        return {"cloud": cloud, "grasps": 1, "edge": 2 * half}

    def refused(self, request: GraspRequest) -> str | None:
        """A cloud has at least as many points as there are neighbourhoods, and as each of these
        has.
        """
        least = max(self.config.centres, self.config.neighbours)
        points = len(request.cloud)
        return (
            f"cloud: {points} points, and this model needs at least {least}"
            if points < least
            else None
        )

    def answered(
        self, requests: Sequence[GraspRequest], outputs: Tensor
    ) -> Sequence[GraspResponse]:
        """Returns the grasps; with measures and the hand's boxes, if requested."""
        return responses(requests, outputs, self.module.hand)


def weighed(parts: Mapping[str, Tensor], weight: Tensor | None = None) -> Loss:
    """Returns the sum of the parts, [B] each, optionally with a weight for every row, [B]."""
    rows = len(next(iter(parts.values())))
    also = {name: Mean(part.detach().sum(), rows) for name, part in parts.items()}
    every = torch.stack(list(parts.values()))
    return Loss((every if weight is None else weight * every).sum(), rows, also)


class GraspDiffusion(GraspLearner):
    """Predicts clean grasps from noisy ones, and samples by repeated predictions."""

    module: DiffusionNetwork
    config: GraspDiffusionConfig

    def __init__(
        self,
        config: GraspDiffusionConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> None:
        super().__init__(config, shapes, context)
        self.sampler = config.sampler
        self.sampling_steps = config.sampling_steps
        self.eta = config.eta
        self.guidance = config.guidance
        kept = kept_signal(config.schedule, config.steps)
        signal, sigma = (
            straight(config.steps)
            if config.process == "flow"
            else (kept.sqrt(), (1 - kept).sqrt())
        )
        full = config.min_snr
        weight = (
            torch.ones_like(kept)
            if full is None
            else (signal / sigma).square().clamp(max=full) / full
        )
        tables = (kept, signal, sigma, weight)
        self.kept, self.signal, self.sigma, self.weight = (
            each.float().to(self.device) for each in tables
        )

    def build(
        self,
        config: GraspDiffusionConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """The network for scaled grasps."""
        return DiffusionNetwork(config, context.tables)

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Returns noise levels [B], whose second half mirrors the first; noise of the shape of the
        grasps; and rows without a cloud.
        """
        rows = len(batch["grasp"])
        device = generator.device
        first = torch.randint(
            self.config.steps, ((rows + 1) // 2,), generator=generator, device=device
        )
        return {
            "level": torch.cat([first, self.config.steps - 1 - first])[:rows],
            "noise": torch.randn(
                batch["grasp"].shape, generator=generator, device=device
            ),
            "blind": torch.rand(rows, generator=generator, device=device)
            < self.config.unconditional,
        }

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the squared errors of the predicted clean grasps, the mean over each set."""
        grasp = self.straightened(batch)
        level = noise["level"]
        noisy = (
            self.signal[level, None, None] * grasp
            + self.sigma[level, None, None] * noise["noise"]
        )
        tokens = torch.where(
            noise["blind"][:, None, None],
            self.module.no_cloud,
            self.slots.encode(batch["cloud"], batch.get("number")),
        )
        answer = self.clean(noisy, tokens, level)
        return weighed(self.slots.restoration(answer, grasp), self.weight[level])

    def inputs(self, batch: Batch) -> Any:
        """Clouds, and the noise from which as many grasps are made as a sample has, by the number
        of the row.
        """
        rows, grasps = batch["grasp"].shape[:2]
        # All samplers start with the same noise, because a stage may select another one.
        steps = 1 if self.config.process == "flow" else self.config.steps
        generator = self.chance(batch)
        noise = torch.stack(
            [
                torch.randn(steps, grasps, NUMBERS, generator=generator)
                for _ in range(rows)
            ]
        )
        return {"cloud": batch["cloud"], "noise": noise.to(self.device)}

    def refused(self, request: GraspRequest) -> str | None:
        """No more steps than levels of noise."""
        asked = cast("DiffusionRequest", request).steps or 1
        levels = self.config.steps
        return (
            f"steps: {asked}, but this model has {levels} levels of noise"
            if asked > levels
            else super().refused(request)
        )

    def requested(self, requests: Sequence[DiffusionRequest]) -> Any:
        """Returns clouds and noise; and the steps if they are requested."""
        steps = requests[0].steps
        grasps = requests[0].grasps
        fresh = self.eta > 0 or (self.sampler == "ddpm" and steps is None)
        levels = self.config.steps if fresh else 1
        noise = drawn(requests, levels, grasps, NUMBERS)
        inputs = {
            "cloud": clouds(requests, self.device),
            "noise": noise.to(self.device),
        }
        return inputs if steps is None else {**inputs, "steps": steps}

    @torch.no_grad()
    def predict(self, inputs: Any) -> Tensor:
        """Grasps in metres and radians, with proper rotations, [B, G, 25], from clouds and noise
        [B, steps, G, 25].

        ``steps`` in the inputs overrides the number of DDIM steps of the settings.
        """
        cloud = inputs["cloud"]
        noise = inputs["noise"].transpose(0, 1)
        with self.evaluating():
            tokens = self.slots.condition(cloud)

            def denoise(x: Tensor, level: int) -> Tensor:
                return self.denoised(
                    x, tokens(), torch.full((len(x),), level, device=x.device)
                )

            if self.sampler == "ddpm" and "steps" not in inputs:
                scaled = ddpm(denoise, noise, self.kept)
            else:
                steps = inputs.get("steps", self.sampling_steps)
                scaled = ddim(denoise, noise, self.signal, self.sigma, steps, self.eta)
            return self.placed(scaled, cloud)

    def condition(self, cloud: Tensor) -> Callable[[], Tensor]:
        """Returns the function that provides the tokens of clouds at every level of a sampling."""
        return lambda: self.slots.encode(cloud)

    def denoised(self, x: Tensor, tokens: Tensor, level: Tensor) -> Tensor:
        """Returns the predicted clean grasps, with guidance (Ho and Salimans, arXiv 2207.12598)."""
        if not self.guidance:
            return self.clean(x, tokens, level)
        seen, blind = self.slots.both(
            x, tokens, self.module.no_cloud.expand_as(tokens), level
        )
        pushed: Tensor = seen + self.guidance * (seen - blind)
        return pushed

    def both(
        self, x: Tensor, tokens: Tensor, blank: Tensor, level: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The answers with a cloud and without."""
        return self.clean(x, tokens, level), self.clean(x, blank, level)

    def clean(self, noisy: Tensor, tokens: Tensor, level: Tensor) -> Tensor:
        """Returns the predicted clean grasps for noisy grasps [B, G, 25] at levels [B]."""
        answer: Tensor = self.slots.forward(noisy, tokens, level / self.config.steps)
        return answer


def proper(grasp: Tensor) -> Tensor:
    """Returns the same grasps [..., 25] with rotations whose columns are orthogonal."""
    return torch.cat([grasp[..., :19], six_numbers(matrix(grasp[..., ROTATION]))], -1)
