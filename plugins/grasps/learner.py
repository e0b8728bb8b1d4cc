"""The learner that denoises sets of grasps, in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import (
    Batch,
    Context,
    GradientLearner,
    Loss,
    Mean,
    Progress,
    Prunable,
)

from .answers import clouds, drawn, responses
from .chamfer import chamfer
from .decoder import DitBlock
from .diffusion import Denoise, alphas_cumprod, ddim, ddpm, straight
from .encoder import grouped
from .geometry import (
    ROTATION,
    LimitedGrasps,
    matrix,
    rotated,
    rotation_6d,
    straightening,
)
from .network import NUMBERS, PARTS, DiffusionNetwork, GraspNetwork

if TYPE_CHECKING:
    from .config import GraspDiffusionConfig
    from .served import DiffusionRequest, GraspRequest, GraspResponse

KEYPOINT_SCALE = 10.0
"""Factor of metres before their errors count."""


class GraspLearner(GradientLearner):
    """Base class of learners of grasps."""

    module: GraspNetwork
    sensitive: ClassVar[tuple[str, ...]] = (
        "encoder",
        "*.enter",
        "*.leave",
        "*.time",
    )

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
        """Returns the neighbourhoods of clouds, as numbers of their points.

        ``number`` identifies a cloud that the source has stored.
        """
        return grouped(cloud, self.config.centres, self.config.neighbours)

    def encode(self, cloud: Tensor, number: Tensor | None = None) -> Tensor:
        """Returns tokens [B, M, width] of clouds [B, P, 3]; ``number`` [B] identifies clouds that
        the source has stored.
        """
        with torch.no_grad():
            groups = self.slots.group(cloud, number)
            rotation = self.straightening(cloud)[:, None]
            # The rounding of a matrix product depends on the size of the batch.
            cloud = (rotation * cloud[..., None, :]).sum(-1)
        with self.slots.precision():
            tokens: Tensor = self.module.encoder(cloud, *groups)
        return tokens.to(cloud.dtype)

    def straightening(self, cloud: Tensor) -> Tensor:
        """Returns the rotations of clouds and grasps for the network, [B, 3, 3]."""
        if self.config.straighten:
            return straightening(cloud)
        identity = torch.eye(3, dtype=cloud.dtype, device=cloud.device)
        return identity.expand(len(cloud), 3, 3)

    def straightened(self, batch: Batch) -> Tensor:
        """Returns scaled grasps [B, G, 25] as the network sees them: rotated with their clouds."""
        rotation = self.straightening(batch["cloud"])[:, None]
        grasp = self.module.metric(batch["grasp"])
        return self.module.scaled(rotated(grasp, rotation))

    def placed(self, scaled: Tensor, cloud: Tensor) -> LimitedGrasps:
        """Returns grasps in metres and radians, with proper rotations and joints within their
        limits, in the frames of the clouds before ``straightening``.
        """
        inverse = self.straightening(cloud).transpose(1, 2)[:, None]
        grasp = proper(rotated(self.module.metric(scaled), inverse))
        return self.module.hand.limited(grasp)

    def restoration(self, answer: Tensor, grasp: Tensor) -> dict[str, Tensor]:
        """Returns the errors of scaled grasps: every part's mean over each set, [B]."""

        def error(prediction: Tensor, target: Tensor) -> Tensor:
            return (
                F.mse_loss(prediction, target, reduction="none")
                .flatten(1)
                .mean(1)
            )

        keypoints = [
            KEYPOINT_SCALE
            * self.module.hand.keypoints_of(self.module.metric(scaled))
            for scaled in (answer, grasp)
        ]
        errors = {
            name: weight * error(answer[..., numbers], grasp[..., numbers])
            for name, (numbers, weight) in PARTS.items()
        }
        errors["keypoints"] = error(*keypoints)
        return {**errors, **self.chamfer_errors(answer, grasp)}

    def log_variances(self) -> dict[str, Tensor]:
        """Returns the learned logarithms of variances by part of the loss; none with fixed
        weights.
        """
        return dict(self.module.log_variances or {})

    def chamfer_errors(
        self, answer: Tensor, grasp: Tensor
    ) -> dict[str, Tensor]:
        """Returns the weighted Chamfer distance of the hands of scaled grasps [B, G, 25], the mean
        over each set, [B]; nothing if its weight is zero.
        """
        if not self.config.chamfer:
            return {}
        predicted, target = (
            KEYPOINT_SCALE
            * self.module.hand.outline_of(self.module.metric(scaled))
            for scaled in (answer, grasp)
        )
        # Every grasp of a set is compared with its own target.
        distance = chamfer(predicted.flatten(0, 1), target.flatten(0, 1))
        mean = distance.view(answer.shape[:2]).mean(1)
        return {"chamfer": self.config.chamfer * mean}

    def chance(self, batch: Batch) -> torch.Generator:
        """Returns the generator for the noise of ``inputs``; other held-out scenes have
        other noise.
        """
        seed = int(batch["draw"][0]) if "draw" in batch else 0
        return torch.Generator().manual_seed(seed)

    def example_request(self) -> Mapping[str, Any]:
        """Returns points on the faces of a cube, and one grasp to make."""
        # Few points: people read this request in the documentation of the server.
        half = 0.03
        axis = torch.arange(-1, 2) * half
        grid = torch.cartesian_prod(axis, axis, axis)
        on_surface = grid[grid.abs().amax(1) == half]
        cloud = [
            [round(value, 3) for value in point]
            for point in on_surface.tolist()
        ]
        return {"cloud": cloud, "grasps": 1, "edge": 2 * half}

    def refused(self, request: GraspRequest) -> str | None:
        """Returns the reason if a cloud has too few points for the neighbourhoods."""
        least = max(self.config.centres, self.config.neighbours)
        points = len(request.cloud)
        if points >= least:
            return None
        return f"cloud: {points} points, and this model needs at least {least}"

    def answered(
        self, requests: Sequence[GraspRequest], outputs: LimitedGrasps
    ) -> Sequence[GraspResponse]:
        """Returns the grasps; with measures and the hand's boxes, if requested."""
        return responses(requests, outputs, self.module.hand)


