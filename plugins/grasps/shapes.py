"""Convex shapes that stand upright about the origin: signed distances and points on surfaces.

Shapes are the rows of a tensor [B, 4]: the extents along x, y and z in metres, and the number of
the kind in ``KINDS``. A tensor [B] contains the edges of cubes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

KINDS = ("cuboid", "cylinder", "hexagonal prism", "capsule")
"""A cylinder and a capsule have their axes along z. The first extent of a hexagonal prism is the
distance of two opposite faces; its second one, along y, follows from it.
"""
ROUND = math.inf
FOLDS = (2.0, ROUND, 6.0, ROUND)
"""Rotations about z that map a shape to itself, by kind: a whole turn by this number."""
HALF_SIDE = math.tan(math.pi / 6)
"""Half a side of a regular hexagon whose opposite sides are at a distance of two."""


def signed_distance(points: Tensor, objects: Tensor) -> Tensor:
    """Returns the distance of points [B, ..., 3] from objects around the origin, [B, ...] in
    metres; negative inside.

    Args:
        points: In the frames of the objects.
        objects: Edges of cubes [B], or shapes [B, 4].
    """
    if objects.ndim == 1:
        return _from_cuboid(points, objects[:, None])
    extents = objects[:, :3]
    signed = points.new_empty(points.shape[:-1])
    for kind, distance in enumerate(_DISTANCES):
        rows = _rows_of(kind, objects)
        if len(rows) == len(objects):
            return distance(points, extents)
        if len(rows):
            signed[rows] = distance(points[rows], extents[rows])
    return signed


def _rows_of(kind: int, shapes: Tensor) -> Tensor:
    """Returns the numbers of the shapes of a kind."""
    is_kind = shapes[:, 3] == kind
    return is_kind.nonzero()[:, 0]


def on_surface(objects: Tensor, points: int) -> Tensor:
    """Samples points uniformly from the surfaces of objects around the origin.

    Args:
        objects: Edges of cubes [B], or shapes [B, 4].
        points: Number of points.

    Returns:
        [B, points, 3] in metres.
    """
    if objects.ndim == 1:
        return on_cubes(objects, points)
    cloud = objects.new_empty(len(objects), points, 3)
    for kind, sample in enumerate(_SAMPLERS):
        rows = _rows_of(kind, objects)
        if len(rows):
            extents = objects[rows, :3]
            cloud[rows] = sample(extents, points)
    return cloud


def on_cubes(edge: Tensor, points: int) -> Tensor:
    """Samples points uniformly from the surfaces of cubes [B] around the origin.

    Returns:
        [B, points, 3] in metres.
    """
    interior = torch.rand(len(edge), points, 3) * 2 - 1
    # One coordinate of every point moves to one of the two faces along that axis.
    face = torch.randint(3, (len(edge), points, 1))
    side = (torch.randint(2, face.shape) * 2 - 1).to(interior.dtype)
    return interior.scatter(2, face, side) * edge[:, None, None] / 2


def heights(objects: Tensor) -> Tensor:
    """Returns the extents of objects along z, [B]: edges of cubes [B], or shapes [B, 4]."""
    return objects if objects.ndim == 1 else objects[:, 2]


def surface_areas(objects: Tensor) -> Tensor:
    """Returns the areas of the surfaces of objects, [B] in square metres.

    Args:
        objects: Edges of cubes [B], or shapes [B, 4].
    """
    if objects.ndim == 1:
        return 6 * objects**2
    x, y, z, kind = objects.unbind(1)
    areas = torch.stack(
        [
            2 * (x * y + y * z + z * x),
            # The outline touches a circle with the diameter x, so that its area is a quarter of x
            # times its length.
            math.pi * x * (z + x / 2),
            6 * HALF_SIDE * x * (z + x / 2),
            math.pi * x * z,
        ],
        1,
    )
    return areas.gather(1, kind.long()[:, None])[:, 0]


def folds(objects: Tensor) -> Tensor:
    """Returns the number of rotations about z that map each of the shapes [B, 4] to itself, [B];
    infinite for round ones.
    """
    table = objects.new_tensor(FOLDS)
    return table[objects[:, 3].long()]


def _expanded(extent: Tensor, points: Tensor) -> Tensor:
    """Returns extents [B] with the number of dimensions of coordinates [B, ...]."""
    ones = [1] * (points.ndim - 2)
    return extent.view(-1, *ones)


def _from_cuboid(points: Tensor, extents: Tensor) -> Tensor:
    """Returns signed distances from cuboids with extents [B, 3], or cubes with [B, 1]."""
    # The distance from the nearest corner, edge or face; inside, from the nearest face.
    ones = [1] * (points.ndim - 2)
    half = extents.view(len(extents), *ones, -1) / 2
    beyond_face = points.abs() - half
    outside_distance = beyond_face.clamp(min=0).norm(dim=-1)
    inside_distance = beyond_face.amax(-1).clamp(max=0)
    signed: Tensor = outside_distance + inside_distance
    return signed


def _from_prism(plan: Tensor, z: Tensor, height: Tensor) -> Tensor:
    """Returns signed distances from upright prisms.

    Args:
        plan: Signed distances from the outline that is seen from above, [B, ...].
        z: Third coordinates of the points, [B, ...].
        height: Of the prisms, [B].
    """
    half = _expanded(height / 2, z[..., None])
    above = z.abs() - half
    beyond_plan = plan.clamp(min=0)
    beyond_end = above.clamp(min=0)
    outside_distance = torch.hypot(beyond_plan, beyond_end)
    nearest_inside = torch.maximum(plan, above)
    return outside_distance + nearest_inside.clamp(max=0)


def _from_cylinder(points: Tensor, extents: Tensor) -> Tensor:
    x, y, z = points.unbind(-1)
    radius = _expanded(extents[:, 0] / 2, points)
    plan = torch.hypot(x, y) - radius
    return _from_prism(plan, z, extents[:, 2])


def _from_hexagonal_prism(points: Tensor, extents: Tensor) -> Tensor:
    x, y, z = points.unbind(-1)
    x = x.abs()
    y = y.abs()
    # A reflection at the line through the first corner moves a point next to the face across x.
    cosine = math.cos(math.pi / 6)
    from_line = y * cosine - x / 2
    beyond_corner = from_line.clamp(min=0)
    x = x + beyond_corner
    y = y - beyond_corner * (2 * cosine)

    # The nearest point is now on the side across x, or at one of its ends.
    apothem = _expanded(extents[:, 0] / 2, points)
    half_side = apothem * HALF_SIDE
    beyond_face = x - apothem
    beyond_side = y.abs() - half_side
    outside_distance = torch.hypot(
        beyond_face.clamp(min=0), beyond_side.clamp(min=0)
    )
    plan = torch.where(beyond_face > 0, outside_distance, beyond_face)
    return _from_prism(plan, z, extents[:, 2])


def _from_capsule(points: Tensor, extents: Tensor) -> Tensor:
    # The distance from the segment on the axis, less the radius.
    x, y, z = points.unbind(-1)
    radius = extents[:, 0] / 2
    half_height = extents[:, 2] / 2
    straight = _expanded(half_height - radius, points)
    beyond_segment = z.abs() - straight
    along_axis = beyond_segment.clamp(min=0)
    from_axis = torch.hypot(x, y)
    from_segment = torch.hypot(from_axis, along_axis)
    return from_segment - _expanded(radius, points)


def _on_cuboids(extents: Tensor, points: int) -> Tensor:
    interior = torch.rand(len(extents), points, 3) * 2 - 1
    # One coordinate of every point moves to one of the two faces along that axis, which have an
    # area inversely proportional to the extent along it.
    weights = 1 / extents
    axis = torch.multinomial(weights, points, replacement=True)
    face = axis[..., None]
    side = _signs(face.shape)
    on_faces = interior.scatter(2, face, side.to(interior.dtype))
    return on_faces * extents[:, None] / 2


def _on_cylinders(extents: Tensor, points: int) -> Tensor:
    scale, z = _on_side_or_ends(extents, points)
    radius = scale * extents[:, :1] / 2
    angle = torch.rand(scale.shape) * (2 * math.pi)
    x = radius * angle.cos()
    y = radius * angle.sin()
    return torch.stack([x, y, z], -1)


def _on_hexagonal_prisms(extents: Tensor, points: int) -> Tensor:
    scale, z = _on_side_or_ends(extents, points)
    # A point of the triangle between the origin and the side across x, or on that side.
    across = scale * extents[:, :1] / 2
    position = torch.rand(scale.shape) * 2 - 1
    along = across * HALF_SIDE * position
    angle = torch.randint(6, scale.shape) * (math.pi / 3)
    cosine = angle.cos()
    sine = angle.sin()
    x = across * cosine - along * sine
    y = across * sine + along * cosine
    return torch.stack([x, y, z], -1)


def _on_side_or_ends(extents: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Returns by which factor points are nearer to the axis than the side of a prism, and their
    heights, [B, points] each.

    The outline touches a circle with the diameter x: its area is a quarter of x times its length,
    so that the share of the side in the surface is z / (z + x / 2).
    """
    x, _, z = extents.unbind(1)
    share = z / (z + x / 2)
    on_side = torch.rand(len(extents), points) < share[:, None]
    # The square root makes points of a disc uniform.
    in_disc = torch.rand(on_side.shape).sqrt()
    scale = torch.where(on_side, 1.0, in_disc)
    end = _signs(on_side.shape)
    height = torch.rand(on_side.shape) * 2 - 1
    along = torch.where(on_side, height, end.to(extents.dtype))
    return scale, along * z[:, None] / 2


