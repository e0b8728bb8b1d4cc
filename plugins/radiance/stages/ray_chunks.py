"""Rendering with the memory of one chunk of rays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from pydantic import Field

from runner.api import Close, Exact, MemoryChoice, Pipeline, Setting, Stage, StageConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..config import RadianceGanConfig
    from ..learner import RadianceGan
    from ..ray_batch import RayBatch


class RayChunksConfig(StageConfig):
    """Renders patches in two passes, with the activations of one chunk of rays in memory at a time.

    The first pass renders without a gradient. When the gradient of the image is known, each chunk
    is rendered again and its gradient is computed and added up. ``model.ray_chunk`` is how the
    plain update adds up gradients. With chunks of the same size the results are the same bits, with
    other chunks they are rounded otherwise.

    When it helps: large patches, many samples along rays, wide fields. Memory no longer grows with
    the number of rays.
    When it hurts: always in time, by about one forward pass of the generator. Measured with
    ``graf`` and chunks of 256 rays (one core, November 2026): 29 % of the memory of an update, and
    1.28 times its CPU time.
    """

    kind: ClassVar[str] = "ray_chunks"
    implementation = "RayChunks"
    phase: ClassVar[int] = 2
    claims: ClassVar[frozenset[str]] = frozenset({"render_rays"})

    rays: Annotated[int, Field(ge=1)] | None = None
    """Rays of all images that are in memory at a time; ``model.ray_chunk`` if unset."""

    @classmethod
    def memory_choices(cls, batch_size: int) -> Sequence[MemoryChoice]:  # noqa: ARG003 (some depend on it)
        """Chunks of the model's size."""
        return (MemoryChoice({}, 1.3, "the generator renders every ray twice"),)

    def contract(self, setting: Setting) -> Exact | Close:
        """Returns Exact if chunks are those of the model, else Close."""
        model = cast("RadianceGanConfig", setting.model)
        return Exact() if self.rays in (None, model.ray_chunk) else Close()


class RayChunks(Stage):
    """Replaces what renders rays."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the slot."""
        self.slots = pipeline.slots
        learner = cast("RadianceGan", pipeline.learner)
        self.generator = learner.generator
        # Read also where it is replaced: a setting that nothing reads is an error.
        default = learner.config.ray_chunk
        self.rays = self.config.rays or default
        pipeline.slots.replace("render_rays", self.render_rays)

    def render_rays(self, ray_batch: RayBatch) -> Tensor:
        """Returns the colours [B, R, 3] of rays, from 0 to 1."""
        import torch

        from ..replay import render_and_replay

        chunks = ray_batch.chunks(self.rays)
        parameters = self.generator.parameters()
        if not torch.is_grad_enabled() or not parameters:
            colours = [self.slots.render_chunk(*chunk) for chunk in chunks]
            return torch.cat(colours, 1)
        return render_and_replay(self.slots.render_chunk, chunks, parameters)
