"""Functions that are captured and replayed, with the operators of a CPU in place of a CUDA graph."""

import sys
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_graph import CaptureError, OperatorGraph, capture
from running import tiny

from runner.plugin.ring import Ring
from runner.plugins.marl.uav.environment import UavEnvironment
from runner.plugins.stages import captured_call
from runner.plugins.stages.captured_call import MOST_GRAPHS, UNCAPTURED_CALLS, CapturedCall, copied, copy_all
from runner.plugins.stages.cuda_graph import CudaGraph, CudaGraphConfig
from runner.system.errors import UsageError
from runner.system.tensor_trees import leaves, map_tensors, tensors
from runner.training.pipeline import assemble
from runner.training.step import Step

SMALL = ("data.envs=3", "data.warmup=21", "train.batch_size=5", "data.updates_per_step=1", "data.replay.capacity=64")
OBSTACLES = "data.obstacles={count: 4, speed: 9.0, turn: 0.3}"


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    """Makes graphs of operators."""
    monkeypatch.setattr(captured_call, "capture", capture)


def pipelines(recipe, *sets):
    """Returns steps of a recipe: plain, and with what the source declares captured."""
    plain, changed = (assemble(tiny(recipe, *sets)) for _ in range(2))
    stage = CudaGraph(CudaGraphConfig(scope="iteration"))
    stage.calls = []
    stage._capture_source(changed)
    return Step(plain), Step(changed), stage


def follow(step, draws):
    """Draws and updates; returns every batch, and the state at the end."""
    batches = []
    for _ in range(draws):
        inputs = step.draw()
        batches.append(None if inputs is None else inputs.batch)
        if inputs is not None:
            step(inputs)
    return {"batches": batches, "source": step.source.state_dict(), "statistics": step.source.statistics()}


def same(first, second):
    """Returns the paths at which two trees have other bits."""
    pairs = zip(leaves(first), leaves(second), strict=True)
    return [
        path
        for (path, a), (_, b) in pairs
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else "Ring" in str(a) or a == b)
    ]


def stored(step):
    """Returns the transitions of a replay buffer."""
    ring = step.source.state_dict()["replay"]["rows"]
    return ring.read(ring.first, ring.written)


def clones(step):
    """Returns the state of a pipeline, which no longer changes."""
    state = map_tensors(torch.clone, step.pipeline.state_dict())
    rows = stored(step).clone()
    ring = state["source"]["replay"]["rows"]
    state["source"]["replay"]["rows"] = Ring(
        ring.capacity, ring.written, lambda first, last: rows[first - ring.first : last - ring.first]
    )
    return state


@pytest.mark.parametrize(
    ("replay", "sets"),
    [
        ("uniform", (OBSTACLES,)),
        ("uniform", ("data.followers=1", "data.repeat_failures=0.9")),
        ("prioritized", ()),
        ("prioritized", (OBSTACLES, "data.followers=1", "data.repeat_failures=0.9")),
    ],
    ids=str,
)
def test_a_captured_iteration_has_the_same_bits(replay, sets):
    """Simulator, buffer and priorities, over ends of episodes and a full buffer."""
    sets = (*SMALL, f"data.replay.kind={replay}", "data.training_limit=6", "data.normalize_rewards=true", *sets)
    plain, changed, stage = pipelines("marl_phase2", *sets)
    assert not same(follow(plain, 90), follow(changed, 90))
    assert torch.equal(stored(plain), stored(changed))
    assert plain.source._replay._written > 64
    graphs = {call._name: len(call._graphs) for call in stage.calls}
    # Random and learned actions are functions of their own.
    expected = {"fetch_batch": 1, "simulate": 2, "update_priorities": 1}
    assert graphs == {name: expected[name] for name in plain.source.capturable}
    assert len(graphs) == 2 + (replay == "prioritized")


def test_a_simulator_that_replaces_its_state_is_found(monkeypatch):
    """The comparison above can fail."""

    def replaced(environment, action):
        environment._bodies = environment._bodies.clone()
        return real(environment, action)

    real = UavEnvironment.step
    monkeypatch.setattr(UavEnvironment, "step", replaced)
    plain, changed, _ = pipelines("marl_phase2", *SMALL)
    assert same(follow(plain, 40), follow(changed, 40))


@pytest.mark.parametrize("wrong", ["reads", "copies", "generator"])
def test_what_cannot_be_captured_is_found(wrong, monkeypatch):
    """What waits for a GPU would end a capture there, and does here."""

    def reading(environment, action):
        if wrong == "reads":
            bool((action > 1).any())
        elif wrong == "copies":
            torch.tensor(1.0)
        else:
            torch.rand(3, generator=torch.Generator())
        return real(environment, action)

    real = UavEnvironment.step
    monkeypatch.setattr(UavEnvironment, "step", reading)
    _, changed, _ = pipelines("marl_phase2", *SMALL)
    with pytest.raises(CaptureError):
        follow(changed, 40)


