"""Force closure of grasps: the largest disturbance that contacts with friction resist."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.spatial import ConvexHull, QhullError
from torch import Tensor

from .geometry import Hand
from .shapes import signed_distance

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

CONTACT_MM = 5.0
"""Largest distance of a link's nearest point from the surface, outside or inside, in a contact."""
FRICTION = 0.5
"""Coefficient of friction, the ratio of the largest tangential force to the normal force."""
EDGES = 8
"""Edges of the pyramid that replaces a friction cone."""
FLAT = 1e-6
"""Singular value of wrenches from which these span a dimension; they have sizes of about one."""


def q1(
    hand: Hand,
    grasp: Tensor,
    objects: Tensor,
    friction: float = FRICTION,
    edges: int = EDGES,
) -> Tensor:
    """Returns the epsilon metric of grasps (Ferrari and Canny 1992), [B], on the CPU.

    It is the radius of the largest ball around the origin in the convex hull of the wrenches of all
    contacts, whose normal forces together are at most one (the L1 variant of section 3). A link
    whose nearest point is at most 5 mm from the surface, outside or inside, is a contact at the
    nearest point of the surface. 0 means that some disturbance moves the object.

    Args:
        hand: The hand.
        grasp: Grasps [B, 25] in the objects' frames.
        objects: Edges of cubes [B] in metres, or shapes [B, 4].
        friction: Coefficient of friction.
        edges: Edges of a linearised friction cone.
    """
    contact, normal, is_contact = contacts(hand, grasp, objects)
    # Half the diagonal of the box around the object: torques have the size of forces.
    size = objects * math.sqrt(3) / 2
    if objects.ndim > 1:
        size = objects[:, :3].norm(dim=1) / 2
    wrench = wrenches(contact, normal, size, friction, edges).cpu().double()
    rows = zip(wrench.numpy(), is_contact.cpu().numpy(), strict=True)
    radii = [largest_ball(row[mask].reshape(-1, 6)) for row, mask in rows]
    return torch.tensor(radii)


def contacts(
    hand: Hand, grasp: Tensor, objects: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns where the links touch objects around the origin.

    Args:
        hand: The hand.
        grasp: Grasps [B, 25] in the objects' frames.
        objects: Edges of cubes [B] in metres, or shapes [B, 4].

    Returns:
        For every link: the nearest point of the surface, [B, L, 3] in metres; the normal there that
        points into the object, [B, L, 3]; and whether the link is close enough, [B, L].
    """
    nearest, distance = hand.nearest_points(grasp, objects)
    is_contact = distance.abs() <= CONTACT_MM / 1e3
    if objects.ndim == 1:
        return *_on_cubes(nearest, objects), is_contact
    # The gradient of a signed distance is the normal at the nearest point of the surface.
    with torch.enable_grad():
        point = nearest.detach().requires_grad_()
        signed = signed_distance(point, objects)
        (outward,) = torch.autograd.grad(signed.sum(), point)
    surface = point.detach() - signed.detach()[..., None] * outward
    return surface, -outward, is_contact


def _on_cubes(nearest: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the points of cubes [B] that are nearest to points [B, L, 3], and inward normals; at
    an edge, that of one of its faces.
    """
    half = edge[:, None, None] / 2
    # The face is that along the axis on which the point is farthest out; moved onto it, the other
    # coordinates stay within the face.
    axis = (nearest.abs() - half).argmax(-1, keepdim=True)
    side = torch.where(nearest >= 0, 1.0, -1.0).to(nearest.dtype)
    outward = torch.zeros_like(nearest).scatter(-1, axis, side.gather(-1, axis))
    within = nearest.clamp(-half, half)
    point = torch.where(outward == 0, within, half * outward)
    return point, -outward


def wrenches(
    point: Tensor, normal: Tensor, size: Tensor, friction: float, edges: int
) -> Tensor:
    """Returns forces and torques at the edges of linearised friction cones, [B, L, edges, 6].

    An edge is ``n + friction (cos a t1 + sin a t2)`` with tangents t1 and t2 and equal steps of a;
    its torque is ``p x f / size``.

    Args:
        point: Points of contact relative to the centre of mass, [B, L, 3].
        normal: Unit normals that point into the object, [B, L, 3].
        size: Lengths by which torques are divided, [B].
        friction: Coefficient of friction.
        edges: Number of edges of a cone.
    """
    # The axis along which a normal is shortest is never parallel to it.
    shortest = normal.abs().argmin(-1, keepdim=True)
    helper = torch.zeros_like(normal).scatter(-1, shortest, 1.0)
    first = torch.linalg.cross(normal, helper)
    first = first / first.norm(dim=-1, keepdim=True)
    second = torch.linalg.cross(normal, first)

    angle = torch.arange(edges, dtype=point.dtype, device=point.device)
    angle = angle * (2 * math.pi / edges)
    tangent = (
        angle.cos()[:, None] * first[..., None, :]
        + angle.sin()[:, None] * second[..., None, :]
    )
    force = normal[..., None, :] + friction * tangent
    torque = torch.linalg.cross(point[..., None, :].expand_as(force), force)
    return torch.cat([force, torque / size[:, None, None, None]], -1)


def largest_ball(points: Array) -> float:
    """Returns the radius of the largest ball around the origin in the convex hull of points [N, D].

    0 if the origin is not inside, or the points lie in a hyperplane.
    """
    count, dimensions = points.shape
    if count <= dimensions:
        return 0.0
    spread = np.linalg.svd(points - points.mean(0), compute_uv=False)
    if spread[-1] < FLAT:
        return 0.0
    try:
        hull = ConvexHull(points)
    except QhullError:
        # Rounding of many points in one facet; perturbed by about 1e-9, they are in general
        # position (option QJ of qhull).
        hull = ConvexHull(points, qhull_options="QJ")
    # A facet has the equation normal @ x + offset = 0, with a unit normal that points outward.
    nearest = float(-hull.equations[:, -1].max())
    return max(0.0, nearest)
