"""Two processes normalise with the statistics of the entire batch, like one."""

import pytest
import torch
from normalised import ON, PLUGIN, recipe_of, trained, twice_as_much
from process_pairs import PLUGINS, difference, started_pair
from torch.nn import functional

from runner.plugins.stages.synchronized_layers import SynchronizedLayer
from runner.system.errors import RunnerError
from runner.training.pipeline import assemble

UNEQUAL = ("train.batch_size=5",)
DIVIDED = ("train.batch_size=3", "optimization.fsdp=on")


@pytest.fixture(scope="module")
def pair():
    with started_pair() as pair:
        yield pair


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "normalised_plugin.py"
    path.write_text(PLUGIN.format(arguments=""))
    return path


@pytest.mark.parametrize(
    ("sets", "arguments"),
    [
        ((), ""),
        (UNEQUAL, ""),
        (UNEQUAL, "momentum=None"),
        (UNEQUAL, "affine=False"),
        (UNEQUAL, "track_running_stats=False"),
        (DIVIDED, ""),
        (DIVIDED, "affine=False"),
    ],
    ids=str,
)
def test_two_processes_train_the_model_of_one(pair, tmp_path, sets, arguments):
    path = tmp_path / "normalised_plugin.py"
    path.write_text(PLUGIN.format(arguments=arguments))
    single = trained(None, path, sets)
    first, second = pair.call(trained, path, (*sets, ON))
    assert difference(first, second) == 0
    assert difference(single, first) < 1e-11


def test_statistics_of_a_part_of_the_batch_train_another_model(pair, plugin):
    sets = ("train.batch_size=5",)
    single = trained(None, plugin, sets)
    # Gradients are still added up.
    first, _ = pair.call(trained, plugin, (*sets, ON), twice_as_much)
    assert difference(single["state"], first["state"]) > 1e-4


def test_without_the_stage_the_model_is_refused(pair, plugin):
    with pytest.raises(RunnerError, match=r"switch optimization\.synchronized_batch_norm on"):
        pair.call(trained, plugin, ())


def test_one_process_has_the_entire_batch(plugin):
    pipeline = assemble(recipe_of(plugin, ON), [*PLUGINS, plugin])
    assert pipeline.reports["synchronized_batch_norm"].reason == "one process has the entire batch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_one_process_is_that_of_torch(dtype):
    draw = torch.Generator().manual_seed(0)
    x = (100 + torch.randn(6, 3, 5, generator=draw)).to(dtype)
    layer = torch.nn.BatchNorm1d(3)
    layer.__class__ = SynchronizedLayer
    layer.process_group = None
    layer.add_up = lambda tensor: None
    expected = functional.batch_norm(x.double(), None, None, training=True, eps=layer.eps)
    assert layer(x).dtype == dtype
    tolerance = 1e-3 if dtype == torch.float32 else 0.02
    assert torch.allclose(layer(x).double(), expected, atol=tolerance)
