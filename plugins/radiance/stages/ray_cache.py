"""Rays of entire images that are computed once for each camera."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from runner.api import Exact, Pipeline, Setting, Stage, StageConfig, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Key = tuple[torch.dtype, torch.device, tuple[float, ...]]

CastRays = Callable[["Tensor"], "tuple[Tensor, Tensor]"]
"""From cameras [B, 3, 4] to origins [B, 1, 3] and directions [B, H * W, 3]."""


class RayCacheConfig(StageConfig):
    """Computes the rays of an entire image once for each camera of the source.

    Rays are found again by the numbers of their camera, never by their position in a batch. Only
    whole images have rays that come again. Those of a training depend on the position and the scale
    of a patch, which are new in every update, so an update computes what it computed before.

    When it helps: evaluations that render the same poses again, by the time of a matrix product for
    each image, a small part of the network's time.
    When it hurts: it holds 12 bytes for each pixel of each pose that was rendered, 7 MB for 144
    images of 64 x 64.
    """

    kind: ClassVar[str] = "ray_cache"
    implementation = "RayCache"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"image_rays"})

    def contract(self, setting: Setting) -> Exact:
        """Returns Exact: the rays of an image do not depend on the others in its batch."""
        return Exact()


class RayCache(Stage):
    """Keeps the directions of rays by camera."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the slot that computes the rays of entire images.

        Raises:
            UsageError: The source has no cameras in memory.
        """
        cameras: list[Tensor] = []
        for name in ("train", "held_out"):
            dataset = getattr(pipeline.source, name, None)
            cameras += getattr(dataset, "tensors", {}).get("camera", ())
        if not cameras:
            source = type(pipeline.source).__name__
            raise UsageError(f"ray_cache: a {source} keeps no cameras")
        self.cameras = {tuple(camera.flatten().tolist()) for camera in cameras}
        self.directions: dict[Key, Tensor] = {}
        self.hits = 0
        pipeline.slots.wrap("image_rays", self.remembering)

    def remembering(self, cast_rays: CastRays) -> CastRays:
        """Wraps a function that computes rays with a cache of their directions."""
        import torch

        def image_rays(camera: Tensor) -> tuple[Tensor, Tensor]:
            # By value: the same tensor may be filled with another camera later.
            numbers = [tuple(row) for row in camera.flatten(1).tolist()]
            # Poses that the source does not have, as a server gets them, have no end.
            if camera.requires_grad or not self.cameras.issuperset(numbers):
                return cast_rays(camera)
            keys = [(camera.dtype, camera.device, row) for row in numbers]
            for index, key in enumerate(keys):
                if key in self.directions:
                    self.hits += 1
                else:
                    _, direction = cast_rays(camera[index : index + 1])
                    self.directions[key] = direction[0]
            origin = camera[:, None, :, 3]
            directions = [self.directions[key] for key in keys]
            return origin, torch.stack(directions)

        return image_rays

    def closing_notes(self) -> Sequence[str]:
        """Reports how many images needed no new rays."""
        return (
            f"rays of {len(self.directions)} poses kept, used again {self.hits:,} times",
        )
