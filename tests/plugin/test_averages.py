"""Averaged parameters: their values, whatever the parameters are, and whoever writes the update."""

import threading
from pathlib import Path

import pytest
import torch
from running import TRAINED, tiny, with_requirements
from torch import nn
from torch.nn.utils import parametrizations

from runner.api import Context, GradientLearner, GradientLearnerConfig, Loss, Progress, Slots
from runner.plugin.averages import AVERAGES, WeightAverages
from runner.plugin.optimizer import settings_of
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.checkpoint import kept
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble
from runner.training.step import Step

CPU = torch.device("cpu")
GAN = Path(__file__).parents[2] / "docs" / "example_gan.py"
PROGRESS = Progress("updates", 10)


class Rotary(nn.Module):
    """Has a table of positions that grows with the longest input so far."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=torch.float32).cos()
        return self.layer(x) + self.table[: len(x), None]


class Quantised(nn.Module):
    """Multiplies by whole numbers beside a scale that is trained."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.tensor([[1, -2, 3]], dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * self.codes * self.scale).sum(1, keepdim=True)


class Guarded(nn.Linear):
    """Holds what nothing can copy."""

    def __init__(self):
        super().__init__(3, 1)
        self.lock, self.numbers = threading.Lock(), (number for number in range(9))
        self.generator = torch.Generator()

    def forward(self, x):
        with self.lock:
            return super().forward(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x)).sum(1, keepdim=True)


MODULES = {
    "growing buffer": Rotary,
    "whole numbers": Quantised,
    "lock": Guarded,
    "tied": Tied,
    "lazy": lambda: nn.LazyLinear(1),
    "hook": lambda: nn.utils.weight_norm(nn.Linear(3, 1)),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 1)),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(3, 1)),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 1)),
    "normalized": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
    "recurrent": lambda: nn.Sequential(nn.Flatten(), nn.GRU(3, 2), TakeFirst(), nn.Linear(2, 1)),
}


class TakeFirst(nn.Module):
    def forward(self, outputs):
        return outputs[0]


class Config(GradientLearnerConfig):
    """Settings."""

    kind = "net"
    implementation = "Net"
    learns_from = "rows"
    module: str


class Net(GradientLearner):
    def build(self, config, shapes, context):
        module = MODULES[config.module]()
        module(torch.zeros(2, 3))  # after which no parameter is lazy any more
        return module

    def loss(self, batch, noise, progress):
        error = self.slots.forward(batch["x"]) - batch["y"]
        return Loss(error.square().sum(), len(error))


def learner_of(module, ema=0.75):
    context = Context(CPU, Slots(), 0, 8, {"model": settings_of("sgd")(lr=0.01)}, ema)
    made = Net(Config(module=module), {"x": (3,)}, context)
    made.configure_optimizers()
    made.start_averages()
    return made


def batch(number):
    draw = torch.Generator().manual_seed(number)
    rows = 4 + number
    return {"x": torch.randn(rows, 3, generator=draw), "y": torch.randn(rows, 1, generator=draw)}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("module", MODULES)
