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


NESTED = """
import functools
import math
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

from runner.api import GradientLearner, GradientLearnerConfig, Loss

HISTORY = []
UNDEFINED = math.nan
CACHE = {}


class NetConfig(GradientLearnerConfig):
    '''Keeps something in many places.'''

    kind, learns_from, implementation = "nested", "toy_words", "Net"
    what: str = "number"


class Mean:
    def __init__(self):
        self.total = 0.0
        self.samples = deque()


class Optimizer(torch.optim.AdamW):
    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        self._steps = 0

    def step(self, closure=None):
        self._steps += 1
        return super().step(closure)


class Around(torch.optim.Optimizer):
    '''Steps another optimizer, as SAM does.'''

    def __init__(self, parameters, inner, shared=False):
        super().__init__(parameters, {"lr": 0.01})
        self.inner = inner(self.param_groups)
        self.param_groups = self.inner.param_groups
        if shared:
            self.state = self.inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


class Momentum(torch.optim.SGD):
    def __init__(self, groups):
        super().__init__(groups, lr=0.01, momentum=0.9)


class Sampler(nn.Module):
    @property
    def fails(self):
        raise RuntimeError("properties are code")

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.temperature, self.auxiliary, self.is_ready, self.size = 2.0, 0.0, False, 0
        self.queue, self.masks, self.slow, self.last = [], {}, None, None
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("table", None, persistent=False)

    def forward(self, words):
        h = self.embedding(words)
        if self.what == "number" and self.training:
            self.temperature *= 0.9
        if self.what == "queue" and self.training:
            self.queue.append(h.detach().mean())
            del self.queue[:-2]
        if self.what == "buffer" and self.training:
            self.mean.lerp_(h.detach().mean((0, 1)), 0.1)
        if self.what == "flag":
            self.is_ready = True
        if self.what == "slow" and self.training:
            self.slow = torch.zeros(()) if self.slow is None else self.slow
            self.slow += 1
        if self.what == "result":
            self.auxiliary, self.last = h.square().sum(), h.detach()
        if self.what == "caches":
            self.size = max(self.size, words.shape[1])
            self.table = torch.arange(8.0) if self.table is None else self.table
            self.masks[len(words)] = torch.ones(words.shape)
            CACHE[len(words)] = 1
        if self.what == "module of torch" and self.training:
            self.head.calls = getattr(self.head, "calls", 0) + 1
        return self.head(h)


class Extra(Sampler):
    def get_extra_state(self):
        return self.temperature

    def set_extra_state(self, state):
        self.temperature = state


class Net(GradientLearner):
    def build(self, config, shapes, context):
        self.means, self.watched = [Mean()], None
        sampler = Extra("number") if config.what == "extra state" else Sampler(config.what)
        if config.what == "saved":
            self.means[0].weight = sampler.head.weight
        return sampler

    def configure_optimizers(self):
        super().configure_optimizers()
        if self.config.what == "optimizer":
            self.model.optimizer = Optimizer(self.module.parameters())
        if self.config.what in ("around", "around shared"):
            shared = self.config.what == "around shared"
            self.model.optimizer = Around(self.module.parameters(), torch.optim.Adam, shared)
        if self.config.what == "around plugin":
            self.model.optimizer = Around(self.module.parameters(), Momentum)
        if self.config.what == "around two":
            inner = functools.partial(Around, inner=Momentum)
            self.model.optimizer = Around(self.module.parameters(), inner)
        if self.config.what == "second":
            self.second = [torch.optim.Adam(self.module.head.parameters(), lr=1e-3)]
        if self.config.what == "schedule":
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.model.optimizer, 100)

    def update(self, batch, noise, progress):
        output = super().update(batch, noise, progress)
        if self.config.what == "second":
            self.second[0].step()
        if self.config.what == "schedule":
            self.schedule.step()
        return output

    def loss(self, batch, noise, progress):
        words, following = batch["words"][:, :-1], batch["words"][:, 1:]
        if self.config.what == "object" and self.module.training:
            self.means[0].total += 1
        if self.config.what == "global" and self.module.training:
            HISTORY.append(1)
        loss = F.cross_entropy(self.slots.forward(words).flatten(0, 1), following.flatten(), reduction="sum")
        return Loss(loss, following.numel())
"""


