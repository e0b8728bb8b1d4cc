import pytest
import torch
from torch import nn

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble


def network(*sets):
    return assemble(load("mlp", ["device=cpu", *sets], Registry())).learner.module


def test_the_default_has_512_and_256_features_and_no_biases():
    module = network("data.scale=1")
    layers = [layer for layer in module if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(64, 512), (512, 256), (256, 10)]
    assert [type(layer) for layer in module[2::2]] == [nn.Tanh, nn.Tanh]
    assert all(layer.bias is None for layer in layers)


@pytest.mark.parametrize(("activation", "function"), [("tanh", torch.tanh), ("relu", torch.relu)])
@pytest.mark.parametrize("widths", [[], [5], [7, 3, 4]])
@pytest.mark.parametrize("bias", ["true", "false"])
def test_logits_are_those_of_the_formula(activation, function, widths, bias):
    module = network(f"model.widths={widths}", f"model.activation={activation}", f"model.bias={bias}")
    image = torch.rand(3, 1, 16, 16)
    features = image.flatten(1)
    layers = [layer for layer in module if isinstance(layer, nn.Linear)]
    for number, layer in enumerate(layers):
        features = function(features) if number else features
        features = features @ layer.weight.T + (0 if layer.bias is None else layer.bias)
    torch.testing.assert_close(module(image), features)