def weighted_loss(
    parts: Mapping[str, Tensor],
    weight: Tensor | None = None,
    *,
    log_variances: Mapping[str, Tensor] | None = None,
    with_samples: bool = False,
) -> Loss:
    """Returns the sum of the parts of a loss, and the means of each.

    Args:
        parts: Errors of every row by name, [B] each.
        weight: Weights of the rows, [B].
        log_variances: Learned scalars s by name of a part: such a part counts as exp(-s) error + s,
            which is twice the negative log-likelihood of Kendall et al. 2018 (arXiv:1705.07115,
            equation 5) with s = log variance, and for s = 0 the error itself. They are logged as
            ``log_variance_<name>``, and the errors without them.
        with_samples: Whether the loss of every row is returned, too.
    """
    rows = len(next(iter(parts.values())))
    means = {
        name: Mean(error.detach().sum(), rows) for name, error in parts.items()
    }
    terms = dict(parts)
    for name, log_variance in (log_variances or {}).items():
        terms[name] = (-log_variance).exp() * parts[name] + log_variance
        # A sum over rows, like the loss: parts of a batch add up to the batch.
        total = rows * log_variance.detach()
        means[f"log_variance_{name}"] = Mean(total, rows)
    stacked = torch.stack(list(terms.values()))
    if weight is not None:
        stacked = weight * stacked
    samples = stacked.detach().sum(0) if with_samples else None
    return Loss(stacked.sum(), rows, means, samples)


