import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from runner.plugins.grasps.geometry import yaw
from runner.plugins.grasps.shapes import FOLDS, HALF_SIDE, KINDS, folds, on_surface, signed_distance

LENGTHS = st.floats(0.03, 0.1)
SEEDS = st.integers(0, 2**16)
NUMBERS = range(len(KINDS))


def shape(kind, x=0.06, y=0.08, z=0.09):
    """A shape of a kind, whose second extent follows from the first if it is no cuboid."""
    y = (y, x, x * math.hypot(1, HALF_SIDE), x)[kind]
    return torch.tensor([[x, y, max(x, z) if kind == 3 else z, kind]]).double()


def constraints_of(row):
    """The shape as functions of a point that are not negative inside, for a solver of projections."""
    x, y, z, kind = row.tolist()
    if kind == 3:
        top = z / 2 - x / 2
        return [lambda p: x / 2 - np.linalg.norm(p - np.array([0, 0, np.clip(p[2], -top, top)]))]
    ends = [lambda p: z / 2 - p[2], lambda p: z / 2 + p[2]]
    if kind == 0:
        return [*ends, *(lambda p, i=i, s=s: (x, y)[i] / 2 - s * p[i] for i in (0, 1) for s in (-1, 1))]
    if kind == 1:
        return [*ends, lambda p: (x / 2) ** 2 - p[0] ** 2 - p[1] ** 2]
    angles = np.arange(6) * np.pi / 3
    return [*ends, *(lambda p, a=a: x / 2 - p[0] * np.cos(a) - p[1] * np.sin(a) for a in angles)]


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_distance_outside_is_that_of_the_projection(kind):
    row = shape(kind)
    points = (torch.rand(12, 3, generator=torch.Generator().manual_seed(kind)).double() - 0.5) * 0.3
    signed = signed_distance(points[None], row)[0]
    constraints = [{"type": "ineq", "fun": function} for function in constraints_of(row[0])]
    for point, distance in zip(points.numpy(), signed.tolist(), strict=True):
        is_inside = min(constraint["fun"](point) for constraint in constraints) >= 0
        assert (distance <= 0) == is_inside
        if not is_inside:
            # In units of the size, so that the solver's tolerances fit.
            start = point * 0.02 / np.linalg.norm(point)
            solved = minimize(lambda p, to=point: 1e4 * ((p - to) ** 2).sum(), start, constraints=constraints)
            assert np.linalg.norm(solved.x - point) == pytest.approx(distance, abs=2e-5)


@pytest.mark.parametrize("kind", NUMBERS)
@settings(max_examples=5, deadline=None)
@given(LENGTHS, LENGTHS, LENGTHS, SEEDS)
def test_points_are_on_the_surface_which_is_as_far_as_the_distance_says(kind, x, y, z, seed):
    row = shape(kind, x, y, z)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        surface = on_surface(row, 3000)
        points = (torch.rand(1, 20, 3).double() - 0.5) * 0.15
    assert float(signed_distance(surface, row).abs().max()) < 1e-7
    assert bool((surface.abs() <= row[:, None, :3] / 2 + 1e-7).all())
    signed = signed_distance(points, row)
    nearest = torch.cdist(points, surface).amin(2)
    # No point of the surface is nearer, and a sampled one is never far from the nearest one.
    assert bool((nearest >= signed.abs() - 1e-7).all())
    assert bool((nearest <= signed.abs() + 0.008).all())


@pytest.mark.parametrize("kind", NUMBERS)
def test_points_are_uniform_on_the_surface(kind):
    """The mean of the normals is zero (Gauss), and the mean of n.x is three volumes by the area."""
    row = shape(kind)
    x, y, z = row[0, :3].tolist()
    plan, outline = (
        (x * y, 2 * (x + y)),
        (math.pi * x * x / 4, math.pi * x),
        (3 * x * x * HALF_SIDE / 2, 6 * x * HALF_SIDE),
        (0.0, 0.0),
    )[kind]
    volume, area = plan * z, 2 * plan + outline * z
    if kind == 3:
        volume = math.pi * x * x / 4 * (z - x) + math.pi * x**3 / 6
        area = math.pi * x * z
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        points = on_surface(row, 40_000).requires_grad_()
    # Just outside, where the gradient is that of the nearest face.
    (normal,) = torch.autograd.grad(signed_distance(points * (1 + 1e-6), row).sum(), points)
    assert float(normal.mean(1).abs().max()) < 0.02
    assert float((normal * points).sum(-1).mean().detach()) == pytest.approx(3 * volume / area, rel=0.02)


@settings(max_examples=20, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=5), SEEDS)
def test_a_cube_is_a_cuboid_to_the_bit(edges, seed):
    edge = torch.tensor(edges)
    points = (torch.rand(len(edges), 4, 7, 3, generator=torch.Generator().manual_seed(seed)) - 0.5) * 0.2
    rows = torch.cat([edge[:, None].expand(-1, 3), torch.zeros(len(edges), 1)], 1)
    beyond = points.abs() - edge[:, None, None, None] / 2
    expected = beyond.clamp(min=0).norm(dim=-1) + beyond.amax(-1).clamp(max=0)
    assert torch.equal(signed_distance(points, edge), expected)
    assert torch.equal(signed_distance(points, rows), expected)


def test_shapes_of_several_kinds_are_measured_as_alone():
    rows = torch.cat([shape(kind) for kind in (1, 0, 3, 2, 0)])
    points = (torch.rand(5, 6, 3, generator=torch.Generator().manual_seed(0)).double() - 0.5) * 0.2
    alone = [signed_distance(points[i : i + 1], rows[i : i + 1]) for i in range(5)]
    assert torch.equal(signed_distance(points, rows), torch.cat(alone))


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_shape_looks_the_same_after_the_turns_of_its_symmetry_only(kind):
    row = shape(kind)
    points = (torch.rand(1, 200, 3, generator=torch.Generator().manual_seed(0)).double() - 0.5) * 0.2
    fold = float(folds(row)[0])
    assert fold == FOLDS[kind]
    step = 0.7 if math.isinf(fold) else 2 * math.pi / fold

    def turned(angle):
        return signed_distance(points @ yaw(torch.tensor(angle).double()), row)

    torch.testing.assert_close(turned(step), turned(0.0), atol=1e-7, rtol=0)
    assert math.isinf(fold) or float((turned(step / 2) - turned(0.0)).abs().max()) > 1e-3
