"""Grasps of the training set for the size that a cloud shows, without a network."""

import time

import torch
from results import Result

from runner.plugin.registry import Registry
from runner.plugins.grasps.geometry import rotated, straightening
from runner.recipe.loader import load
from runner.training.pipeline import assemble

METRICS = ("strict", "valid", "diversity_mm", "unseen_strict", "swapped_valid")
TOLERANCE = 1e-4
"""Metres by which a trained size may be below the one that a cloud shows."""


class Retrieval:
    """Returns training grasps of the smallest trained cube that is not smaller than the object.

    The edge is the extent of the cloud along z, and the cloud shows how the cube is turned.
    """

    def __init__(self, source, seed):
        self.scenes = source.train
        self.hand = source.hand
        self.generator = torch.Generator().manual_seed(seed)
        grasps = self.scenes.grasps
        self.edges = torch.stack([grasps.objects[rows[0]] for rows in self.scenes.rows])

    def evaluating(self):
        return torch.no_grad()

    def inputs(self, batch):
        return {"cloud": batch["cloud"], "grasps": batch["grasp"].shape[1]}

    def predict(self, inputs):
        cloud = inputs["cloud"]
        heights = cloud[..., 2].amax(1) - cloud[..., 2].amin(1)
        chosen = [self.grasps_for(height, inputs["grasps"]) for height in heights]
        back = straightening(cloud).transpose(1, 2)[:, None]
        return self.hand.limited(rotated(torch.stack(chosen), back))

    def grasps_for(self, edge, count):
        is_large_enough = self.edges >= edge - TOLERANCE
        size = torch.where(is_large_enough, self.edges, torch.inf).argmin()
        if not is_large_enough.any():
            size = self.edges.argmax()
        rows = self.scenes.rows[int(size)]
        picked = torch.randint(len(rows), (count,), generator=self.generator)
        return self.scenes.grasps.grasp[rows[picked]]


def measure(seeds):
    """Returns the metrics of 640 grasps for held-out clouds, and of 160 for the size that is not trained on."""
    source = assemble(load("grasp_diffusion", ["device=cpu"], Registry())).source
    by_metric = {metric: {} for metric in METRICS}
    for seed in seeds:
        started = time.perf_counter()
        metrics = source.sampled(Retrieval(source, seed), 16, None)
        seconds = time.perf_counter() - started
        for metric in METRICS:
            by_metric[metric][seed] = metrics[metric]
    for metric, values in by_metric.items():
        yield Result("grasp_diffusion, grasp_cvae", "retrieval of training grasps", metric, values, seconds)
