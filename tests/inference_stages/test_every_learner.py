"""Every learner that ships can be made smaller, or says why not."""

import pytest
from learnt import inputs, learnt
from running import RECIPES, shipped

from runner.api import UsageError, tensors
from runner.plugins.inference.distil import DistilConfig
from runner.plugins.inference.merged_conv_bn import MergedConvBnConfig
from runner.plugins.inference.prune import PruneConfig
from runner.plugins.inference.quantise import QuantiseConfig

LEARNERS = {shipped(path.stem).model.kind: path.stem for path in sorted(RECIPES.glob("*.yaml"), reverse=True)}
CONFIGS = {
    "prune": PruneConfig(heads=0.5, ff=0.5),
    "distil": DistilConfig(layers=1, updates=1),
    "quantise": QuantiseConfig(backend="torchao"),
    "merged_conv_bn": MergedConvBnConfig(),
}
WORKS = {
    "prune": {"classifier", "gpt", "grasp_cvae", "grasp_diffusion", "grasp_latent"},
    "distil": {"gpt", "gps", "graph_gpt", "grasp_cvae", "grasp_diffusion", "grasp_latent", "mamba2"},
    "quantise": set(LEARNERS) - {"classifier", "conv_classifier", "masac", "radiance_gan"},
    "merged_conv_bn": set(),
}
"""Learners by stage; the others are refused."""


@pytest.mark.parametrize("learner", LEARNERS)
def test_it_works_or_says_why_not(learner):
    layers = ("model.layers=2",) if hasattr(shipped(LEARNERS[learner]).model, "layers") else ()
    works, refusals = set(), []
    for kind, config in CONFIGS.items():
        pipeline = learnt(LEARNERS[learner], *layers, updates=0)
        try:
            pipeline.attach_to_learnt({kind: config})
        except UsageError as error:
            refusals.append((str(error), (kind, *type(config).model_fields)))
            continue
        (asked,) = inputs(pipeline, pipeline.batch_size)
        assert all(tensor.isfinite().all() for tensor in tensors(pipeline.learner.predict(asked)))
        works.add(kind)
    assert [said for said, keys in refusals if not any(key in said for key in keys)] == []
    assert works == {kind for kind, learners in WORKS.items() if learner in learners}