def test_every_module_that_trains_is_averaged(module):
    made = learner_of(module)
    floats = [(name, parameter) for name, parameter in made.module.named_parameters() if parameter.is_floating_point()]
    expected = {f"model.{name}": parameter.detach().clone() for name, parameter in floats}
    for number in range(5):
        made.averaged_update(batch(number), {}, PROGRESS)
        for name, parameter in floats:
            expected[f"model.{name}"].lerp_(parameter.detach(), 0.25)
    assert made.averages.values.keys() == expected.keys()
    assert all(torch.allclose(made.averages.values[name], value) for name, value in expected.items())

    before = {name: value.clone() for name, value in made.module.state_dict().items()}
    with made.evaluating():
        for name, parameter in floats:
            assert torch.allclose(parameter, expected[f"model.{name}"])
        answer = made.slots.forward(batch(0)["x"])
        assert answer.isfinite().all()
    assert all(torch.equal(value, before[name]) for name, value in made.module.state_dict().items())

    # Another learner goes on where this one was.
    other = learner_of(module)
    other.load_complete_state(kept(made.complete_state()))
    for each in (made, other):
        each.averaged_update(batch(7), {}, PROGRESS)
    assert all(torch.equal(value, other.averages.values[name]) for name, value in made.averages.values.items())


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.999999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
def test_averages_follow_parameters_of_every_type(dtype, decay):
    """The parameter jumps from 0 to 1; after n updates the average is 1 - decay^n."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    averages, updates = WeightAverages({"model": module}, decay), 3000
    with torch.no_grad():
        module.weight.fill_(1)
    for _ in range(updates):
        averages.update()
    (average,) = averages.values.values()
    assert average.dtype.itemsize >= 4
    assert torch.allclose(average.real.double(), torch.tensor(1 - decay**updates).double(), rtol=1e-3, atol=1e-9)
    with averages.applied():
        assert module.weight.dtype == dtype
        assert torch.allclose(module.weight.detach(), average.to(dtype))
    assert torch.equal(module.weight.detach(), torch.ones(3, dtype=dtype))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"growing buffer"}))
def test_a_prediction_inside_of_a_loss_does_not_change_its_gradients(module):
    made = learner_of(module)
    made.averaged_update(batch(1), {}, PROGRESS)
    rows = batch(2)
    state = {name: value.clone() for name, value in made.module.state_dict().items()}
    # A forward changes the statistics of some layers.
    made.slots.forward(rows["x"])
    averaged = made.predict(rows["x"])

    def gradients(inside):
        made.module.load_state_dict(state)
        for parameter in made.module.parameters():
            parameter.grad = None
        output = made.slots.forward(rows["x"])
        target = made.predict(rows["x"]) if inside else averaged
        assert torch.equal(target, averaged)
        (output - target).square().sum().backward()
        return [parameter.grad for parameter in made.module.parameters() if parameter.grad is not None]

    expected = gradients(inside=False)
    assert expected
    assert all(map(torch.equal, gradients(inside=True), expected))


def test_a_graph_from_inside_of_an_evaluation_is_not_differentiated_with_other_parameters():
    made = learner_of("normalized")
    made.averaged_update(batch(1), {}, PROGRESS)
    rows = batch(2)["x"]
    outside = made.module(rows).sum()
    with made.evaluating():
        inside = made.module(rows).sum()
        # Gradients with respect to inputs, such as forces, are computed inside.
        x = rows.clone().requires_grad_()
        made.module(x).sum().backward()
        assert x.grad is not None
        with pytest.raises(RuntimeError, match="inplace operation"):
            outside.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        inside.backward()
    outside.backward()


def test_parameters_of_inference_mode_are_swapped():
    with torch.inference_mode():
        module = nn.Linear(2, 1)
        averages = WeightAverages({"model": module}, 0.5)
        averages.values["model.bias"].fill_(7)
        with averages.applied():
            assert module.bias.item() == 7
        assert module.bias.item() != 7


def test_a_parameter_that_changes_its_shape_or_comes_later_is_averaged_from_there():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2))
    averages = WeightAverages({"model": module}, 0.5)
    module.weight = nn.Parameter(torch.full((3,), 4.0))
    module.bias = nn.Parameter(torch.ones(1))
    averages.update()
    with torch.no_grad():
        module.weight.fill_(8.0)
    averages.update()
    assert averages.values["model.weight"].tolist() == [6.0] * 3
    assert averages.values["model.bias"].tolist() == [1.0]


def gan(*sets):
    registry = Registry([GAN])
    return load(GAN.with_suffix(".yaml"), ["tracking.system_metrics=false", *sets], registry), [GAN]


def recipe_by_learner():
    """Returns a recipe that ships for each learner that ships."""
    return {tiny(name).model.kind: name for name in reversed(TRAINED)}


PIPELINES = {
    "gan": lambda: gan("train.ema=0.9"),
    "stacked": lambda: (tiny("marl_baseline", "train.ema=0.9", *with_requirements("stacked_agents")), ()),
}
PIPELINES |= {kind: lambda name=name: (tiny(name, "train.ema=0.9"), ()) for kind, name in recipe_by_learner().items()}


def test_every_learner_that_ships_is_averaged_here():
    assert set(Registry().kinds("model")) <= PIPELINES.keys()


def stepped(pipeline, updates):
    step = Step(pipeline)
    while pipeline.progress.updates < updates:
        step()
    return pipeline


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", PIPELINES)
def test_evaluation_and_resuming_use_averages_whoever_writes_the_update(name):
    recipe, plugins = PIPELINES[name]()
    pipeline = assemble(recipe, plugins)
    modules = pipeline.learner.modules()
    expected = {}
    for number in range(4):
        stepped(pipeline, number)
        for key, module in modules.items():
            for own, parameter in module.named_parameters():
                average = expected.setdefault(f"{key}.{own}", parameter.detach().clone())
                average.lerp_(parameter.detach(), 0.1)
    averages = pipeline.learner.averages.values
    assert averages.keys() == expected.keys()
    assert all(torch.allclose(averages[key], value, atol=1e-7) for key, value in expected.items())

    state = kept(pipeline.state_dict())
    measured, trained = evaluated(pipeline), {key: kept(module.state_dict()) for key, module in modules.items()}
    for key, module in modules.items():  # the averages in place of the parameters, by hand
        module.load_state_dict({own: expected.get(f"{key}.{own}", value) for own, value in trained[key].items()})
    pipeline.learner.averages, averages = None, pipeline.learner.averages
    assert evaluated(pipeline) == pytest.approx(measured, rel=1e-4, nan_ok=True)
    for key, module in modules.items():
        module.load_state_dict(trained[key])
    pipeline.learner.averages = averages

    resumed = assemble(recipe, plugins, resumed=state)
    resumed.load_state_dict(state)
    for each in (pipeline, resumed):
        stepped(each, 6)
    for key, value in pipeline.learner.complete_state()[AVERAGES].items():
        assert torch.equal(value, resumed.learner.averages.values[key])


def test_a_model_that_is_loaded_answers_with_averages_of_earlier_versions_too():
    recipe = tiny("digits_classifier", "train.ema=0.9")
    pipeline = stepped(assemble(recipe), 3)
    state = kept(pipeline.state_dict())
    learner = state["learner"]
    averages = {key.removeprefix("model."): value for key, value in learner.pop(AVERAGES).items()}
    learner["modules"]["average"] = learner["modules"]["model"] | averages
    older = assemble(recipe)
    older.load_learnt(state)
    for key, value in pipeline.learner.averages.values.items():
        assert torch.equal(value, older.learner.averages.values[key])
    learner["modules"].pop("average")
    without = assemble(recipe)  # of a run without averages
    without.load_learnt(state)
    for key, parameter in without.learner.averages.parameters():
        assert torch.equal(without.learner.averages.values[key], parameter.detach())
