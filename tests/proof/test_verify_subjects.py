"""Verdicts on loops whose batches, state and optimizers have unusual forms."""

import copy
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from loops import Loop, Net, batches
from torch import nn
from torch.nn import functional

from runner.proof import Close, Exact, Outcome, Subject, clock, verify

PROMISES = [Exact(), Close()]


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    kept: torch.Tensor


def masked_batches(count=6):
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(8, 4, generator=generator),
            "y": torch.randn(8, 1, generator=generator),
            "kept": (torch.rand(8, 1, generator=generator) < 0.7).float(),
        }
        for _ in range(count)
    ]


FORMS = {
    "tensors": (lambda batch: batch, lambda batch: batch),
    "arrays": (
        lambda batch: {name: tensor.numpy().copy() for name, tensor in batch.items()},
        lambda batch: {name: torch.as_tensor(array) for name, array in batch.items()},
    ),
    "dataclass": (lambda batch: Batch(**batch), vars),
    "queue": (lambda batch: deque(batch.values()), lambda batch: dict(zip(("x", "y", "kept"), batch, strict=True))),
}
"""By name: makes a batch of this form, and returns its tensors by name."""


@dataclass
class Masked:
    """Trains on the rows of a batch that are kept."""

    read: object
    wrong: bool = False
    halves: bool = False

    def __call__(self):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(batch):
            if self.halves:
                self.halve(batch)
            entries = self.read(batch)
            kept = entries["kept"]
            if self.wrong and not kept.any():
                kept = torch.ones_like(kept)
            errors = (model(entries["x"]) - entries["y"]).square() * kept
            loss = errors.sum() / kept.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Subject(step, {"model": model, "optimizer": optimizer})

    def halve(self, batch):
        x = self.read(batch)["x"]
        x *= 0.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("promise", PROMISES)
def test_extreme_cases_reach_batches_of_any_form(form, promise):
    make, read = FORMS[form]
    given = [make(batch) for batch in masked_batches()]
    assert verify(Masked(read), Masked(read), given, promise)
    verdict = verify(Masked(read), Masked(read, wrong=True), given, promise)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.summary.startswith("with every flag of the batch 0, ")


@pytest.mark.parametrize("form", FORMS)
def test_a_step_that_writes_into_its_batch_gets_copies(form):
    make, read = FORMS[form]
    given = [make(batch) for batch in masked_batches()]
    before = [read(batch)["x"].sum() for batch in copy.deepcopy(given)]
    assert verify(Masked(read, halves=True), Masked(read, halves=True), given, Exact())
    clock(Masked(read, halves=True), Masked(read, halves=True), given, rounds=5, seconds=0.1)
    assert [read(batch)["x"].sum() for batch in given] == before


def test_texts_in_arrays_are_part_of_a_batch():
    given = [batch | {"ids": np.array(["a", f"b{number}"])} for number, batch in enumerate(masked_batches())]
    assert verify(Masked(dict), Masked(dict), given, Exact())
    assert not clock(Masked(dict), Masked(dict), given, rounds=5, seconds=0.1).caught


class Memory:
    """Earlier results in a container, of which a step reads the oldest."""

    def __init__(self, values):
        self.values = values

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


@dataclass
class Remembering:
    """Trains with a result of five steps ago."""

    container: type
    factor: float = 1.0

    def __call__(self):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        memory = Memory(self.container([torch.zeros(1) for _ in range(30)]))

        def step(batch):
            prediction = model(batch["x"])
            oldest = memory.values[0]
            del memory.values[0]
            loss = functional.mse_loss(prediction, batch["y"]) + (prediction.mean() * oldest).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            memory.values.append(self.factor * prediction.mean(0).detach())
            return loss.detach()

        return Subject(step, {"model": model, "optimizer": optimizer, "memory": memory})


@pytest.mark.parametrize("container", [list, deque])
@pytest.mark.parametrize("promise", PROMISES)
def test_a_memory_is_compared_before_it_is_used(container, promise):
    assert verify(Remembering(container), Remembering(container), batches(), promise)
    verdict = verify(Remembering(container), Remembering(container, 3.0), batches(), promise)
    assert verdict.outcome is Outcome.FAIL
    assert "memory.values." in verdict.summary


