"""Predictions that the baseline refuses are left out; those that only a stage refuses are a FAIL."""

import pytest
from judging import pair_of

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.verify.checks.predictions import PredictionsCheck

PLUGIN = """
from torch import nn
from torch.nn import functional as F

from runner.api import Close, Exact, GradientLearner, GradientLearnerConfig, Loss, RunnerError, Stage, StageConfig
from runner.api import Statistical


class NormedConfig(GradientLearnerConfig):
    '''Batch normalization, which refuses a single sample in training mode.'''

    kind, implementation, learns_from = "normed", "Normed", "words_and_numbers"
    refuses: int = 0
    refusal: str = "ValueError"


class Normed(GradientLearner):
    def build(self, config, shapes, context):
        return nn.Sequential(nn.Embedding(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def loss(self, batch, noise, progress):
        logits = self.slots.forward(batch["word"])
        return Loss(F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits))

    def inputs(self, batch):
        return batch["word"]

    def predict(self, inputs):
        if len(inputs) == self.config.refuses:
            raise {"ValueError": ValueError, "RunnerError": RunnerError}[self.config.refusal]("of this size")
        return self.slots.forward(inputs).detach()


class RefusingConfig(StageConfig):
    '''Refuses batches of one size.'''

    kind, implementation, phase, wraps = "refusing", "Refusing", 1, frozenset({"forward"})
    size: int = 0
    promise: str = "Exact"

    def contract(self, setting):
        return {"Exact": Exact, "Close": Close, "Statistical": Statistical}[self.promise]()


class Refusing(Stage):
    def attach(self, pipeline):
        def refuse(step):
            def forward(words):
                if len(words) == self.config.size:
                    raise ValueError("only the stage")
                return step(words)

            return forward

        pipeline.slots.wrap("forward", refuse)
"""


def judge(tmp_path, here, *sets):
    """Returns the verdict of the check of predictions on the stage."""
    plugin = tmp_path / "refusing.py"
    plugin.write_text(PLUGIN)
    registry = Registry([here / "supervised.py", plugin])
    sets = ("device=cpu", "model.kind=normed", "optimization.refusing=on", *sets)
    recipe = load(here / "supervised.yaml", sets, registry)
    return PredictionsCheck().run(*pair_of(recipe, "refusing", registry))


@pytest.fixture
def here(request):
    return request.path.parent


@pytest.mark.parametrize("promise", ["Exact", "Close", "Statistical"])
@pytest.mark.parametrize(
    ("sets", "count"),
    [((), 1), (("model.refuses=5",), 4), (("model.refuses=5", "model.refusal=RunnerError"), 4)],
)
def test_predictions_that_the_baseline_refuses_are_named(promise, sets, count, tmp_path, here):
    verdict = judge(tmp_path, here, f"optimization.refusing.promise={promise}", *sets)
    assert verdict.outcome is Outcome.PASS, verdict
    (limit,) = verdict.evidence["not_exercised"]
    assert limit.startswith(f"{count} of ")
    assert limit.endswith(" predictions, which the baseline refuses")


@pytest.mark.parametrize("promise", ["Exact", "Close", "Statistical"])
@pytest.mark.parametrize("size", [2, 200])
def test_a_stage_that_refuses_what_the_baseline_answers_fails(promise, size, tmp_path, here):
    sets = (f"optimization.refusing.promise={promise}", f"optimization.refusing.size={size}")
    verdict = judge(tmp_path, here, *sets)
    assert verdict.outcome is Outcome.FAIL
    assert "ValueError: only the stage" in verdict.summary