def nested_names(tmp_path, caplog, what, *sets):
    """Trains a learner with values inside of its objects, and returns what the warning names."""
    plugin = tmp_path / "nested.py"
    plugin.write_text(NESTED)
    (tmp_path / "toy.yaml").write_text(RECIPE.replace("{kind: toy}", f"{{kind: nested, what: {what}}}"))
    plugins = [TOYS, plugin]
    settings = ["train.updates=6", "train.checkpoint_every=3", "train.evaluate_every=3", *sets]
    recipe = load(tmp_path / "toy.yaml", settings, Registry(plugins))
    trained(tmp_path, assemble(recipe, plugins))
    return [line.split(f": changed by the training and {MESSAGE}")[0] for line in caplog.messages if MESSAGE in line]


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("number", "Net.module.temperature"),
        ("queue", "Net.module.queue"),
        ("buffer", "Net.module.mean"),
        ("flag", "Net.module.is_ready"),
        ("slow", "Net.module.slow"),
        ("object", "Net.means[0].total"),
        ("optimizer", "Optimizer._steps"),
        ("global", "nested.HISTORY"),
        ("around", "Around.inner.state"),
        ("around plugin", "Around.inner.state"),
        ("around two", "Around.inner.inner.state"),
        ("second", "Net.second[0].state"),
    ],
)
def test_what_repeatedly_changes_inside_an_object_is_named(what, name, tmp_path, caplog):
    assert nested_names(tmp_path, caplog, what) == [name]


def test_a_schedule_of_torch_is_named(tmp_path, caplog):
    names = nested_names(tmp_path, caplog, "schedule", "train.checkpoint_every=1")
    assert "Net.schedule.last_epoch" in " ".join(names)


@pytest.mark.parametrize("what", ["result", "caches", "module of torch", "extra state", "saved", "around shared"])
def test_caches_results_and_saved_values_inside_an_object_are_not_named(what, tmp_path, caplog):
    assert nested_names(tmp_path, caplog, what) == []


SAMPLES = """
import torch
from torch.utils.data import Dataset

from runner.api import DatasetConfig, DatasetSource


class SamplesConfig(DatasetConfig):
    '''Words whose reading changes something.'''

    kind, provides, implementation = "counted_words", "toy_words", "Samples"
    what: str = "number"


class Words(Dataset):
    def __init__(self, what):
        self.what = what
        self.level, self.cache, self.file, self.levels = 0.0, {}, None, torch.zeros(40)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.what == "number":
            self.level += 0.5
        if self.what == "tensor":
            self.levels[index] += 1
        if self.what == "caches":
            self.file = self.file or 7
            self.cache[index] = torch.arange(6)
        return {"words": (torch.arange(6) + index) % 16}


class Samples(DatasetSource):
    def datasets(self, config):
        self.level, self.shown, self.best = 1.0, [], None
        return Words(config.what), Words("nothing")

    def evaluate(self, learner):
        if self.config.what == "evaluation":
            self.level *= 0.5
        if self.config.what == "saved":
            self.shown.append(1)
        return super().evaluate(learner)


class SavingConfig(SamplesConfig):
    '''The same with a state of its own.'''

    kind, implementation = "saved_words", "Saving"


class Saving(Samples):
    def state_dict(self):
        return super().state_dict() | {"shown": self.shown}

    def load_state_dict(self, state):
        self.shown = state["shown"]
        super().load_state_dict(state)
"""


def names_of_source(tmp_path, caplog, data):
    """Trains with a dataset, and returns what the warning names."""
    plugin = tmp_path / "samples.py"
    plugin.write_text(SAMPLES)
    (tmp_path / "toy.yaml").write_text(RECIPE.replace("{kind: toy_words}", data))
    plugins = [TOYS, plugin]
    settings = ["train.updates=8", "train.checkpoint_every=2", "train.evaluate_every=2"]
    trained(tmp_path, assemble(load(tmp_path / "toy.yaml", settings, Registry(plugins)), plugins))
    return [line.split(f": changed by the training and {MESSAGE}")[0] for line in caplog.messages if MESSAGE in line]


@pytest.mark.parametrize(
    ("what", "name"),
    [("number", "Samples.train.level"), ("tensor", "Samples.train.levels"), ("evaluation", "Samples.level")],
)
def test_what_repeatedly_changes_in_a_source_or_its_dataset_is_named(what, name, tmp_path, caplog):
    assert names_of_source(tmp_path, caplog, f"{{kind: counted_words, what: {what}}}") == [name]


@pytest.mark.parametrize("data", ["{kind: counted_words, what: caches}", "{kind: saved_words, what: saved}"])
def test_caches_and_saved_values_of_a_source_are_not_named(data, tmp_path, caplog):
    assert names_of_source(tmp_path, caplog, data) == []
