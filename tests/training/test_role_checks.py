"""A role that no checkpoint would contain is refused before the training."""

import pytest
from torch import nn
from toy_runs import TOYS, toy

from runner.api import RunnerError
from runner.plugin.implementation import implementation_of
from runner.training.pipeline import assemble


def two_roles(tmp_path, monkeypatch, modules=None, state_dict=None):
    """A pipeline of a learner with two roles, whose methods of these names are replaced."""
    recipe = toy(tmp_path, "model.kind=toy_pair", "model.every=1", "train.updates=3")
    cls = implementation_of(type(recipe.model))
    if modules is not None:
        monkeypatch.setattr(cls, "modules", modules)
    if state_dict is not None:
        monkeypatch.setattr(cls, "state_dict", state_dict)
    return assemble(recipe, [TOYS])


def only(*names):
    return lambda self: {name: self.roles[name].module for name in names}


@pytest.mark.parametrize(("name", "missing"), [("generator", "discriminator"), ("discriminator", "generator")])
def test_a_role_that_modules_leaves_out_is_refused_at_the_start(name, missing, tmp_path, monkeypatch):
    message = rf"Pair\.modules in .*:\d+ should return the module of role '{missing}', too"
    with pytest.raises(RunnerError, match=message):
        two_roles(tmp_path, monkeypatch, only(name))


@pytest.mark.parametrize(
    "modules",
    [
        only("generator", "discriminator"),
        lambda self: {"both": nn.ModuleList(role.module for role in self.roles.values())},
        lambda self: {name: nn.Sequential(role.module) for name, role in self.roles.items()},
    ],
    ids=["all", "one list", "inside of others"],
)
def test_a_role_may_be_inside_of_any_module(modules, tmp_path, monkeypatch):
    assert two_roles(tmp_path, monkeypatch, modules)


def test_a_role_whose_numbers_are_in_the_state_is_saved(tmp_path, monkeypatch):
    def state_dict(self):
        judge = {name: tensor.clone() for name, tensor in self.discriminator.module.state_dict().items()}
        return {"maker": self.generator.module.state_dict(), "judge": judge}

    assert two_roles(tmp_path, monkeypatch, only("generator"), state_dict)


def test_a_role_that_is_missing_in_another_state_is_refused(tmp_path, monkeypatch):
    def state_dict(self):
        return {"maker": self.generator.module.state_dict()}

    with pytest.raises(RunnerError, match="the module of role 'discriminator'"):
        two_roles(tmp_path, monkeypatch, only("generator"), state_dict)