class Versioned(nn.Linear):
    """A layer whose states of version 1 were transposed."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < self._version:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].T
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class OfVersions(nn.Module):
    def __init__(self, compiles=False):
        super().__init__()
        layer = Versioned(4, 4)
        self.layer = torch.compile(layer, backend="eager") if compiles else layer
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layer(x).tanh())


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("promise", PROMISES)
def test_modules_load_states_of_their_own_version(compiles, promise):
    changed = Loop(net=lambda: OfVersions(compiles))
    assert verify(Loop(net=OfVersions), changed, batches(), promise)


def lbfgs(set_to_none, factor=1.0):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(batch):
        def closure():
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = factor * functional.mse_loss(model(batch["x"]), batch["y"])
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Subject(step, {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (False, False)])
def test_gradients_of_a_closure_are_those_of_its_last_call(before, after, promise):
    assert verify(lambda: lbfgs(before), lambda: lbfgs(after), batches(), promise)
    verdict = verify(lambda: lbfgs(before), lambda: lbfgs(after, 1.01), batches(), promise)
    assert verdict.outcome is Outcome.FAIL


def forgetful(names, factor=1.0):
    torch.manual_seed(0)
    parts = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.05)

    def step(batch):
        loss = functional.mse_loss(parts["head"](parts["body"](batch["x"])), batch["y"])
        optimizer.zero_grad()
        (factor * loss).backward()
        optimizer.step()

    return Subject(step, {"optimizer": optimizer, **{name: parts[name] for name in names}})


@pytest.mark.parametrize("names", [(), ("body",), ("head",)])
@pytest.mark.parametrize("promise", PROMISES)
def test_trained_parameters_outside_of_the_state_are_named(names, promise):
    verdict = verify(lambda: forgetful(names), lambda: forgetful(names), batches(), promise)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "trains parameters that no part of the baseline's state has" in verdict.summary


def test_a_copy_of_parameters_in_one_piece_is_no_other_parameter():
    def build():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).requires_grad_()
        with torch.no_grad():
            model.weight.set_(flat.detach()[:4].view(1, 4))
            model.bias.set_(flat.detach()[4:])
        optimizer = torch.optim.SGD([flat], lr=0.05)

        def step(batch):
            loss = functional.mse_loss(model(batch["x"]), batch["y"])
            model.zero_grad()
            loss.backward()
            flat.grad = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            optimizer.step()
            return loss.detach()

        return Subject(step, {"model": model, "optimizer": optimizer})

    assert verify(build, build, batches(), Exact())


def test_a_model_that_is_made_outside_of_the_function_is_refused():
    model = Net()
    with pytest.raises(ValueError, match="'model' is the same object in two builds"):
        verify(Loop(net=lambda: model), Loop(net=lambda: model), batches(), Close())
    assert model.head.weight.dtype == torch.float32


def scheduled(steps, rate=0.05):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)

    def step(batch):
        loss = functional.mse_loss(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    return Subject(step, {"model": model, "optimizer": optimizer, "schedule": schedule})


@pytest.mark.parametrize("promise", PROMISES)
def test_a_schedule_may_have_as_many_steps_as_batches(promise):
    assert verify(lambda: scheduled(8), lambda: scheduled(8), batches(8), promise)
    verdict = verify(lambda: scheduled(8), lambda: scheduled(8, 0.051), batches(8), promise)
    assert verdict.outcome is Outcome.FAIL


@pytest.mark.parametrize("promise", PROMISES)
def test_the_last_batch_is_compared_where_a_schedule_ends_with_it(promise):
    given = batches(8)
    given[-1]["x"] = given[-1]["x"][:5]
    given[-1]["y"] = given[-1]["y"][:5]

    def wrong():
        subject = scheduled(8)

        def step(batch):
            smaller = {name: tensor[1:] for name, tensor in batch.items()}
            return subject.step(smaller if len(batch["x"]) == 5 else batch)

        return replace(subject, step=step)

    assert verify(lambda: scheduled(8), lambda: scheduled(8), given, promise)
    verdict = verify(lambda: scheduled(8), wrong, given, promise)
    assert verdict.outcome is Outcome.FAIL
    assert "update 8" in verdict.summary


def averaged(weight, lerp, **options):
    """Keeps an average of a model in a dictionary that is made of its first parameters."""
    torch.manual_seed(0)
    model = copy.deepcopy(PRETRAINED)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1, **options)
    average = Memory({name: value.detach().clone() for name, value in model.named_parameters()})

    def step(batch):
        loss = functional.mse_loss(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, value in model.named_parameters():
            old = average.values[name]
            average.values[name] = (
                old.lerp(value.detach(), weight) if lerp else old * (1 - weight) + value.detach() * weight
            )
        return loss.detach()

    return Subject(step, {"model": model, "optimizer": optimizer, "average": average})


PRETRAINED = nn.Linear(4, 1)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_state_that_is_made_of_a_float32_model_is_compared_in_float64(options):
    assert verify(lambda: averaged(0.1, lerp=False), lambda: averaged(0.1, lerp=True, **options), batches(), Close())
    verdict = verify(lambda: averaged(0.1, lerp=False), lambda: averaged(0.1001, lerp=True), batches(), Close())
    assert verdict.outcome is Outcome.FAIL


def test_the_message_of_a_state_that_does_not_load_has_its_content():
    class Strict(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return OrderedDict(super().state_dict(*args, **kwargs), other=torch.ones(1))

    verdict = verify(Loop(), Loop(net=lambda: nn.Sequential(Strict(4, 1))), batches(), Exact())
    assert verdict.outcome is Outcome.FAIL
    assert "in loading state_dict for Sequential: " in verdict.summary


class Narrow(torch.autograd.Function):
    """A linear layer whose backward pass has 8 bits in float32."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        if gradient.dtype == torch.float64:
            return gradient @ weight, gradient.T @ x
        gradient, x, weight = gradient.bfloat16(), x.bfloat16(), weight.bfloat16()
        return (gradient @ weight).float(), (gradient.T @ x).float()


