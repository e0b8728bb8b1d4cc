"""A module and a loss: what the first storey of learners makes of them."""

from functools import partial

import pytest
import torch
from torch import nn

from runner.api import Context, GradientLearner, GradientLearnerConfig, Learner, Loss, Mean, Progress, Slots
from runner.plugin.optimizer import settings_of

CPU = torch.device("cpu")
PROGRESS = Progress("updates", 10)


class Config(GradientLearnerConfig):
    """Settings."""

    kind = "net"
    implementation = "Net"
    learns_from = "rows"
    dropout: float = 0.0


class Net(GradientLearner):
    """Fits rows; the count is a number of its own, so that sum and mean differ."""

    def build(self, config, shapes, context):
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(config.dropout), nn.Linear(4, 1))

    def loss(self, batch, noise, progress):
        error = self.slots.forward(batch["x"]) - batch["y"]
        return Loss(error.square().sum(), len(error), {"bias": Mean(error.detach().sum(), len(error))})


class WithScales(Net):
    """Has a second role: a module beside the network, one around it, or one of its layers."""

    further = "beside"

    def __init__(self, config, shapes, context):
        super().__init__(config, shapes, context)
        modules = {
            "beside": nn.BatchNorm1d(1),
            "around": nn.ModuleList([self.module, nn.BatchNorm1d(1)]),
            "inside": self.module[3],
        }
        self.further_role = self.role("further", modules[self.further])

    def loss(self, batch, noise, progress):
        error = self.slots.forward(batch["x"]) - batch["y"]
        norm = [*self.further_role.module.modules()][-1]
        return Loss(norm(error).square().sum(), len(error))

    def update(self, batch, noise, progress):
        self.further_role.zero_grad()
        output = super().update(batch, noise, progress)
        self.further_role.step()
        return output


def settings(kind="sgd", **own):
    return settings_of(kind)(**own)


def learner(ema=None, dropout=0.0, seed=0, cls=Net, **optimizer):
    role_settings = settings(**{"lr": 0.1, **optimizer})
    roles = ("model",) if cls is Net else ("model", "further")
    context = Context(CPU, Slots(), seed, 8, dict.fromkeys(roles, role_settings), ema)
    made = cls(Config(dropout=dropout), {"x": (3,)}, context)
    context.slots.define(update=made.averaged_update)
    made.configure_optimizers()
    made.start_averages()
    return made


def batch(seed=0, rows=8):
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 3, generator=draw), "y": torch.randn(rows, 1, generator=draw)}


def parameters(made):
    return [parameter.detach().clone() for _, parameter in made.named_parameters()]


def test_an_update_is_one_step_along_the_gradient_of_the_mean():
    made = learner()
    before = parameters(made)
    output = made.update(batch(), {}, PROGRESS)
    for old, new, gradient in zip(before, parameters(made), made.gradients().values(), strict=True):
        assert torch.allclose(new, old - 0.1 * gradient, atol=1e-7)
    assert output["loss"].count == 8
    assert set(output) == {"loss", "bias"}


def test_the_same_seed_builds_the_same_module_whatever_was_drawn_before():
    one = parameters(learner(seed=3))
    torch.rand(5)
    assert all(torch.equal(a, b) for a, b in zip(one, parameters(learner(seed=3)), strict=True))
    assert not torch.equal(one[0], parameters(learner(seed=4))[0])


def test_gradients_are_clipped_where_the_recipe_says_so():
    made = learner(max_grad_norm=1e-3)
    made.update(batch(), {}, PROGRESS)
    norm = torch.cat([gradient.flatten() for gradient in made.gradients().values()]).norm()
    assert norm <= 1e-3 + 1e-6


def test_averages_follow_parameters_and_buffers_and_are_what_is_evaluated():
    made = learner(ema=0.5)
    first = parameters(made)
    made.averaged_update(batch(), {}, PROGRESS)
    expected = [(old + new) / 2 for old, new in zip(first, parameters(made), strict=True)]
    assert all(torch.allclose(a, b) for a, b in zip(expected, made.averages.values.values(), strict=True))
    running_mean = made.module[1].running_mean.clone()
    expected = [average.clone() for average in made.averages.values.values()]
    trained = parameters(made)
    with made.evaluating():
        assert all(torch.equal(a, b) for a, b in zip(expected, parameters(made), strict=True))
        with made.evaluating():  # predict inside an evaluation
            assert all(torch.equal(a, b) for a, b in zip(expected, parameters(made), strict=True))
            assert torch.equal(made.module[1].running_mean, running_mean)  # what is no parameter is not averaged
    assert all(torch.equal(a, b) for a, b in zip(trained, parameters(made), strict=True))


def test_evaluation_is_without_dropout_and_leaves_training_mode_behind():
    made = learner(dropout=0.5)
    answers = [made.predict(batch()["x"]) for _ in range(2)]
    assert torch.equal(*answers)
    assert made.module.training
    with made.evaluating():
        assert not made.module.training


