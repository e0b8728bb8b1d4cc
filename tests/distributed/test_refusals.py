"""Recipes that several processes cannot train like one are refused in one line."""

import pytest
from process_pairs import tiny_recipe
from running import shipped, tiny

from runner.distributed.refusals import refuse_recipe, refuse_stages
from runner.system.errors import UsageError
from runner.training.pipeline import setting_of


@pytest.mark.parametrize(
    ("recipe", "sets", "message"),
    [
        ("marl_baseline", ("data.envs=1",), "data.envs: 1 environments cannot be divided among 2 processes"),
        ("digits_classifier", ("data.sampling={kind: hybrid}",), "data: batches of 'digits' depend on the outputs"),
        ("shakespeare_gpt", ("model.dropout=0.1", "train.batch_size=2"), "train.batch_size: 2 samples, one in each"),
        ("pgt_cora", (), "model: the loss of 'pgt' couples the samples"),
        ("gcn_cora", ("model.dropout=0",), "train.batch_size: 1 samples cannot be divided"),
        ("digits_classifier", ("train.sentinel={share: 0.5}",), "train.sentinel"),
        ("digits_classifier", ("train.stop={seconds: 5}",), "train.stop.seconds"),
    ],
)
def test_a_recipe_is_refused_with_the_reason(recipe, sets, message):
    with pytest.raises(UsageError) as caught:
        refuse_recipe(tiny(recipe, *sets), 2)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_source_that_declares_no_division_is_refused(monkeypatch):
    recipe = tiny("marl_baseline")
    refuse_recipe(recipe, 2)
    monkeypatch.setattr(type(recipe.data), "division", None)
    with pytest.raises(UsageError, match=r"set UavConfig.division = 'draws', or use one process"):
        refuse_recipe(recipe, 2)


def test_a_model_that_couples_samples_is_refused(monkeypatch):
    recipe = tiny_recipe("images")
    refuse_recipe(recipe, 2)
    monkeypatch.setattr(type(recipe.model), "couples_samples", True)
    with pytest.raises(UsageError, match="couples the samples of a batch"):
        refuse_recipe(recipe, 2)


def test_stages_that_select_by_measuring_are_refused():
    import torch

    recipe = shipped("digits_classifier")
    setting = setting_of(recipe, torch.device("cpu"))
    refuse_stages(recipe.stages, setting)
    simulated = tiny("marl_phase3")
    with pytest.raises(UsageError, match=r"optimization\.compile: .*compute gradients"):
        refuse_stages({"compile": simulated.stages["compile"]}, setting_of(simulated, torch.device("cpu")))
    searching = tiny("conv_classifier", "optimization.algorithm_search=on").stages["algorithm_search"]
    with pytest.raises(UsageError, match=r"optimization\.algorithm_search: .*selects by measuring"):
        refuse_stages({"algorithm_search": searching}, setting)
    graph = tiny("digits_classifier", "optimization.cuda_graph=on").stages["cuda_graph"]
    with pytest.raises(UsageError, match=r"optimization\.cuda_graph: .*cannot wait for other processes"):
        refuse_stages({"cuda_graph": graph}, setting)
    # The batch size is selected once, before the training.
    refuse_stages(tiny("digits_classifier", "optimization.batch_autotune=on").stages, setting)
