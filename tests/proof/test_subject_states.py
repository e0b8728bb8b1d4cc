"""Nested states: their leaves, copies of them, and how they move."""

import sys
from collections import OrderedDict, UserDict
from dataclasses import replace

import pytest
import torch
from loops import Loop, Net, batches
from torch import nn

from runner.proof import Close, Subject, verify
from runner.proof.subject_states import load, named_parameters, saved
from runner.proof.trees import leaves, to_float64


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {}])
def test_how_an_optimizer_computes_is_no_part_of_its_state(settings):
    found = dict(leaves(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], **settings).state_dict()))
    assert "param_groups.0.lr" in found
    assert not {"param_groups.0.fused", "param_groups.0.foreach", "param_groups.0.capturable"} & found.keys()


def compiled():
    return Loop(net=lambda: torch.compile(Net(), backend="eager"), options={"lr": 1e-2, "fused": True}, schedule=True)()


def inside():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.compile(Net(), backend="eager")

        def forward(self, x):
            return self.net(x)

    return Loop(net=Outer)()


@pytest.mark.parametrize(("source", "target"), [(Loop(schedule=True), compiled), (compiled, Loop(schedule=True))])
def test_a_state_moves_between_compiled_and_plain(source, target):
    one, other = source(), target()
    for batch in batches(3):
        one.step(batch)
    kept = saved(one)
    load(other, kept)
    assert_equal(saved(one), saved(other))
    for batch in batches(2, seed=1):
        one.step(batch)
        other.step(batch)
    assert not any(
        torch.equal(mine, theirs)
        for (name, mine), (_, theirs) in zip(leaves(kept), leaves(saved(one)), strict=True)
        if name.endswith("weight")
    ), "what is saved does not move with the subject"
    assert bool(other.state["optimizer"].param_groups[0].get("fused")) is (target is compiled)


def assert_equal(one, other):
    for (name, mine), (theirs_name, theirs) in zip(leaves(one), leaves(other), strict=True):
        assert name == theirs_name
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, name


def test_names_of_parameters_are_those_of_the_plain_module():
    names = set(named_parameters(Loop()()))
    assert names == set(named_parameters(compiled()))
    assert {name.replace("model.", "model.net.") for name in names} == set(named_parameters(inside()))


def test_a_state_moves_into_a_wider_type():
    narrow = Loop()()
    for batch in batches(2):
        narrow.step(batch)
    torch.set_default_dtype(torch.float64)
    try:
        wide = Loop(options={"lr": 1e-2, "fused": True})()
        load(wide, saved(narrow))
        wide.step(to_float64(batches(1)[0]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert wide.state["model"].head.weight.dtype == torch.float64
    moments = [entry["exp_avg"] for entry in wide.state["optimizer"].state.values()]
    assert all(moment.dtype == torch.float64 for moment in moments)


class Remembering(torch.optim.SGD):
    """Keeps moments in float32, an index and a flag beside parameters of any type."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                moment = entry.setdefault("moment", torch.zeros(parameter.shape))
                entry.setdefault("largest", torch.tensor(0))
                moment.mul_(0.9).add_(parameter.grad.float())
                entry["largest"] = moment.abs().argmax()
                entry["positive"] = moment > 0
                parameter.data.add_(moment.to(parameter.dtype), alpha=-group["lr"])


class Narrow(Net):
    """Parameters in bfloat16."""

    def __init__(self):
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x):
        return super().forward(x.bfloat16()).float()


class Holder:
    """A part of a subject that has an optimizer among other things, and loads it for itself."""

    def __init__(self, optimizer):
        self.optimizer, self.updates = optimizer, 0

    def state_dict(self):
        return {"updates": self.updates, "inner": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        self.optimizer.load_state_dict(state["inner"])


OPTIMIZERS = {
    "moments wider than their parameters": Loop(net=Narrow, optimizer=Remembering),
    "single numbers in float32 (NAdam)": Loop(net=Narrow, optimizer=torch.optim.NAdam),
    "single numbers in float32 (ASGD)": Loop(net=Narrow, optimizer=torch.optim.ASGD),
    "16 bits throughout": Loop(net=Narrow),
    "float32 throughout": Loop(optimizer=torch.optim.RMSprop, options={"lr": 1e-2, "momentum": 0.9}),
}


def _held(subject):
    return replace(subject, state=subject.state | {"optimizer": Holder(subject.state["optimizer"])})


def types(optimizer):
    return [{key: value.dtype for key, value in entry.items()} for entry in optimizer.state.values()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_what_an_optimizer_counts_keeps_its_type_when_it_is_loaded(name, trained, held):
    one, other = OPTIMIZERS[name](), OPTIMIZERS[name]()
    for batch in batches(3):
        one.step(batch)
    if trained:
        other.step(batches(1)[0])
    optimizers = [subject.state["optimizer"] for subject in (one, other)]
    if held:
        one, other = (_held(subject) for subject in (one, other))
    load(other, saved(one))
    assert types(optimizers[1]) == types(optimizers[0])
    for batch in batches(2, seed=1):
        one.step(batch)
        other.step(batch)
    assert_equal(saved(one), saved(other))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.Adamax, torch.optim.RMSprop])
def test_a_capturable_optimizer_is_the_same_algebra(kind, monkeypatch):
    monkeypatch.setattr(sys.modules[kind.__module__], "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    baseline = Loop(optimizer=kind)
    changed = Loop(optimizer=kind, options={"lr": 1e-2, "capturable": True, "foreach": False})
    verdict = verify(baseline, changed, batches(6), Close())
    assert verdict, verdict


def test_a_rate_stays_a_tensor_where_the_optimizer_has_one():
    plain, tensor = Loop()(), Loop(options={"lr": torch.tensor(0.5), "foreach": False})()
    load(tensor, saved(plain))
    rate = tensor.state["optimizer"].param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert rate == 1e-2
    load(plain, saved(tensor))
    assert plain.state["optimizer"].param_groups[0]["lr"] == pytest.approx(1e-2)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_moments_lie_in_memory_as_their_parameters_do(memory):
    def build():
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        optimizer.zero_grad()
        return Subject(lambda x: None, {"model": model, "optimizer": optimizer})

    one, other = build(), Loop(net=lambda: nn.Conv2d(3, 4, 3))()
    other.state["model"](torch.ones(2, 3, 5, 5)).sum().backward()
    other.state["optimizer"].step()
    load(one, saved(other))
    weight = one.state["model"].weight
    moment = one.state["optimizer"].state[weight]["exp_avg"]
    assert moment.stride() == weight.stride()
    assert torch.equal(moment, other.state["optimizer"].state[other.state["model"].weight]["exp_avg"])


class Wrapped(UserDict):
    """A mapping whose shallow copy has the same items."""

    def __copy__(self):
        copied = object.__new__(type(self))
        copied.data = self.data
        return copied


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, Wrapped])
def test_a_state_in_any_mapping_is_loaded_and_stays_as_it_was(kind):
    class Holder:
        def __init__(self):
            self.values = kind(x=torch.zeros(2))

        def state_dict(self):
            return self.values

        def load_state_dict(self, state):
            self.values = kind(state)

    holder = Holder()
    subject = Subject(lambda batch: None, {"held": holder})
    states = {"held": kind(x=torch.ones(2))}
    load(subject, states)
    assert holder.values["x"].tolist() == [1, 1]
    assert states["held"]["x"].tolist() == [1, 1]