def test_every_part_has_its_own_mode_again_after_an_evaluation():
    """Of both storeys, also if one evaluation is inside of another."""
    made = learner()
    made.module[1].eval()  # kept as it is on purpose
    for evaluating in (made.evaluating, partial(Learner.evaluating, made)):
        with evaluating(), evaluating():
            assert not any(part.training for part in made.module.modules())
        assert [part.training for part in made.module] == [True, False, True, True]


def test_outputs_stay_real_whatever_the_parameters(monkeypatch):
    class Waves(nn.Module):
        def __init__(self, *names):
            super().__init__()
            kinds = {"wave": torch.complex64, "weight": torch.float32}
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.ones(3, dtype=kinds[name])))

        def forward(self, x):
            return (x * self.wave).abs().double(), x * self.wave

    for names in (("wave", "weight"), ("wave",)):
        monkeypatch.setattr(Net, "build", lambda *_, names=names: Waves(*names))
        outputs = learner().predict(torch.ones(2, 3))
        assert [output.dtype for output in outputs] == [torch.float32, torch.complex64]


def test_metrics_are_the_loss_and_what_else_it_logs():
    made = learner()
    with made.evaluating():
        whole = made.metrics(batch(rows=8))
        parts = [made.metrics({name: rows[part] for name, rows in batch().items()}) for part in (slice(3), slice(3, 8))]
    assert whole.keys() == {"loss", "bias"}
    for name, mean in whole.items():
        assert float(mean.sum) == pytest.approx(sum(float(part[name].sum) for part in parts), rel=1e-5)
        assert mean.count == sum(part[name].count for part in parts)


def test_state_moves_to_another_learner():
    one, other = learner(ema=0.9, kind="adamw"), learner(ema=0.9, kind="adamw", seed=1)
    for number in range(3):
        one.averaged_update(batch(number), {}, PROGRESS)
    other.load_complete_state(one.complete_state())
    for made in (one, other):
        made.averaged_update(batch(9), {}, PROGRESS)
    assert all(torch.equal(a, b) for a, b in zip(parameters(one), parameters(other), strict=True))
    assert all(torch.equal(one.averages.values[name], other.averages.values[name]) for name in one.averages.values)


def further_learner(further, **options):
    return learner(cls=type("Further", (WithScales,), {"further": further}), **options)


@pytest.mark.parametrize(
    ("further", "names"),
    [("beside", ["model", "further"]), ("around", ["model", "further"]), ("inside", ["model"])],
)
def test_modules_are_those_of_all_roles_without_what_is_inside_of_the_network(further, names):
    made = further_learner(further)
    modules = made.modules()
    assert list(modules) == names
    assert modules["model"] is made.module
    layers = {layer for module in modules.values() for layer in module.modules()}
    assert all(layers.issuperset(role.module.modules()) for role in made.roles.values())


@pytest.mark.parametrize("further", ["beside", "around"])
def test_a_further_role_is_saved_averaged_and_evaluated(further):
    source, target = further_learner(further, ema=0.5), further_learner(further, ema=0.5, seed=1)
    for number in range(3):
        source.averaged_update(batch(number), {}, PROGRESS)
    norm = [*source.further_role.module.modules()][-1]
    trained = norm.weight.detach().clone()
    assert not torch.equal(trained, torch.ones(1))
    with source.evaluating():
        assert not norm.training
        assert not torch.equal(norm.weight, trained)
    target.load_complete_state(source.complete_state())
    for made in (source, target):
        made.averaged_update(batch(9), {}, PROGRESS)
    assert all(torch.equal(*pair) for pair in zip(parameters(source), parameters(target), strict=True))
    loaded = [*target.further_role.module.modules()][-1]
    assert torch.equal(norm.running_mean, loaded.running_mean)


def test_forwards_come_in_the_parameters_type_whatever_the_precision_inside():
    made = learner()
    made.slots.replace("precision", lambda: torch.autocast("cpu", torch.bfloat16))
    assert made.slots.forward(batch()["x"]).dtype == torch.float32
    made.module.double()
    made.slots.replace("precision", torch.enable_grad)
    assert made.slots.forward(batch()["x"].double()).dtype == torch.float64


@pytest.mark.parametrize(
    "types",
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float64),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_an_output_of_a_module_with_several_types_loses_no_digits(types, monkeypatch):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 4, dtype=types[0])
            self.head = nn.Linear(4, 1, dtype=types[1])

        def forward(self, x):
            return self.head(self.first(x.to(types[0])).to(types[1]))

    monkeypatch.setattr(Net, "build", lambda *_: Mixed())
    made = learner()
    x = batch()["x"]
    output = made.slots.forward(x)
    expected = made.module(x)
    assert output.dtype == max(types, key=lambda kind: kind.itemsize)
    assert torch.equal(output.double(), expected.double())