def _on_capsules(extents: Tensor, points: int) -> Tensor:
    radius = extents[:, :1] / 2
    straight = extents[:, 2:] / 2 - radius
    # The side has a length of 2 straight, and both half spheres together the area of 2 radius.
    share = straight / (straight + radius)
    on_side = torch.rand(len(extents), points) < share
    direction = torch.randn(len(extents), points, 3)
    length = direction.norm(dim=-1, keepdim=True)
    x, y, z = (direction / length).unbind(-1)

    from_axis = torch.where(on_side, torch.hypot(x, y), 1.0)
    in_plan = radius / from_axis
    centre = torch.where(z < 0, -straight, straight)
    on_ends = radius * z + centre
    position = torch.rand(on_side.shape) * 2 - 1
    on_straight = straight * position
    height = torch.where(on_side, on_straight, on_ends)
    return torch.stack([x * in_plan, y * in_plan, height], -1)


def _signs(shape: torch.Size) -> Tensor:
    """Returns random numbers that are -1 or 1."""
    return torch.randint(2, shape) * 2 - 1


_DISTANCES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _from_cuboid,
    _from_cylinder,
    _from_hexagonal_prism,
    _from_capsule,
)
_SAMPLERS: tuple[Callable[[Tensor, int], Tensor], ...] = (
    _on_cuboids,
    _on_cylinders,
    _on_hexagonal_prisms,
    _on_capsules,
)
