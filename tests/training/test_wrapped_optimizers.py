"""Optimizers around others train and are resumed, whether or not they call ``Optimizer.__init__``."""

from collections import OrderedDict, defaultdict

import pytest
import torch
from toy_runs import TOYS, toy, trained

from runner.api import RunnerError
from runner.plugin.implementation import implementation_of
from runner.training.pipeline import assemble

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Lookahead(torch.optim.Optimizer):
    """Averages slow weights with those of another optimizer; it has only some of torch's attributes."""

    hooks = ()

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, defaultdict(dict)
        for name in self.hooks:
            setattr(self, name, OrderedDict())
        self.slow = [parameter.detach().clone() for parameter in self.parameters()]
        self.count = 0

    def parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for slow, parameter in zip(self.slow, self.parameters(), strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.param_groups = self.inner.param_groups
        self.slow, self.count = list(state["slow"]), state["count"]


class WithHooks(Lookahead):
    hooks = HOOKS


class AddsEntries(torch.optim.SGD):
    """Keeps more than torch does, beside torch's own entries."""

    def __init__(self, inner):
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.sums = {}

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            total = self.sums.setdefault(number, torch.zeros_like(parameter))
            total.add_(parameter)
            parameter.sub_(total, alpha=1e-3)

    def state_dict(self):
        return super().state_dict() | {"sums": self.sums, "names": ["sum"]}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        assert state["names"] == ["sum"]
        self.sums = dict(state["sums"])


def pipeline_with(folder, monkeypatch, make):
    """A pipeline whose optimizer is made by a function from the recipe's."""
    recipe = toy(folder, "train.updates=6", "model.dropout=0.0")
    cls = implementation_of(type(recipe.model))
    configure = cls.configure_optimizers

    def configure_optimizers(self):
        configure(self)
        made = make(self.model.optimizer)
        if made is None:
            del self.model.optimizer
        else:
            self.model.optimizer = made

    monkeypatch.setattr(cls, "configure_optimizers", configure_optimizers)
    return lambda: assemble(recipe, [TOYS])


def parameters_of(pipeline):
    return [parameter.detach().clone() for parameter in pipeline.learner.module.parameters()]


@pytest.mark.parametrize("cls", [Lookahead, WithHooks, AddsEntries])
def test_an_optimizer_around_another_is_trained_and_resumed(cls, tmp_path, monkeypatch, caplog):
    build = pipeline_with(tmp_path, monkeypatch, cls)
    pipeline = build()
    initial = parameters_of(pipeline)
    loop, _ = trained(tmp_path, pipeline)
    assert loop.gradients.unstepped == set()
    assert not any(torch.equal(*pair) for pair in zip(initial, parameters_of(pipeline), strict=True))
    assert "in no checkpoint" not in caplog.text

    other = build()
    other.learner.load_complete_state(pipeline.learner.complete_state())
    for learner in (pipeline.learner, other.learner):
        for number, parameter in enumerate(learner.module.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * number + 0.1)
        for _ in range(3):
            learner.model.step()
    assert all(torch.equal(*pair) for pair in zip(parameters_of(pipeline), parameters_of(other), strict=True))


def test_a_loaded_state_may_be_loaded_again(tmp_path, monkeypatch):
    build = pipeline_with(tmp_path, monkeypatch, AddsEntries)
    pipeline = build()
    trained(tmp_path, pipeline)
    state = pipeline.learner.complete_state()
    other = build()
    other.learner.load_complete_state(state)
    before = [total.clone() for total in pipeline.learner.model.optimizer.sums.values()]
    for total in other.learner.model.optimizer.sums.values():
        total.add_(1)
    assert all(map(torch.equal, before, state["optimizers"]["model"]["sums"].values()))


class Unrelated:
    """Has the methods of an optimizer, and is none."""

    def __init__(self, inner):
        self.param_groups, self.step = inner.param_groups, inner.step


class Empty(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unrelated, r"should make a torch\.optim\.Optimizer for role 'model', got Unrelated: derive Unrelated from"),
        (
            Empty,
            r"should make an optimizer with 'param_groups' for role 'model', got Empty: Empty\.__init__ should call",
        ),
        (lambda _: None, "should set the optimizer of role 'model'"),
    ],
)
def test_what_is_no_optimizer_is_refused_at_the_start(make, message, tmp_path, monkeypatch):
    build = pipeline_with(tmp_path, monkeypatch, make)
    with pytest.raises(RunnerError, match=rf"Toy\.configure_optimizers in .*:\d+ {message}"):
        build()
