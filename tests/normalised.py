"""Trainings with batch normalisation in one process and in two, for tests of ``synchronized_batch_norm``."""

import torch
from process_pairs import PLUGINS, plain, tiny_recipe
from torch import nn

from runner.plugin.registry import Registry
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble
from runner.training.step import Step

PLUGIN = """
from torch import nn
from tiny_learners import Classifier, ClassifierLearner

class K(Classifier):
    kind = "odd"
    implementation = "N"

class N(ClassifierLearner):
    def build(self, config, shapes, context):
        return nn.Sequential(nn.BatchNorm2d(2, {arguments}), super().build(config, shapes, context), nn.BatchNorm1d(2))
"""
ON = "optimization.synchronized_batch_norm=on"


def recipe_of(path, *sets):
    """Returns the recipe of an image classifier from a plugin file."""
    # Adam would divide the rounding of gradients that are zero: those of biases before a normalisation.
    return tiny_recipe(
        "images", "model.kind=odd", "optimizer={kind: sgd, lr: 0.05}", *sets, registry=Registry([*PLUGINS, path])
    )


def trained(group, path, sets, wrong=None):
    """Trains in float64; returns parameters, buffers, results, and the metrics of an evaluation."""
    recipe = recipe_of(path, *sets)
    torch.set_default_dtype(torch.float64)
    try:
        pipeline = assemble(recipe, [*PLUGINS, path], processes=group)
        if wrong is not None:
            for layer in pipeline.learner.module.modules():
                if isinstance(layer, nn.SyncBatchNorm):
                    layer.add_up = wrong
        step = Step(pipeline)
        outputs = [plain(step()) for _ in range(4)]
        metrics = evaluated(pipeline)
    finally:
        torch.set_default_dtype(torch.float32)
    return {"state": pipeline.learner.complete_state()["modules"], "outputs": outputs, "metrics": metrics}


def twice_as_much(tensor):
    """Does what a process would that has all samples itself: each counts for two."""
    tensor.mul_(2)
