"""Grasps of the trained shape that is most like the one that a cloud shows, without a network."""

import math
import time
from functools import partial

import torch
from results import Result
from retrieval import Retrieval
from scipy.spatial import ConvexHull

from runner.plugin.registry import Registry
from runner.plugins.grasps.geometry import rotated, straightening, yaw
from runner.plugins.grasps.shapes import on_surface
from runner.plugins.grasps.transfer import is_strict, is_strict_by
from runner.recipe.loader import load
from runner.training.pipeline import assemble

RECIPES = "grasp_diffusion data.kind=shape_grasps"
METRICS = ("strict", "valid", "diversity_mm", "unseen_strict", "unseen_valid", "unseen_diversity_mm")
POINTS = 1024
"""Points of the cloud of a trained shape."""
BLOCK = 64
MOST_BLOCKS = 60
"""Blocks of training grasps that are tried on a hull."""
TOLERANCE = 2e-3
"""Metres by which a trained shape may be below the extents of a cloud, which end at its outermost points."""


class ShapeRetrieval(Retrieval):
    """Returns training grasps of the trained shape that is nearest to a cloud.

    Both are straightened, which leaves four orientations: the nearest one is taken. Hands are moved along z by half
    the difference of the heights, as grasps of the data are moved from cubes to shapes.
    """

    def __init__(self, source, seed, differences):
        super().__init__(source, seed)
        self.differences = differences
        self.shapes = self.edges
        torch.manual_seed(seed)
        cloud = on_surface(self.shapes, POINTS)
        self.straight = straightening(cloud)
        self.turns = yaw(torch.arange(4) * (math.pi / 2))
        self.clouds = cloud @ self.straight.transpose(1, 2)

    def predict(self, inputs):
        chosen = [self.grasps_of(cloud, inputs["grasps"]) for cloud in inputs["cloud"]]
        return self.hand.limited(torch.stack(chosen))

    def grasps_of(self, cloud, count):
        straight = straightening(cloud[None])[0]
        oriented = cloud @ (self.turns @ straight).transpose(1, 2)
        differences = torch.stack([self.differences(self.clouds, view) for view in oriented])
        turn, shape = divmod(int(differences.argmin()), len(self.shapes))
        rows = self.scenes.rows[shape]
        picked = torch.randint(len(rows), (count,), generator=self.generator)
        height = cloud[:, 2].max() - cloud[:, 2].min()
        grasp = moved(self.scenes.grasps.grasp[rows[picked]], height - self.shapes[shape, 2])
        return rotated(grasp, (self.turns[turn] @ straight).T @ self.straight[shape])


class HullSearch(ShapeRetrieval):
    """Tries training grasps in random order and returns those that are strict on the convex hull of the cloud.

    Hands are moved along z by half the difference of the heights, and turned by a random angle. Where too few grasps
    are found, they are repeated; without any, the last ones are returned.
    """

    def __init__(self, source, seed):
        # No shape is selected.
        super().__init__(source, seed, differences=None)
        grasps = self.scenes.grasps
        rows = torch.cat([torch.as_tensor(rows) for rows in self.scenes.rows])
        self.grasps = grasps.grasp[rows]
        self.heights = grasps.objects[rows, 2]

    def grasps_of(self, cloud, count):
        planes = torch.from_numpy(ConvexHull(cloud.numpy()).equations).float()
        distance_from = partial(from_hull, planes)
        height = cloud[:, 2].max() - cloud[:, 2].min()
        found = torch.empty(0, self.grasps.shape[1])
        for _ in range(MOST_BLOCKS):
            picked = torch.randint(len(self.grasps), (BLOCK,), generator=self.generator)
            angle = 2 * math.pi * torch.rand(BLOCK, generator=self.generator)
            candidates = moved(self.grasps[picked], height - self.heights[picked])
            candidates = rotated(candidates, yaw(angle))
            found = torch.cat([found, candidates[is_strict_by(self.hand, candidates, distance_from)]])
            if len(found) >= count:
                break
        if not len(found):
            found = candidates
        return found[torch.arange(count) % len(found)]


