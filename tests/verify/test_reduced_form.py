"""Stages of a large model are compared with a smaller one."""

import pytest
from running import forked

from runner.cli.verify import _recommend_reduced
from runner.plugin.registry import Registry
from runner.plugins.sequences.config import GptConfig
from runner.proof.verdict import Outcome
from runner.recipe.loader import find, load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.console import Console
from runner.system.errors import UsageError
from runner.verify.reduced_form import BATCH_SIZE, described, reduced
from runner.verify.verification import StageVerdict, Verification, show


def forms(name, *sets):
    """Returns a recipe, its reduced form and what is smaller there."""
    registry = Registry()
    path = find(name)
    recipe = load(path, list(sets), registry)
    return recipe, *reduced(recipe, lambda smaller: load(path, [*smaller, *sets], registry))


@pytest.mark.parametrize("name", ["gpt2_small", "shakespeare_gpt", "mamba2_shakespeare"])
def test_a_reduced_form_is_smaller_and_the_rest_is_the_recipe(name):
    recipe, smaller, reduction = forms(name)
    assert reduction
    for before, after in reduction.values():
        assert after < before
    assert smaller.stages == recipe.stages
    assert smaller.length == recipe.length
    assert smaller.train.batch_size == min(recipe.train.batch_size, BATCH_SIZE)
    assert all(path in described(reduction) for path in reduction)


@pytest.mark.parametrize("heads", [1, 3, 5, 16])
def test_heads_divide_the_width(heads):
    _, smaller, _ = forms("gpt2_small", f"model.heads={heads}", f"model.width={heads * 40}")
    assert smaller.model.width % smaller.model.heads == 0


def test_settings_of_the_user_have_priority():
    recipe, smaller, reduction = forms("gpt2_small", "model.layers=7", "data.context=100")
    assert smaller.model.layers == recipe.model.layers == 7
    assert set(reduction) == {"model.heads", "model.width", "train.batch_size"}


def test_settings_of_any_type_are_described():
    reduction = {"model.hidden": ([256, 256], [16, 16]), "model.width": (2048, 64)}
    assert described(reduction) == "model.hidden [16, 16] of [256, 256], model.width 64 of 2,048"


def test_a_setting_that_does_not_exist_is_a_line_and_not_a_traceback(monkeypatch):
    monkeypatch.setattr(GptConfig, "reduced", lambda self: {"layer": 2})
    with pytest.raises(RecipeError, match="layer"):
        forms("gpt2_small")


def test_a_recipe_without_a_smaller_form_is_refused():
    with pytest.raises(UsageError, match=r"--reduced: 'classifier' with 'digits' has no smaller form"):
        forms("digits_classifier")


def test_a_verdict_names_the_sizes(isolated_workspace, capsys):
    """The report does not hide that it is another model."""
    explained = forked("verify", "gpt2_small", "data.synthetic=true", "--reduced", "--explain")
    assert explained.returncode == 0, explained.stderr
    assert "model.layers 2 of 12" in explained.stderr
    _, _, reduction = forms("gpt2_small")
    report = Verification("gpt2_small", (), {}, 1.0, reduction=reduction)
    assert report.data()["reduction"]["data.context"] == [1024, 16]
    show(report, Console(width=80))
    printed = " ".join(capsys.readouterr().out.split())
    assert "data.context 16 of 1,024, train.batch_size 32 of 512; the recipe's sizes were not tried" in printed


def test_a_trained_model_is_not_reduced(isolated_workspace):
    result = forked("verify", "grasp_serve", "--of", "latest", "--reduced")
    assert result.returncode == 2
    assert "leave out --of or --reduced" in result.stderr


@pytest.mark.parametrize(
    ("name", "verdict", "seconds", "expected"),
    [
        ("gpt2_small", "INCONCLUSIVE", 99, 1),
        ("gpt2_small", "PASS", 99, 0),
        ("gpt2_small", "INCONCLUSIVE", 5, 0),
        ("digits_classifier", "INCONCLUSIVE", 99, 0),
    ],
)
def test_the_option_is_named_where_it_helps(name, verdict, seconds, expected):
    """A large model that had too little time."""
    row = StageVerdict("amp", ("amp",), "Close", Outcome(verdict), "", {})
    report = Verification(name, (row,), {}, seconds, budget=10.0)
    lines = []
    _recommend_reduced(report, load(find(name), (), Registry()), lines.append)
    assert len(lines) == expected
    assert all("--reduced" in line for line in lines)
