"""Samples in one or two steps, by a student that was trained to be consistent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import Field, ValidationInfo, field_validator

from runner.api import (
    Pipeline,
    Setting,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
)

from ...settings import Count
from ..config import GraspDiffusionConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..diffusion import Denoise
    from ..learner import GraspDiffusion

LARGEST_GRADIENT = 1.0
"""Norm to which the student's gradients are clipped."""


class ConsistencyConfig(StageConfig):
    """Samples grasps by one or two evaluations of a student, which predicts the same clean grasps
    from all levels of noise on a trajectory of its teacher (consistency distillation, Song et al.
    2023, arXiv:2303.01469, algorithm 2).

    The student starts as a copy of the trained network, and only its transformer is trained, on the
    batches and the noise of the run's training. Its target at a level is its own average at the
    next lower level, which one step of DDIM with the teacher leads to; at the lowest level it is
    the teacher's result. The student is stored in the run's folder, by a digest of teacher and
    settings, so that it is trained once. It includes the teacher's guidance.

    When it helps: an answer that takes many evaluations of the network, and has to be fast.
    When it hurts: the first answer waits for a training, and one step makes worse grasps than many:
    for cubes 0.425 strict ones, instead of 0.581 by 100 steps and 0.262 by one step of DDIM; two
    steps of DDIM are better than a student's (experiments/grasp_parts).
    """

    kind: ClassVar[str] = "consistency"
    implementation = "Consistency"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"sample"})

    steps: Annotated[int, Field(ge=1)] = 2
    """Evaluations of the student; between two of them, fresh noise is added (algorithm 1)."""
    levels: Annotated[int, Field(ge=2)] = 20
    """Levels of noise at which the student is trained, evenly spaced; each must be one of the
    model's.
    """
    updates: Count = 1000
    """Updates of its training."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Initial learning rate; it ends at zero."""
    average: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the average of the student's weights that makes targets (mu)."""

    @field_validator("levels")
    @classmethod
    def _has_the_steps(cls, levels: int, info: ValidationInfo) -> int:
        # The levels of a sampling are then levels that the student was trained at.
        steps = info.data.get("steps", levels)
        if levels % steps:
            raise ValueError(f"should be a multiple of the {steps} steps")
        return levels

    def contract(self, setting: Setting) -> Statistical:
        """Returns ``Statistical``: the student approximates its teacher."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns None.

        Raises:
            UsageError: The model does not sample, or has fewer noise levels.
        """
        model = setting.model
        if not isinstance(model, GraspDiffusionConfig):
            raise UsageError(f"learner '{model.kind}' takes no noise out")
        if self.levels > model.steps:
            raise UsageError(
                f"levels: {self.levels}, but the model has {model.steps} levels of noise"
            )
        return None


class Consistency(Stage):
    """Trains a consistent student and samples with it."""

    def attach(self, pipeline: Pipeline) -> None:
        """Trains or loads the student, replaces the network by it, and the sampler.

        Raises:
            UsageError: The disk refuses the student.
        """
        from copy import deepcopy

        from ...inference.network import digest, replaced, settled, trained
        from ..diffusion import multistep_consistency

        config = self.config
        learner = cast("GraspDiffusion", settled(pipeline, config.kind))
        teacher = learner.module.eval()
        key = digest(
            teacher,
            config.model_dump(exclude={"steps"}),
            learner.config.model_dump(),
            learner.context.seed,
        )
        student = deepcopy(teacher)
        trained(
            pipeline,
            self,
            f"{config.kind}-{key}",
            student,
            lambda: self._train(learner, student, pipeline),
        )
        replaced(learner, student)
        # The student learned what the teacher predicts with its guidance.
        learner.guidance = 0.0
        learner.sampler = "consistency"
        # The optimizers hold the parameters of the teacher.
        learner.configure_optimizers()

        def sample(
            denoise: Denoise, noise: Tensor, steps: int | None = None
        ) -> Tensor:
            return multistep_consistency(
                denoise,
                noise,
                learner.signal,
                learner.sigma,
                steps or config.steps,
            )

        pipeline.slots.replace("sample", sample)
        plural = "" if config.steps == 1 else "s"
        pipeline.note(f"{config.steps} evaluation{plural} of a student")

    def _train(
        self, learner: GraspDiffusion, student: nn.Module, pipeline: Pipeline
    ) -> None:
        """Makes the student's predictions equal on the trajectories of the teacher.

        The learner has the teacher's network.
        """
        from copy import deepcopy
        from itertools import islice

        import torch

        config = self.config
        average = deepcopy(student).eval()
        parameters = list(cast("Any", student).transformer.parameters())
        averages = list(cast("Any", average).transformer.parameters())
        optimizer = torch.optim.AdamW(parameters, config.lr, weight_decay=0.0)
        # The student must not change the run's sequence of random numbers.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(learner.context.seed)
            batches = islice(pipeline.batches(), config.updates)
            for update, (batch, noise) in enumerate(batches):
                optimizer.param_groups[0]["lr"] = config.lr * (
                    1 - update / config.updates
                )
                optimizer.zero_grad()
                loss = self._loss(learner, student, average, batch, noise)
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                torch.nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
                optimizer.step()
                with torch.no_grad():
                    for mean, parameter in zip(
                        averages, parameters, strict=True
                    ):
                        mean.lerp_(parameter, 1 - config.average)

    def _loss(
        self,
        learner: GraspDiffusion,
        student: nn.Module,
        average: nn.Module,
        batch: Any,
        noise: Any,
    ) -> Tensor:
        """Returns the mean squared difference of the student's predictions at a level, and of its
        average's at the next lower level (equation 7, with a squared distance and equal weights).
        """
        import torch
        from torch.nn import functional as F  # noqa: N812 (its usual name)

        from ..diffusion import trailing

        levels = learner.config.steps
        # From the highest level to the lowest one.
        grid = trailing(self.config.levels, levels)
        table = torch.tensor(grid, device=learner.device)
        # The training's levels are uniform, and so are their places in the grid.
        place = noise["level"] * len(grid) // levels
        last = len(grid) - 1
        timestep = table[place]
        lower = table[(place + 1).clamp(max=last)]
        is_lowest = (place == last)[:, None, None]

        def tables(index: Tensor) -> tuple[Tensor, Tensor]:
            return (
                learner.signal[index, None, None],
                learner.sigma[index, None, None],
            )

        with torch.no_grad():
            clean = learner.clean(batch)
            signal, sigma = tables(timestep)
            noisy = signal * clean + sigma * noise["noise"]
            tokens = learner.slots.encode(batch["cloud"], batch.get("number"))
            x0 = learner.denoised(noisy, tokens, timestep)

            # One step of DDIM on the teacher's trajectory.
            predicted_noise = (noisy - signal * x0) / sigma
            lower_signal, lower_sigma = tables(lower)
            cleaner = lower_signal * x0 + lower_sigma * predicted_noise
            target = average(cleaner, tokens, lower / levels)
            # Without noise, a consistent function is the identity (equation 4).
            target = torch.where(is_lowest, x0, target)
        prediction = student(noisy, tokens, timestep / levels)
        return F.mse_loss(prediction, target)