class GraspDiffusion(GraspLearner):
    """Predicts clean grasps from noisy ones, and samples by repeated predictions."""

    module: DiffusionNetwork
    config: GraspDiffusionConfig

    @property
    def numbers(self) -> int:
        """Returns the size of the vectors to which noise is added."""
        return NUMBERS

    def __init__(
        self,
        config: GraspDiffusionConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> None:
        super().__init__(config, shapes, context)
        self.sampler: str = config.sampler
        self.sampling_steps = config.sampling_steps
        self.eta = config.eta
        self.guidance = config.guidance
        cumprod = alphas_cumprod(config.schedule, config.steps)
        if config.process == "flow":
            signal, sigma = straight(config.steps)
        else:
            signal = cumprod.sqrt()
            sigma = (1 - cumprod).sqrt()
        # Min-SNR weights (Hang et al., arXiv 2303.09556) limit the easy timesteps' share.
        weight = torch.ones_like(cumprod)
        if config.min_snr is not None:
            snr = (signal / sigma).square()
            weight = snr.clamp(max=config.min_snr) / config.min_snr

        # The tables are computed in float64, and rounded once.
        tables = (cumprod, signal, sigma, weight)
        self.alphas_cumprod, self.signal, self.sigma, self.weight = (
            table.float().to(self.device) for table in tables
        )

    def build(
        self,
        config: GraspDiffusionConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """Returns the network for scaled grasps."""
        return DiffusionNetwork(config, context.tables)

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Returns noise levels [B], whose second half mirrors the first; noise [B, G, numbers];
        and rows without a cloud.
        """
        rows, grasps = batch["grasp"].shape[:2]
        device = generator.device
        steps = self.config.steps
        # Pairs of a high and a low noise level reduce the variance of the gradient.
        first = torch.randint(
            steps, ((rows + 1) // 2,), generator=generator, device=device
        )
        noise = torch.randn(
            rows, grasps, self.numbers, generator=generator, device=device
        )
        uniform = torch.rand(rows, generator=generator, device=device)
        return {
            "level": torch.cat([first, steps - 1 - first])[:rows],
            "noise": noise,
            "blind": uniform < self.config.unconditional,
        }

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the squared errors of the predicted clean grasps, the mean over each set."""
        grasp = self.clean(batch)
        x0 = self.recovered(grasp, batch, noise)
        errors = self.slots.restoration(x0, grasp)
        return weighted_loss(
            errors,
            self.weight[noise["level"]],
            log_variances=self.log_variances(),
            with_samples=self.context.sample_losses,
        )

    def clean(self, batch: Batch) -> Tensor:
        """Returns the vectors of a batch to which noise is added, [B, G, numbers]: its scaled
        grasps.
        """
        return self.straightened(batch)

    def recovered(self, clean: Tensor, batch: Batch, noise: Batch) -> Tensor:
        """Returns the prediction of clean vectors [B, G, numbers] after noise was added to them."""
        timestep = noise["level"]
        signal = self.signal[timestep, None, None]
        sigma = self.sigma[timestep, None, None]
        noisy = signal * clean + sigma * noise["noise"]
        # Some rows are trained without a cloud: guidance needs the unconditional prediction.
        is_unconditional = noise["blind"][:, None, None]
        encoded = self.slots.encode(batch["cloud"], batch.get("number"))
        tokens = torch.where(is_unconditional, self.module.no_cloud, encoded)
        return self.predict_x0(noisy, tokens, timestep)

    def decoded(self, x0: Tensor) -> Tensor:
        """Returns the scaled grasps [B, G, 25] of sampled vectors [B, G, numbers]."""
        return x0

    def inputs(self, batch: Batch) -> Any:
        """Returns clouds, and noise for as many grasps as a sample has.

        The noise of a row depends on its number.
        """
        rows, grasps = batch["grasp"].shape[:2]
        # All samplers start with the same noise, because a stage may select another one.
        steps = 1 if self.config.process == "flow" else self.config.steps
        generator = self.chance(batch)
        noise = torch.stack(
            [
                torch.randn(steps, grasps, self.numbers, generator=generator)
                for _ in range(rows)
            ]
        )
        return {"cloud": batch["cloud"], "noise": noise.to(self.device)}

    def refused(self, request: GraspRequest) -> str | None:
        """Returns the reason if more steps are requested than there are noise levels."""
        steps = cast("DiffusionRequest", request).steps or 1
        levels = self.config.steps
        if steps <= levels:
            return super().refused(request)
        return f"steps: {steps}, but this model has {levels} levels of noise"

    def requested(self, requests: Sequence[DiffusionRequest]) -> Any:
        """Returns clouds and noise; and the steps if they are requested."""
        steps = requests[0].steps
        grasps = requests[0].grasps
        # Only these samplers add noise after the start.
        adds_noise = self.sampler == "consistency" or self.eta > 0
        is_ddpm = self.sampler == "ddpm" and steps is None
        levels = self.config.steps if adds_noise or is_ddpm else 1
        noise = drawn(requests, levels, grasps, self.numbers)
        inputs = {
            "cloud": clouds(requests, self.device),
            "noise": noise.to(self.device),
        }
        return inputs if steps is None else {**inputs, "steps": steps}

    @torch.no_grad()
    def predict(self, inputs: Any) -> LimitedGrasps:
        """Samples grasps in metres and radians, with proper rotations and joints within their
        limits, [B, G, 25], from clouds and noise [B, steps, G, numbers].

        ``steps`` in the inputs overrides the number of DDIM steps of the settings.
        """
        cloud = inputs["cloud"]
        noise = inputs["noise"].transpose(0, 1)
        with self.evaluating():
            tokens = self.slots.condition(cloud)

            def denoise(x: Tensor, timestep: int) -> Tensor:
                timesteps = torch.full((len(x),), timestep, device=x.device)
                return self.denoised(x, tokens(), timesteps)

            x0 = self.slots.sample(denoise, noise, inputs.get("steps"))
            return self.placed(self.decoded(x0), cloud)

    def sample(
        self, denoise: Denoise, noise: Tensor, steps: int | None = None
    ) -> Tensor:
        """Returns clean vectors [B, G, numbers] from noise [steps, B, G, numbers], by the
        configured sampler; by that many steps of DDIM if these are requested.
        """
        if self.sampler == "ddpm" and steps is None:
            return ddpm(denoise, noise, self.alphas_cumprod)
        return ddim(
            denoise,
            noise,
            self.signal,
            self.sigma,
            self.sampling_steps if steps is None else steps,
            self.eta,
        )

    def condition(self, cloud: Tensor) -> Callable[[], Tensor]:
        """Returns the function that provides the tokens of clouds at every level of a sampling."""
        return lambda: self.slots.encode(cloud)

    def denoised(self, x: Tensor, tokens: Tensor, timestep: Tensor) -> Tensor:
        """Returns predicted clean vectors, with guidance (Ho and Salimans, arXiv 2207.12598)."""
        if not self.guidance:
            return self.predict_x0(x, tokens, timestep)
        blank = self.module.no_cloud.expand_as(tokens)
        conditional, unconditional = self.slots.both(x, tokens, blank, timestep)
        difference = conditional - unconditional
        guided: Tensor = conditional + self.guidance * difference
        return guided

    def both(
        self, x: Tensor, tokens: Tensor, blank: Tensor, timestep: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the conditional and the unconditional prediction."""
        conditional = self.predict_x0(x, tokens, timestep)
        unconditional = self.predict_x0(x, blank, timestep)
        return conditional, unconditional

    def predict_x0(
        self, noisy: Tensor, tokens: Tensor, timestep: Tensor
    ) -> Tensor:
        """Returns the predicted clean vectors for noisy ones [B, G, numbers] at levels [B]."""
        answer: Tensor = self.slots.forward(
            noisy, tokens, timestep / self.config.steps
        )
        return answer


def proper(grasp: Tensor) -> Tensor:
    """Returns the same grasps [..., 25] with rotations whose columns are orthogonal."""
    rotation = rotation_6d(matrix(grasp[..., ROTATION]))
    return torch.cat([grasp[..., :19], rotation], -1)
