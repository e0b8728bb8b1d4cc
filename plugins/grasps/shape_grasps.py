"""Clouds of points on cuboids, cylinders and other shapes, and grasps that are strict on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor

from runner.api import UsageError

from .cube import HELD_OUT, CubeGrasps, DividedGrasps, read
from .geometry import Hand
from .scenes import Grasps
from .shapes import KINDS, folds
from .transfer import sampled_shape, strict_grasps

if TYPE_CHECKING:
    from .config import CubeGraspsConfig, ShapeGraspsConfig

TRAINED = (0, 1)
UNSEEN = (2, 3)
"""Kinds of shapes that are trained on, and kinds that are not."""
ATTEMPTS = 100
"""Shapes in succession that may have too few grasps."""


class ShapeGrasps(CubeGrasps):
    """Scenes of shapes, held-out and unseen ones, and metrics of grasps."""

    unseen_share: ClassVar[float] = 1.0

    def division(self, config: CubeGraspsConfig) -> DividedGrasps:
        """Samples shapes, and finds the grasps of each among those of cubes.

        A tenth of the grasps of cubes is for held-out and unseen shapes, the others are for those
        of the training, so that no two parts have a shape or a grasp in common.
        """
        settings = cast("ShapeGraspsConfig", config)
        cubes = read(config)
        hand = Hand(cubes.tables)
        # The seed is fixed, so that all runs hold out the same grasps.
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(cubes.grasp), generator=generator)
        held_out_rows, trained_rows = order.tensor_split(
            [len(order) // HELD_OUT]
        )
        others = settings.held_out_shapes
        parts = (
            (TRAINED, settings.shapes, trained_rows),
            (TRAINED, others, held_out_rows),
            (UNSEEN, others, held_out_rows),
        )
        shapes = list[Tensor]()
        grasps = list[Tensor]()
        for number, (kinds, count, rows) in enumerate(parts):
            # Every part has a generator: more shapes of one leave those of the others as they are.
            seed = len(parts) * settings.shape_seed + number
            generator = torch.Generator().manual_seed(seed)
            for position in range(count):
                kind = kinds[position % len(kinds)]
                shape, found = graspable(
                    kind, settings, generator, hand, subset(cubes, rows)
                )
                shapes.append(shape)
                grasps.append(found)

        counts = [len(found) for found in grasps]
        numbers = torch.split(torch.arange(sum(counts)), counts)
        objects = torch.stack(shapes).repeat_interleave(torch.tensor(counts), 0)
        first = settings.shapes
        return DividedGrasps(
            Grasps(objects, torch.cat(grasps), cubes.tables, cubes.digest),
            list(numbers[:first]),
            list(numbers[first : first + others]),
            list(numbers[first + others :]),
        )

    def divided(
        self, rows: Sequence[Tensor], share: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Divides shapes, with all of their grasps, into those for validation and the test."""
        size = min(max(1, round(share * len(rows))), len(rows) - 1)
        return list(rows[size:]), list(rows[:size])

    def object_sizes(self, objects: Tensor) -> Tensor:
        """Returns the areas of shapes [B, 4] seen from above, without a constant factor, [B]."""
        return objects[:, 0] * objects[:, 1]

    def equivalent_turns(self, azimuth: Tensor, objects: Tensor) -> Tensor:
        """Returns for angles [B, G] in radians the nearest one by which a shape can be turned about
        z and looks the same: half turns of a cuboid, any angle for a round shape.
        """
        step = 2 * math.pi / folds(objects)[:, None]
        is_round = (step == 0).expand_as(azimuth)
        turns = torch.round(azimuth / torch.where(step == 0, 1.0, step))
        return torch.where(is_round, azimuth, turns * step)


def subset(grasps: Grasps, rows: Tensor) -> Grasps:
    """Returns some of the grasps."""
    return grasps._replace(
        objects=grasps.objects[rows], grasp=grasps.grasp[rows]
    )


def graspable(
    kind: int,
    config: ShapeGraspsConfig,
    generator: torch.Generator,
    hand: Hand,
    cubes: Grasps,
) -> tuple[Tensor, Tensor]:
    """Returns the next shape of a kind that has enough grasps, [4], and these, [G, 25].

    Raises:
        UsageError: A hundred shapes in succession have too few grasps.
    """
    smallest = config.smallest_mm / 1e3
    largest = config.largest_mm / 1e3
    for _ in range(ATTEMPTS):
        shape = sampled_shape(kind, smallest, largest, generator)
        grasps = strict_grasps(hand, cubes.grasp, cubes.objects, shape)
        if grasps is not None:
            return shape, grasps
    limits = f"{config.smallest_mm:g} to {config.largest_mm:g} mm"
    raise UsageError(
        f"data.largest_mm: none of {ATTEMPTS} shapes ({KINDS[kind]}, {limits}) has enough "
        "strict grasps: include 70 to 85 mm"
    )
