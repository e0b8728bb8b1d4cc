"""Models that were hardly trained."""

from running import tiny

from runner.plugin.registry import Registry
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.training.trained_run import Trained


def classifier(folder, *sets, updates=30):
    """Of digits, after a few updates, with these stages for inference."""
    registry = Registry()
    recipe = tiny("digits_classifier", "device=cpu", "train.batch_size=32", "train.epochs=20", *sets, registry=registry)
    pipeline = assemble(recipe, registry.files)
    step = Step(pipeline)
    for _ in range(updates):
        step()
    return Trained("here", recipe, registry, pipeline.state_dict(), folder)