def test_a_loaded_state_is_followed():
    """A state replaces tensors that a graph reads, so the stage captures anew."""
    sets = (*SMALL, "data.replay.kind=prioritized")
    plain, changed, stage = pipelines("marl_phase2", *sets)
    for step in (plain, changed):
        follow(step, 40)
        state = clones(step)
        follow(step, 15)
        step.pipeline.load_state_dict(state)
        step.reset()
    stage.load_state_dict({})
    assert not any(call._graphs for call in stage.calls)
    assert not same(follow(plain, 40), follow(changed, 40))


class Sums:
    """A source of a kind of its own: running sums of what it draws."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)
        self.total = torch.zeros(4)

    def draw(self, factor):
        """Adds random numbers to the total, and returns it with its square."""
        self.total += factor * torch.rand(4, generator=self.generator)
        return {"sum": self.total, "more": [self.total.square(), torch.arange(4) + factor.long()]}


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=12))
def test_a_function_of_another_source_gives_the_same(factors):
    plain, changed = Sums(), Sums()
    call = CapturedCall("draw", changed.draw, [changed.generator])
    kept = []
    for factor in factors:
        expected = copied(plain.draw(torch.tensor(factor)))
        kept.append((expected, call(torch.tensor(factor))))
    assert len(call._graphs) == (len(factors) > UNCAPTURED_CALLS)
    # The results of a replay are not those that the next one overwrites.
    for expected, result in kept[UNCAPTURED_CALLS:]:
        assert not same(expected, result)


def test_shapes_and_constants_have_graphs_of_their_own_up_to_a_number():
    call = CapturedCall("scale", lambda tensor, power: tensor**power, [])
    for size in range(1, MOST_GRAPHS):
        for _ in range(UNCAPTURED_CALLS + 2):
            assert torch.equal(call(torch.arange(size), 2), torch.arange(size) ** 2)
    for _ in range(UNCAPTURED_CALLS + 2):
        assert torch.equal(call(torch.arange(3), 3), torch.arange(3) ** 3)
    assert len(call._graphs) == MOST_GRAPHS
    for _ in range(UNCAPTURED_CALLS):
        call(torch.arange(99), 2)
    with pytest.raises(UsageError, match="scale has been called with more than 8 combinations"):
        call(torch.arange(99), 2)
    call.forget()
    assert not call._graphs


def test_tensors_of_several_types_are_copied():
    values = [torch.arange(3), torch.rand(2, 2), torch.tensor(True), torch.zeros(0), torch.rand(3).expand(2, 3)]
    places = [torch.empty_like(value) for value in values]
    copy_all(places, values)
    assert all(map(torch.equal, places, values))


def performed_again(function, generators):
    """Captures nothing: calls the function at every replay, and copies its results to the first ones."""
    graph = OperatorGraph(generators)
    with graph:
        results = function()
    graph.undo()
    return lambda: copy_all(list(tensors([results])), list(tensors([function()]))), results


@pytest.fixture
def adam_on_a_cpu(monkeypatch):
    """Allows ``cuda_graph`` and capturable optimizers on a CPU."""
    monkeypatch.setattr(CudaGraphConfig, "inactive", lambda self, setting: None)
    monkeypatch.setattr(captured_call, "side_stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    module = sys.modules[torch.optim.Adam.__module__]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])


def trained(recipe, sets, draws):
    """Trains; returns the state at the end, and the result of every update."""
    step = Step(assemble(tiny(recipe, *sets)))
    outputs = [step() for _ in range(draws)]
    return {"outputs": outputs, "learner": step.learner.complete_state(), "source": step.source.state_dict()}


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("marl_phase2", (*SMALL, "data.replay.kind=prioritized")),
        ("marl_phase1", (*SMALL, "lr_scheduler={kind: linear}")),
        ("digits_classifier", ("model.dropout=0.2", "lr_scheduler={kind: cosine}")),
        ("shakespeare_gpt", ("optimization.fused_optimizer=off", "optimization.amp=off")),
        ("grasp_diffusion", ("optimization.fused_optimizer=off",)),
    ],
)
def test_a_captured_training_is_the_one_whose_functions_are_called(recipe, sets, adam_on_a_cpu, monkeypatch):
    """Updates with gradients, optimizers, schedules and random numbers, between the steps of the source."""
    sets = (*sets, "optimization.cuda_graph={scope: iteration}")
    captured = trained(recipe, sets, 20)
    monkeypatch.setattr(captured_call, "capture", performed_again)
    assert not same(trained(recipe, sets, 20), captured)
