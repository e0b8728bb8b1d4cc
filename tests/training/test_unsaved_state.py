"""What a training changes and no checkpoint contains is reported before there is anything to lose."""

import copy
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from toy_runs import RECIPE, TOYS, toy, toy_pipeline, trained

from runner.api import RunnerError
from runner.plugin.implementation import implementation_of
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble

MESSAGE = "in no checkpoint"


def append(values):
    values.append(len(values))


def add(values):
    values += 1


def fill(values):
    values[len(values)] = 1.0


GENERATOR = torch.Generator()
CHANGES = {
    "number": (0, lambda owner: setattr(owner, "extra", owner.extra + 1)),
    "text": ("", lambda owner: setattr(owner, "extra", f"{owner.extra}a")),
    "list": ([], append),
    "deque": (deque(maxlen=4), append),
    "dictionary": ({}, fill),
    "set": (set(), lambda values: values.add(len(values))),
    "tensor": (torch.zeros(3), add),
    "complex tensor": (torch.zeros(3, dtype=torch.complex64), add),
    "tensors": ([torch.zeros(3)], lambda values: add(values[0])),
    "array": (np.zeros(3), add),
    "Python's generator": (random.Random(0), lambda generator: generator.random()),
    "NumPy's generator": (np.random.default_rng(0), lambda generator: generator.random()),
    "torch's generator": (GENERATOR, lambda generator: torch.rand(1, generator=generator)),
}


def learner_class(tmp_path):
    return implementation_of(type(toy(tmp_path, "train.updates=3").model))


def with_attribute(monkeypatch, cls, make, change, first=0, name="extra"):
    """Gives learners of a class an attribute, which updates change from the one with that number on."""
    build, update = cls.__init__, cls.update

    def changed_update(self, batch, noise, progress):
        if progress.updates >= first:
            change(self)
        return update(self, batch, noise, progress)

    def changed_init(self, *given):
        build(self, *given)
        setattr(self, name, make(self))

    monkeypatch.setattr(cls, "__init__", changed_init)
    monkeypatch.setattr(cls, "update", changed_update)


def move(owner):
    for parameter in owner.extra.parameters():
        parameter.data.mul_(0.9)


@pytest.mark.parametrize(("kind", "name"), [*((kind, "extra") for kind in CHANGES), ("list", "_extra")])
def test_an_attribute_that_changes_is_named(kind, name, tmp_path, monkeypatch, caplog):
    initial, change = CHANGES[kind]

    def changed(owner):
        change(owner if kind in ("number", "text") else vars(owner)[name])

    with_attribute(
        monkeypatch,
        learner_class(tmp_path),
        lambda _: initial if initial is GENERATOR else copy.copy(initial),
        changed,
        name=name,
    )
    trained(tmp_path, toy_pipeline(tmp_path, "train.updates=3"))
    assert f"Toy.{name}: changed by the training and {MESSAGE}" in caplog.text
    assert caplog.text.count(MESSAGE) == 1


def test_a_module_that_changes_ends_the_training_after_its_first_update(tmp_path, monkeypatch):
    cls = learner_class(tmp_path)
    with_attribute(monkeypatch, cls, lambda _: nn.Linear(2, 2), move)
    pipeline = toy_pipeline(tmp_path, "train.updates=3")
    with pytest.raises(RunnerError, match=r"Toy\.extra: .* return it from Toy\.state_dict\(\) and restore it in"):
        trained(tmp_path, pipeline)
    assert pipeline.progress.updates == 1


def test_a_module_that_changes_later_is_named_at_a_checkpoint(tmp_path, monkeypatch, caplog):
    cls = learner_class(tmp_path)
    with_attribute(monkeypatch, cls, lambda _: nn.Linear(2, 2), move, first=2)
    trained(tmp_path, toy_pipeline(tmp_path, "train.updates=6", "train.checkpoint_every=3"))
    assert f"Toy.extra: changed by the training and {MESSAGE}" in caplog.text


