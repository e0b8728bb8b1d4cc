"""Synthetic data replace published files on request only, and everything that was trained on them is marked."""

from itertools import product
from pathlib import Path

import mlflow
import pytest
import torch
from running import TINY_GPT, TRAINED, train_here

from runner.cli.closing_table import show as show_result
from runner.plugin.context import Context, Slots
from runner.plugin.implementation import implementation_of
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.console import Console
from runner.system.errors import UsageError
from runner.tracking import Workspace, comparison, comparison_view, listing, run_summary
from runner.training.model_versions import register

REGISTRY = Registry()
PUBLISHED = [
    (kind, file.name)
    for kind in REGISTRY.kinds("data")
    for file in REGISTRY.get("data", kind).files
    if "file" in REGISTRY.get("data", kind).model_fields and "boxes" not in file.name
]
ROOTS = ({}, {"root": "nowhere"}, {"root": "/nowhere/at/all"}, {"workers": 0}, {"root": "."})


@pytest.mark.parametrize(("published", "setting"), [*product(PUBLISHED, ROOTS)])
def test_a_missing_published_file_is_an_error_that_names_every_way_out(published, setting, tmp_path, monkeypatch):
    kind, name = published
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = REGISTRY.get("data", kind).model_validate({"file": name, **setting})
    assert not config.is_synthetic()
    context = Context(torch.device("cpu"), Slots(), seed=0)
    with pytest.raises(UsageError) as caught:
        implementation_of(type(config))(config, context)
    message = str(caught.value)
    for way_out in (f"runner data get {name}", "--download", "data.synthetic=true"):
        assert way_out in message
    assert message.startswith("data.file: ")
    generated = config.model_copy(update={"synthetic": True})
    assert generated.is_synthetic()
    assert generated.absent() == []


@pytest.fixture(scope="module")
def result(tmp_path_factory, migrated_database):
    """A run on synthetic data, in a workspace of its own."""
    root = tmp_path_factory.mktemp("synthetic") / ".runner"
    root.mkdir()
    (root / "mlflow.db").write_bytes(Path(migrated_database).read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNNER_WORKSPACE", str(root))
        return (
            root,
            train_here("shakespeare_gpt", *TINY_GPT, "optimization={}"),
            train_here("shakespeare_gpt", *TINY_GPT, "optimization={}", "seed=7"),
        )


@pytest.fixture
def runs(result, monkeypatch):
    monkeypatch.setenv("RUNNER_WORKSPACE", str(result[0]))
    return result[1:]


def test_a_run_on_synthetic_data_is_marked_wherever_it_is_shown(runs, capsys):
    first, second = runs
    console = Console(width=100)
    run = next(item for item in listing.listing(Workspace()) if item["name"] == first.run_name)
    compared = comparison.compare(Workspace(), [first.run_name, second.run_name])
    for name, display in {
        "closing table": lambda: show_result(first, (), console),
        "ls": lambda: listing.show([run], "", console),
        "show": lambda: run_summary.show(run, [], console),
        "compare": lambda: comparison_view.show(compared, everything=False, console=console),
    }.items():
        display()
        assert "synthetic: results cannot be compared" in capsys.readouterr().out, name
    assert run["synthetic"] is True
    assert first.data()["synthetic"] is True


def test_mlflow_has_a_tag_and_a_dataset_that_say_so_even_against_a_tag_of_the_user(runs):
    client = mlflow.MlflowClient(runs[0].tracking_uri)
    run = client.get_run(runs[0].run_id)
    assert run.data.tags["data"] == "synthetic"
    assert "synthetic" in run.data.tags["mlflow.note.content"]
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.name == "synthetic text"


def test_a_model_that_was_trained_on_synthetic_data_is_not_registered(runs):
    with pytest.raises(UsageError, match="was trained on synthetic data"):
        register(runs[0].run_name)


@pytest.mark.parametrize("name", TRAINED)
def test_recipes_that_ship_are_not_marked(name):
    assert not load(name, (), REGISTRY).data.is_synthetic()
