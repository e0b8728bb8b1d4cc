"""What torch refuses in a model is one paragraph that names the method to change."""

import pytest
import torch
from toy_runs import RECIPE, TOYS, trained

from runner.api import RunnerError
from runner.plugin.registry import Registry
from runner.proof.isolation import Isolation
from runner.proof.trees import to_float64
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.verify.subjects import recorded, subject

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F

from runner.api import GradientLearner, GradientLearnerConfig, Loss


class NetConfig(GradientLearnerConfig):
    '''Many modules.'''

    kind, learns_from, implementation = "models", "toy_words", "Net"
    what: str = "double"


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


class Net(GradientLearner):
    def build(self, config, shapes, context):
        if config.what == "teacher":
            self.teachers = [nn.Linear(6, 4, dtype=torch.float32)]
        make = {"double": lambda: nn.Linear(6, 4).double(), "lazy": lambda: nn.LazyLinear(4), "complex": Complex}
        return make.get(config.what, lambda: nn.Linear(6, 4))()

    def configure_optimizers(self):
        super().configure_optimizers()
        if self.config.what == "closure":
            self.model.optimizer = torch.optim.LBFGS(self.module.parameters())

    def inputs(self, batch):
        return batch["words"].to(torch.get_default_dtype())

    def loss(self, batch, noise, progress):
        x = batch["words"].to(torch.get_default_dtype())
        result = self.slots.forward(x.double() if self.config.what == "double" else x)
        if self.config.what == "teacher":
            result = result - self.teachers[0](x)
        return Loss(result.square().sum(), len(x))
"""


def recipe_of(tmp_path, what):
    plugin = tmp_path / "models.py"
    plugin.write_text(MODELS)
    (tmp_path / "toy.yaml").write_text(RECIPE.replace("{kind: toy}", f"{{kind: models, what: {what}}}"))
    registry = Registry([TOYS, plugin])
    return load(tmp_path / "toy.yaml", ["train.updates=2"], registry), registry


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("double", r"predict in .*: RuntimeError: .*; prepare its input as the loss does, in Net\.inputs\(batch\)"),
        ("lazy", "Net makes a role 'model' of a module with lazy layers"),
        ("closure", r"Net\.configure_optimizers makes a LBFGS, .* write Net\.update"),
    ],
)
def test_a_mistake_in_a_model_names_the_method(what, message, tmp_path):
    recipe, registry = recipe_of(tmp_path, what)
    with pytest.raises(RunnerError, match=message.replace("predict in .*:", "(?s).*predict in .*:")):
        trained(tmp_path, assemble(recipe, registry.files))


@pytest.mark.parametrize("what", ["complex", "teacher"])
def test_numbers_of_a_fixed_type_are_compared_in_float64(what, tmp_path):
    recipe, registry = recipe_of(tmp_path, what)
    isolation = Isolation(subject(recipe, registry, ()), 0, float64=True)
    (batch,) = recorded(recipe, registry, 1)
    isolation.step(to_float64(batch))
    (parameter, *_) = isolation.subject.parameters()
    assert parameter[1].dtype == (torch.complex128 if what == "complex" else torch.float64)