def test_a_module_in_the_state_is_saved(tmp_path, monkeypatch, caplog):
    cls = learner_class(tmp_path)
    with_attribute(monkeypatch, cls, lambda _: nn.Linear(2, 2), move)
    state_dict, load = cls.state_dict, cls.load_state_dict
    monkeypatch.setattr(cls, "state_dict", lambda self: {**state_dict(self), "extra": self.extra.state_dict()})

    def load_both(self, state):
        load(self, state)
        self.extra.load_state_dict(state["extra"])

    monkeypatch.setattr(cls, "load_state_dict", load_both)
    trained(tmp_path, toy_pipeline(tmp_path, "train.updates=3"))
    assert MESSAGE not in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda owner: owner.module[3],
        lambda owner: owner.module[3].weight,
        lambda _: nn.Linear(2, 2),
        lambda _: [1, 2],
        lambda owner: owner.context.generator("extra", "cpu"),
        lambda _: object(),
        lambda _: torch.eye(2).to_sparse(),
        lambda _: nn.Linear(2, 2, device="meta"),
    ],
    ids=[
        "part of the module",
        "parameter",
        "frozen module",
        "list",
        "generator of the context",
        "object",
        "sparse",
        "meta",
    ],
)
def test_what_is_saved_or_does_not_change_is_not_named(make, tmp_path, monkeypatch, caplog):
    def use(owner):
        if isinstance(owner.extra, torch.Generator):
            torch.rand(1, generator=owner.extra)

    with_attribute(monkeypatch, learner_class(tmp_path), make, use)
    trained(tmp_path, toy_pipeline(tmp_path, "train.updates=3"))
    assert MESSAGE not in caplog.text


def test_a_state_dict_declares_what_need_not_be_kept(tmp_path, monkeypatch, caplog):
    cls = learner_class(tmp_path)
    with_attribute(monkeypatch, cls, lambda _: [], lambda owner: append(owner.extra))
    state_dict = cls.state_dict
    monkeypatch.setattr(cls, "state_dict", lambda self: state_dict(self))
    trained(tmp_path, toy_pipeline(tmp_path, "train.updates=3"))
    assert MESSAGE not in caplog.text


SAMPLER = """
import torch

from runner.api import Source, SourceConfig


class SamplerConfig(SourceConfig):
    '''Random words, of which it counts those that it has drawn.'''

    kind, provides, implementation = "sampler", "toy_words", "Sampler"


class Sampler(Source):
    shapes = {"words": (6,)}

    def __init__(self, config, context):
        self.generator = context.generator("words", "cpu")
        self.drawn = 0

    def draw(self, batch_size, progress):
        self.drawn += batch_size
        return {"words": torch.randint(16, (batch_size, 6), generator=self.generator)}

    def evaluate(self, learner):
        return {"loss": 0.0}
"""


def test_a_source_that_counts_is_named(tmp_path, caplog):
    plugin = tmp_path / "sampler.py"
    plugin.write_text(SAMPLER)
    (tmp_path / "toy.yaml").write_text(RECIPE.replace("toy_words", "sampler"))
    plugins = [TOYS, plugin]
    recipe = load(tmp_path / "toy.yaml", ["train.updates=3"], Registry(plugins))
    trained(tmp_path, assemble(recipe, plugins))
    assert f"Sampler.drawn: changed by the training and {MESSAGE}" in caplog.text


def test_buffers_that_are_not_persistent_are_no_state(tmp_path, monkeypatch, caplog):
    def made(_):
        module = nn.Linear(2, 2)
        module.register_buffer("cache", torch.zeros(2), persistent=False)
        return module

    with_attribute(monkeypatch, learner_class(tmp_path), made, lambda owner: owner.extra.cache.add_(1))
    trained(tmp_path, toy_pipeline(tmp_path, "train.updates=3"))
    assert MESSAGE not in caplog.text
