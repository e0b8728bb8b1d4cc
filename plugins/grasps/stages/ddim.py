"""Samples in fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from pydantic import Field

from runner.api import (
    Pipeline,
    Setting,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
)

from ..config import GraspDiffusionConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ..diffusion import Denoise
    from ..learner import GraspDiffusion


class DdimConfig(StageConfig):
    """Takes noise out in a few steps, instead of at every level (DDIM, arXiv 2010.02502).

    It starts with the noise with which the model's sampler starts, and with an ``eta`` adds the
    noise of its steps from the same sequence, so that predictions can be compared.

    When it helps: an answer takes as many evaluations of the network as there are steps.
    When it hurts: too few steps make worse grasps; what they cost depends on the model.
    """

    kind: ClassVar[str] = "ddim"
    implementation = "Ddim"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"sample"})

    steps: Annotated[int, Field(ge=1)] = 20
    """Number of noise levels at which the network is evaluated."""
    eta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How much fresh noise every step adds (equation 16): none, up to as much as DDPM."""

    def contract(self, setting: Setting) -> Statistical:
        """Returns ``Statistical``: the grasps differ."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if the model samples like that already.

        Raises:
            UsageError: The model does not sample, or has fewer noise levels.
        """
        model = setting.model
        if not isinstance(model, GraspDiffusionConfig):
            raise UsageError(f"learner '{model.kind}' takes no noise out")
        if self.steps > model.steps:
            raise UsageError(
                f"steps: {self.steps}, but the model has {model.steps} levels of noise"
            )
        if self.eta and model.process == "flow":
            raise UsageError(
                "eta: no noise is added on a straight line (model.process is flow)"
            )
        sampling = (model.sampler, model.sampling_steps, model.eta)
        if sampling != ("ddim", self.steps, self.eta):
            return None
        return f"model.sampler is ddim, with {self.steps} steps"


class Ddim(Stage):
    """Replaces the sampler of the learner."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the slot, and sets the attributes by which noise for requests is drawn."""
        from ..diffusion import ddim

        learner = cast("GraspDiffusion", pipeline.learner)
        learner.sampler = "ddim"
        learner.sampling_steps = self.config.steps
        learner.eta = self.config.eta

        def sample(
            denoise: Denoise, noise: Tensor, steps: int | None = None
        ) -> Tensor:
            return ddim(
                denoise,
                noise,
                learner.signal,
                learner.sigma,
                steps or learner.sampling_steps,
                learner.eta,
            )

        pipeline.slots.replace("sample", sample)
