"""What a model answers with some stages on is compared, timed and weighed, without any training."""

from importlib.metadata import EntryPoint, entry_points

import pytest
import torch
from running import tiny

from runner.api import Exact, Stage, StageConfig
from runner.plugin.registry import GROUP, Registry
from runner.proof import Close, clock, verify
from runner.verify.subjects import inference_subject, model_bytes, recorded_inputs


class WrongWithoutGradient(Stage):
    """Answers a little otherwise where nothing is trained."""

    def attach(self, pipeline):
        def wrapper(step):
            return lambda *given: step(*given) * (1 if torch.is_grad_enabled() else 1.001)

        pipeline.slots.wrap("actor_forward", wrapper)


class WrongWithoutGradientConfig(StageConfig):
    """Wrong in inference alone."""

    kind = "wrong_without_gradient"
    phase = 1
    wraps = frozenset({"actor_forward"})

    def contract(self, setting):
        return Exact()

    def implementation(self):
        return WrongWithoutGradient


ENTRY = EntryPoint("optimization.wrong_without_gradient", f"{__name__}:WrongWithoutGradientConfig", GROUP)
REGISTRY = Registry(installed=[*entry_points(group=GROUP), ENTRY])


@pytest.fixture(scope="module")
def recipe():
    return tiny("marl_baseline", "model.hidden=[8]", registry=REGISTRY)


@pytest.fixture(scope="module")
def inputs(recipe):
    return recorded_inputs(recipe, REGISTRY)


def test_inputs_are_recorded_in_other_sizes_than_the_trainings(inputs):
    assert [len(each) for each in inputs] == [1, 3, 200]


@pytest.mark.parametrize(
    ("stages", "contract"), [(("forward_cache",), Exact()), (("stacked_agents",), Close())], ids=["exact", "close"]
)
def test_stages_that_are_harmless_in_inference_pass(recipe, inputs, stages, contract):
    baseline, changed = (inference_subject(recipe, REGISTRY, each) for each in ((), stages))
    assert verify(baseline, changed, inputs, contract)


def test_a_stage_that_is_wrong_in_inference_alone_fails(recipe, inputs):
    baseline, changed = (inference_subject(recipe, REGISTRY, each) for each in ((), ("wrong_without_gradient",)))
    verdict = verify(baseline, changed, inputs, Exact())
    assert not verdict
    assert "answer" in verdict.summary


def test_latency_and_size_are_measured(recipe, inputs):
    baseline, changed = (inference_subject(recipe, REGISTRY, each) for each in ((), ("stacked_agents",)))
    timing = clock(baseline, changed, inputs[:1], rounds=5, seconds=0.1)
    assert timing.baseline_ms > 0
    assert model_bytes(recipe, REGISTRY, ()) == model_bytes(recipe, REGISTRY, ("stacked_agents",)) > 1000
