"""Learners that have learnt a little, and stages for their answers."""

from dataclasses import replace

import torch
from running import tiny

from runner.system.tensor_trees import tensors
from runner.training.pipeline import assemble
from runner.training.step import Step

SMALL = {
    "grasp_diffusion": ("model.layers=2", "model.sampler=ddim", "model.sampling_steps=2"),
    "grasp_cvae": ("model.layers=2",),
    "digits_classifier": (),
    "shakespeare_gpt": ("model.layers=2",),
}


def learnt(name, *sets, updates=2):
    """A pipeline without stages, after a few updates, in evaluation mode for good, as that of a finished run."""
    pipeline = assemble(replace(tiny(name, *SMALL.get(name, ()), *sets), stages={}))
    step = Step(pipeline)
    for _ in range(updates):
        step()
    pipeline.evaluation = pipeline.learner.evaluating()
    pipeline.evaluation.__enter__()
    return pipeline


def attached(pipeline, *configs):
    """The works of stages for inference, attached in this order."""
    pipeline.attach_to_learnt({config.kind: config for config in configs})
    reasons = [pipeline.reports[config.kind].reason for config in configs]
    assert reasons == [None] * len(configs)
    return [pipeline.stages[config.kind] for config in configs]


def inputs(pipeline, *sizes):
    """What ``predict`` is asked for batches of these sizes."""
    batch = pipeline.slots.transfer(pipeline.source.draw(pipeline.batch_size, pipeline.progress))
    return [pipeline.learner.inputs(next(pipeline.source.split(batch, size))) for size in sizes]


def off(answer, expected):
    """As a share of the size of what was expected."""
    answer, expected = (torch.cat([tensor.flatten() for tensor in tensors(tree)]) for tree in (answer, expected))
    return float((answer - expected).norm() / expected.norm())
