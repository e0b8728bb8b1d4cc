import pytest

from runner.plugin.registry import Registry
from runner.recipe.loader import load, shipped
from runner.recipe.rendering import render
from runner.system.errors import UsageError
from runner.training.pipeline import assemble


@pytest.mark.parametrize("name", shipped())
def test_every_recipe_that_ships_is_valid_and_named_like_its_file(name):
    recipe = load(name, (), Registry())
    assert recipe.name == name
    assert recipe.path == shipped()[name]


@pytest.mark.parametrize("name", shipped())
def test_every_recipe_that_ships_is_the_same_when_it_is_printed_and_read_again(name, tmp_path):
    recipe, printed = load(name, (), Registry()), tmp_path / "printed.yaml"
    printed.write_text("\n".join(render(recipe.printable(), recipe.origins)), encoding="utf-8")
    again = load(printed, (), Registry())
    assert again.values() == recipe.values()
    assert again.digest == recipe.digest


OF_ONE_KIND = {recipe.data.model_dump_json(): name for name in shipped() for recipe in [load(name, (), Registry())]}
"""One recipe for each way in which data are set."""


SMALL = {"gpt2_small": ("model.layers=1", "model.width=16", "model.heads=1", "train.batch_size=2")}
"""Settings of recipes whose model takes seconds to build."""


@pytest.mark.parametrize("name", OF_ONE_KIND.values())
def test_a_recipe_without_its_files_trains_only_on_requested_synthetic_data(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = ("optimization.compile=off", *SMALL.get(name, ()))
    recipe = load(name, settings, Registry())
    missing = recipe.data.absent()
    if missing or recipe.data.kind == "tokens":
        command = f"runner data get {missing[0].name}, or add --download" if missing else "runner data prepare"
        with pytest.raises(UsageError, match=f"{command}.*data.synthetic=true"):
            assemble(recipe)
        recipe = load(name, (*settings, "data.synthetic=true"), Registry())
        assert recipe.data.is_synthetic()
    pipeline = assemble(recipe)
    batch, _ = next(pipeline.batches())
    assert pipeline.source.size(batch) == pipeline.batch_size
