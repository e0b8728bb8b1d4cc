"""Sorted evaluations: the same samples with less padding."""

import random

import numpy as np
import pytest
import torch
from test_every_stage_and_learner import REGISTRY
from test_every_stage_and_learner import recipe_of as tokens_recipe

from runner.api import RunnerError, nbytes
from runner.plugin.registry import Registry
from runner.plugins.stages import sorted_evaluation
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble
from runner.verify.timed_gate import quick

FAMILIES = {
    "gps_esol": (),
    "graphgpt_esol": ("data.walks=1",),
}
SMALL = ("data.split=1", "model.width=16", "model.layers=1", "model.heads=2")
ON = "optimization.sorted_evaluation=on"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of chains with 1 to 30 atoms, in no order of their sizes."""
    rows = [f"{'C' * (1 + 7 * number % 30)}{end},{number}" for number in range(80) for end in ("O", "N")]
    path = tmp_path_factory.mktemp("chains") / "chains.csv"
    path.write_text("\n".join(["smiles,target", *rows]))
    return path


def recipe_of(table, name, *sets):
    """A recipe with small batches."""
    common = ("seed=3", "device=cpu", "train.batch_size=4", f"data.file={table}", *SMALL, *FAMILIES[name])
    return load(name, [*common, *sets], Registry())


def assembled(table, name, *sets):
    return assemble(recipe_of(table, name, *sets))


def held_out_batches(pipeline, part):
    source = pipeline.source
    if part == "validation":
        return list(source.held_out_batches())
    with source.testing():
        return list(source.held_out_batches())


@pytest.mark.parametrize("part", ["validation", "test"])
@pytest.mark.parametrize("recipe", FAMILIES)
def test_the_same_samples_are_measured_with_less_padding(table, recipe, part):
    natural, ordered = assembled(table, recipe), assembled(table, recipe, ON)
    assert natural.source.has_test()
    assert evaluated(ordered, part) == pytest.approx(evaluated(natural, part), rel=1e-5)

    batches = {name: held_out_batches(p, part) for name, p in (("natural", natural), ("ordered", ordered))}
    targets = {name: torch.cat([batch["target"] for batch in parts]) for name, parts in batches.items()}
    assert torch.equal(targets["natural"].sort().values, targets["ordered"].sort().values)
    assert not torch.equal(targets["natural"], targets["ordered"])
    sizes = [nbytes(batch) // len(batch["target"]) for batch in batches["ordered"]]
    assert sizes == sorted(sizes)
    assert nbytes(batches["ordered"]) < nbytes(batches["natural"])


@pytest.mark.parametrize("recipe", FAMILIES)
def test_it_is_the_same_data(table, recipe):
    natural, ordered = assembled(table, recipe), assembled(table, recipe, ON)
    assert ordered.source.fingerprint() == natural.source.fingerprint()
    assert torch.equal(*(pipeline.source.draw(4, pipeline.progress)["target"] for pipeline in (natural, ordered)))


def test_samples_of_one_size_keep_their_order(table):
    pipeline = assembled(table, "gps_esol", ON)
    data = pipeline.source.held_out
    sizes = [nbytes(pipeline.source.collate([data[number]])) for number in range(len(data))]
    for size in set(sizes):
        numbers = [data.indices[index] for index in range(len(data)) if sizes[index] == size]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("recipe", "sets", "reason"),
    [
        ("gps_esol", ("data.synthetic=true", "data.workers=1"), "this process would have to read them first"),
        ("digits_classifier", (), "samples are of one size, as DigitsConfig.shapes_vary = False declares"),
        ("marl_phase2", (), "is not a dataset"),
    ],
)
def test_it_is_inactive_where_nothing_is_padded_or_may_be_read(recipe, sets, reason):
    pipeline = assemble(load(recipe, ["device=cpu", *sets, ON], Registry()))
    report = pipeline.reports["sorted_evaluation"]
    assert reason in report.reason


def tagger_pipeline(tmp_path, switch="on"):
    return assemble(tokens_recipe("tokens", tmp_path, f"optimization.sorted_evaluation={switch}"))


@pytest.mark.parametrize("method", ["noise", "held_out_noise"])
def test_it_is_inactive_for_a_learner_with_noise(tmp_path, monkeypatch, method):
    natural = tagger_pipeline(tmp_path, "off")
    monkeypatch.setattr(type(natural.learner), method, lambda self, batch, generator=None: {}, raising=False)
    pipeline = tagger_pipeline(tmp_path)
    assert f"TaggerLearner.{method} gives each sample random numbers" in pipeline.reports["sorted_evaluation"].reason
    assert all(map(torch.equal, pipeline.source.held_out, natural.source.held_out))


DRAWS = {
    "torch": lambda learner: torch.rand(()),
    "python": lambda learner: random.random(),
    "numpy": lambda learner: np.random.rand(),
    "attribute": lambda learner: learner.draws.random(),
    "context": lambda learner: learner.context.generator("mine").initial_seed(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_metrics_that_use_random_numbers_are_refused(tmp_path, monkeypatch, draw):
    learner = type(tagger_pipeline(tmp_path, "off").learner)
    metrics = learner.metrics

    def drawing(self, batch):
        draw(self)
        return metrics(self, batch)

    monkeypatch.setattr(learner, "draws", random.Random(0), raising=False)
    assert evaluated(tagger_pipeline(tmp_path))
    monkeypatch.setattr(learner, "metrics", drawing)
    pipeline = tagger_pipeline(tmp_path)
    with pytest.raises(RunnerError, match=r"^sorted_evaluation: TaggerLearner\.metrics uses random numbers"):
        evaluated(pipeline)


def test_it_is_inactive_if_held_out_samples_are_random(tmp_path, monkeypatch):
    source = type(tagger_pipeline(tmp_path, "off").source)
    collate = source.collate

    def masked(self, samples):
        batch = collate(self, samples)
        return {"token": batch["token"] * (torch.rand(batch["token"].shape) > 0.1)}

    monkeypatch.setattr(source, "collate", masked)
    before = torch.get_rng_state()
    pipeline = tagger_pipeline(tmp_path)
    assert "samples of 'tiny_tokens' use random numbers" in pipeline.reports["sorted_evaluation"].reason
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("traced_only")
def test_the_gate_fails_an_order_without_the_largest(tmp_path, monkeypatch):
    order_of = sorted_evaluation._order
    monkeypatch.setattr(sorted_evaluation, "_order", lambda source: order_of(source)[:-1])
    verdict = quick(tokens_recipe("tokens", tmp_path, ON), REGISTRY, ["sorted_evaluation"])
    assert verdict.outcome is Outcome.FAIL, verdict.summary