@dataclass
class OfTwoPrecisions:
    """A table in 16 bits before layers in 32."""

    linear: object = staticmethod(functional.linear)
    options: dict | None = None

    def __call__(self):
        torch.manual_seed(0)
        is_float64 = torch.get_default_dtype() == torch.float64
        table = nn.Embedding(20, 8, dtype=None if is_float64 else torch.bfloat16)
        body = nn.Linear(8, 16, bias=False)
        model = nn.ModuleDict({"table": table, "body": body, "head": nn.Linear(16, 1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **(self.options or {}))

        def step(batch):
            row = table(batch["row"]).to(body.weight.dtype)
            hidden = self.linear(row, body.weight).tanh()
            loss = functional.mse_loss(model["head"](hidden), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Subject(step, {"model": model, "optimizer": optimizer})


def rows():
    generator = torch.Generator().manual_seed(5)
    return [batch | {"row": torch.randint(20, (16,), generator=generator)} for batch in batches(12)]


def test_one_parameter_of_16_bits_does_not_make_others_less_precise():
    assert verify(OfTwoPrecisions(), OfTwoPrecisions(options={"foreach": True}), rows(), Close())
    verdict = verify(OfTwoPrecisions(), OfTwoPrecisions(Narrow.apply), rows(), Close())
    assert verdict.outcome is Outcome.FAIL
    assert "gradients of float32" in verdict.summary


class Packed(nn.Module):
    """A layer with a table of 8 bits that every step reads and writes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("table", torch.ones(4).to(torch.float8_e4m3fn))

    def forward(self, x):
        table = self.table.to(x.dtype)
        self.table.copy_((0.5 * table + 1).detach())
        return self.layer(x * table)


@pytest.mark.parametrize("promise", PROMISES)
def test_a_buffer_of_8_bits_is_compared_as_it_is(promise):
    assert verify(Loop(net=Packed), Loop(net=Packed), batches(), promise)


def sparse(factor):
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(20, 8, sparse=True), "head": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch):
        loss = factor * functional.mse_loss(model["head"](model["table"](batch["row"])), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Subject(step, {"model": model, "optimizer": optimizer})


def test_the_operator_behind_a_sparse_gradient_is_named():
    verdict = verify(lambda: sparse(1.0), lambda: sparse(1.01), rows(), Close())
    assert verdict.outcome is Outcome.FAIL
    assert "first diverging operator: aten.mul" in verdict.summary