def from_hull(planes, points):
    """Returns the largest distance of points [B, ..., 3] from the planes [F, 4] of a hull: that from the hull inside of
    it, and at most that outside.
    """
    return torch.cat([(part @ planes[:, :3].T + planes[:, 3]).amax(-1) for part in points.split(256)])


def moved(grasp, difference):
    """Returns grasps moved along z for an object that is higher by a difference."""
    end = torch.where(grasp[:, 2] < 0, -1.0, 1.0)
    shift = torch.zeros_like(grasp)
    shift[:, 2] = end * difference / 2
    return grasp + shift


def by_chamfer(clouds, view):
    """Returns the Chamfer distances of clouds [N, P, 3] from a view [Q, 3], [N]."""
    distance = torch.cdist(clouds, view.expand(len(clouds), -1, -1)).square()
    return distance.amin(1).mean(1) + distance.amin(2).mean(1)


def extents_of(clouds):
    return clouds.amax(-2) - clouds.amin(-2)


def by_extents(clouds, view):
    """Returns the Euclidean distances of the extents of clouds [N, P, 3] from those of a view [Q, 3], [N]."""
    return (extents_of(clouds) - extents_of(view)).norm(dim=1)


def by_larger_extents(clouds, view):
    """Returns the same for horizontal extents; clouds that are smaller come after all others."""
    difference = (extents_of(clouds) - extents_of(view))[:, :2]
    is_smaller = (difference < -TOLERANCE).any(1)
    return difference.norm(dim=1) + is_smaller


DIFFERENCES = {
    "training grasps of the shape with the nearest cloud (Chamfer)": by_chamfer,
    "training grasps of the shape with the nearest extents": by_extents,
    "training grasps of the shape with the nearest larger horizontal extents": by_larger_extents,
}


RETRIEVALS = {
    **{name: partial(ShapeRetrieval, differences=differences) for name, differences in DIFFERENCES.items()},
    "training grasps that are strict on the convex hull of the cloud": HullSearch,
}


def strict_shares(source, shape):
    """Returns the share of the grasps of every trained shape that are strict on a shape, in the better of two
    orientations, [N].
    """
    scenes = source.train
    shares = []
    for rows in scenes.rows:
        grasp = moved(scenes.grasps.grasp[rows], shape[2] - scenes.grasps.objects[rows[0], 2])
        views = [rotated(grasp, yaw(torch.tensor(angle))) for angle in (0.0, math.pi / 2)]
        shares.append(max(float(is_strict(source.hand, view, shape).float().mean()) for view in views))
    return torch.tensor(shares)


def measure_oracle(source):
    """Yields what a choice by the metric itself would reach; a robot does not know the shape."""
    started = time.perf_counter()
    shares = {}
    for name, scenes in (("strict", source.held_out.tensors), ("unseen_strict", source.unseen)):
        shapes = torch.unique(scenes["shape"], dim=0)
        shares[name] = torch.stack([strict_shares(source, shape) for shape in shapes])
    seconds = time.perf_counter() - started
    for name, table in shares.items():
        best = float(table.amax(1).mean())
        yield Result(RECIPES, "oracle: grasps of the trained shape that suits best", name, {None: best}, seconds)
    for name, table in shares.items():
        has_any = float((table.amax(1) > 0).float().mean())
        yield Result(RECIPES, "oracle: objects with any strict training grasp", name, {None: has_any}, seconds)


def measure(seeds):
    """Returns the metrics of 640 grasps each for clouds of held-out shapes and of shapes of unseen kinds."""
    source = assemble(load("grasp_diffusion", ["device=cpu", "data.kind=shape_grasps"], Registry())).source
    for baseline, build in RETRIEVALS.items():
        by_metric = {metric: {} for metric in METRICS}
        for seed in seeds:
            started = time.perf_counter()
            metrics = source.sampled(build(source, seed), 16, None)
            seconds = time.perf_counter() - started
            for metric in METRICS:
                by_metric[metric][seed] = metrics[metric]
        for metric, values in by_metric.items():
            yield Result(RECIPES, baseline, metric, values, seconds)
    yield from measure_oracle(source)
