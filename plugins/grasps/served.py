"""Requests and responses of served learners of grasps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

from pydantic import Field

from runner.api import ServedRequest, ServedResponse

Metres = Annotated[float, Field(ge=-10, le=10)]
Point = Annotated[list[Metres], Field(min_length=3, max_length=3)]
Matrix = list[list[float]]


class GraspRequest(ServedRequest):
    """An object as a cloud of points around the origin, its vertical along z."""

    cloud: Annotated[list[Point], Field(min_length=1, max_length=10_000)]
    """Points on its surface, [P, 3] in metres."""
    grasps: Annotated[int, Field(ge=1, le=256)] = 16
    """How many to make."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the grasps, which do not depend on other requests."""
    edge: Annotated[float, Field(gt=0, le=1)] | None = None
    """If it is a cube along the axes: its edge in metres, by which the grasps are measured."""
    boxes: bool = False
    """Whether to return the boxes of the hand's links, too."""

    def group(self) -> Hashable:
        """Returns the numbers of points and grasps: equal requests share a batch."""
        return len(self.cloud), self.grasps


class DiffusionRequest(GraspRequest):
    """A request to a diffusion model."""

    steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Number of noise levels at which the network is evaluated (DDIM); by default that
    of the model.
    """

    def group(self) -> Hashable:
        """Returns the group of a grasp request, and the number of steps."""
        return *super().group(), self.steps  # type: ignore[misc]  # a tuple


class PlacedGrasp(ServedResponse):
    """A grasp of the object."""

    translation: list[float]
    """Of the palm, [3] in metres."""
    rotation: Matrix
    """Of the palm, [3, 3]."""
    joints: list[float]
    """Angles in radians, in the order of the hand's tables, within their limits."""
    clamped: bool = False
    """Whether a joint was predicted more than 1 degree beyond its limit, and moved to it."""
    clamped_degrees: float = 0.0
    """Largest angle by which a joint was moved to its limit, in degrees."""
    depth_mm: float | None = None
    """How deep the hand goes into the cube."""
    links: int | None = None
    """How many links are within 5 mm of the cube."""
    verdict: str | None = None
    """``strict``, ``valid`` or ``neither``, as evaluation has it."""
    boxes: list[Matrix] | None = None
    """Transformations of the hand's boxes, [N, 4, 4]: from a box's frame to the object's."""


class GraspResponse(ServedResponse):
    """Grasps of an object."""

    grasps: list[PlacedGrasp]
    half_sizes: Matrix | None = None
    """Of the hand's boxes, [N, 3] in metres."""
