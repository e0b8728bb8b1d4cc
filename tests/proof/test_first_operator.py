"""The first operator that diverges, in random networks and in each part of an update."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import Loop, Net, batches
from torch import nn

from runner.proof import Close, Exact, Outcome, Subject, Verdict, exact, verify
from runner.proof.algebra_check import algebra
from runner.proof.first_operator import Reproduction, find_first_operator, name_operator, seed_of
from runner.proof.operator_search import DivergingOperator
from runner.proof.subject_states import saved
from runner.proof.trajectory import Trajectory, Update
from runner.proof.values import Value, ValueTable

BATCHES = batches(3)
WIDTH = 4
LAYERS = {
    "relu": (torch.relu, "aten.relu"),
    "tanh": (torch.tanh, "aten.tanh"),
    "sigmoid": (torch.sigmoid, "aten.sigmoid"),
    "sin": (torch.sin, "aten.sin"),
    "softmax": (lambda x: torch.softmax(x, 1), "aten._softmax"),
    "norm": (lambda x: nn.functional.layer_norm(x, [WIDTH]), "aten.native_layer_norm"),
    "transposed": (lambda x: (x.t() @ x) / len(x), "aten.div"),
    "shifted": (lambda x: x - 0.25, "aten.sub"),
    "sorted": (lambda x: x.sort(1).values, "aten.sort"),
    "gathered": (lambda x: x[:, [1, 0, 3, 2]], "aten.index"),
    "mixed": (lambda x: x.lerp(x.mean(0), 0.5), "aten.lerp"),
}
"""Layers with the last operator of each, which no other one has.

No layer lets values grow until a later tanh hides what is wrong.
"""


class Layers(nn.Module):
    """A linear layer, and layers of which one may be wrong.

    Args:
        names: Of the layers.
        wrong: The position of the wrong one; None for a correct network.
        fault: What is wrong with it.
    """

    def __init__(self, names, wrong=None, fault=""):
        super().__init__()
        self.linear = nn.Linear(4, WIDTH)
        self.names, self.wrong, self.fault = names, wrong, fault

    def forward(self, x):
        x = self.linear(x)
        for position, name in enumerate(self.names):
            layer, _ = LAYERS[name]
            x = self.wrongly(layer, x) if position == self.wrong else layer(x)
        # No layer makes gradients of these weights vanish.
        return (x @ torch.tensor([[0.3], [-1.0], [2.0], [0.7]], dtype=x.dtype))[:3]

    def wrongly(self, layer, x):
        if self.fault == "left out":
            return x
        x = layer(x)
        if self.fault == "written by no operator":
            x.detach().numpy().reshape(-1)[1] += 0.5
            return x
        if self.fault == "wrong gradient":
            return WrongGradient.apply(x)
        return x * 1.01 if self.fault == "scaled" else x.flip(0)


class WrongGradient(torch.autograd.Function):
    """Returns its input, and 1.01 times its gradient."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return 1.01 * gradient


def small(net):
    return Loop(net=net, options={"lr": 1e-2})


def three_rows(number):
    return [{"x": batch["x"], "y": batch["y"][:3]} for batch in BATCHES[:number]]


def first_operator(changed, baseline=None, contract="Exact", update=1, given=BATCHES, float64=False):
    """The search's result, which has to be JSON."""
    reproduction = Reproduction(baseline or Loop(), changed, Trajectory(given, 0, float64), update, contract)
    operator = find_first_operator(reproduction)
    if isinstance(operator, DivergingOperator):
        json.dumps(operator.data(), allow_nan=False)
    return operator


NEW = ("does not have", "where the baseline has")
"""Remarks about an operator that the baseline does not have at all, or not in this place."""
EXPECTED = {
    "scaled": ("aten.mul", NEW),
    "flipped": ("aten.flip", NEW),
    "written by no operator": (None, "changed afterwards by no operator"),
    "left out": (None, "is left out"),
    "wrong gradient": ("aten.mul", ""),
}
"""The operator, if it is not the layer's, and the remark."""


def test_a_transposed_matrix_of_the_baseline_is_no_changed_one():
    # What comes after the product is the transpose of what the baseline has there.
    names = ["gathered", "transposed", "gathered"]
    baseline, changed = small(lambda: Layers(names)), small(lambda: Layers(names, 0, "left out"))
    operator = first_operator(changed, baseline, given=three_rows(1))
    assert (operator.operator, operator.remark) == ("aten.mm", "with another input")
    assert operator.candidate != operator.baseline


@settings(max_examples=13, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    st.sampled_from(sorted(EXPECTED)),
    st.booleans(),
    st.data(),
)
def test_an_error_after_any_operator_of_any_network_is_found_there(names, fault, float64, data):
    wrong = data.draw(st.integers(0, len(names) - 1))
    _, last = LAYERS[names[wrong]]
    inputs = three_rows(1)
    baseline, changed = small(lambda: Layers(names)), small(lambda: Layers(names, wrong, fault))
    contract = "Close" if float64 else "Exact"
    operator = first_operator(changed, baseline, contract, given=inputs, float64=float64)
    expected, remark = EXPECTED[fault]
    if isinstance(operator, str):
        # Some faults make no difference: a sigmoid without a ReLU, a norm of something scaled.
        assert algebra(baseline, changed, inputs) if float64 else exact(baseline, changed, inputs)
        return
    if operator.phase == "backward" and fault != "wrong gradient":
        # What is done to rows before a product over them changes rounding alone. A norm of a norm changes a little
        # more: what it adds to the variance shows in the ninth digit.
        is_norm_of_norm = fault == "left out" and ["norm", "norm"] in (
            names[wrong : wrong + 2],
            names[wrong - 1 : wrong + 1],
        )
        assert is_norm_of_norm or algebra(baseline, changed, inputs)
        return
    if fault == "left out":
        # The next layer may have the same operators, and is then the one with another input.
        remarks = "is left out", "with another input", "which the baseline does not have", "where the baseline has"
        assert operator.phase == "forward"
        assert operator.remark.startswith(remarks) or operator.remark.endswith(remarks), operator
        return
    assert operator.operator == (expected or last), operator
    remarks = remark if isinstance(remark, tuple) else (remark,)
    assert any(text in operator.remark for text in remarks), operator
    assert operator.phase == ("backward" if fault == "wrong gradient" else "forward")


class Uncounted(Net):
    """Does not count its calls."""

    def forward(self, x):
        return self.head(self.norm(self.hidden(x)).relu())


class Leaky(Net):
    """Has another activation."""

    def forward(self, x):
        self.seen += 1
        return self.head(nn.functional.leaky_relu(self.norm(self.hidden(x)), 1e-3))


class Stacked(Net):
    """Computes the hidden layer with its weight and its bias in one matrix, and a part of it wrongly if told."""

    factor = 1.0

    def forward(self, x):
        self.seen += 1
        weight = torch.cat([self.hidden.weight, self.hidden.bias[:, None]], 1)
        hidden = torch.cat([x, torch.ones(len(x), 1)], 1) @ weight.t()
        return self.head(self.norm(hidden).relu() * self.factor)


class WrongStacked(Stacked):
    factor = 1.001


def micro_batches(model, x):
    return torch.cat([model(part) for part in x.chunk(4)])


def half(model, x):
    return model(x[:8]).repeat(2, 1)


@pytest.mark.parametrize(
    ("changed", "name", "phase", "module"),
    [
        (Loop(net=Leaky), "aten.leaky_relu", "forward", "model"),
        (Loop(net=WrongStacked), "aten.mul", "forward", "model"),
        (Loop(net=Uncounted, forward=lambda model, x: micro_batches(model, x) * 1.001), "aten.mul", "forward", ""),
        (Loop(net=Uncounted, forward=half), "aten.slice", "forward", ""),
        (Loop(backward=lambda loss: (1.001 * loss).backward()), "aten.mul", "backward", "MulBackward0"),
        (Loop(options={"lr": 1e-2, "weight_decay": 1e-3}), "aten.add", "optimizer step", "Adam"),
        (Loop(options={"lr": 1.001e-2}), "aten.addcdiv_", "optimizer step", "Adam"),
        (Loop(options={"lr": 1.001e-2, "foreach": True}), "aten._foreach_addcdiv_", "optimizer step", "Adam"),
    ],
)
def test_it_is_named_in_each_part_of_an_update(changed, name, phase, module):
    baseline = Loop(net=Uncounted) if changed.net is Uncounted else None
    operator = first_operator(changed, baseline, contract="Close", float64=True)
    assert (operator.operator, operator.phase, operator.module) == (name, phase, module), operator


def test_both_values_and_that_in_float64_are_reported():
    operator = first_operator(Loop(net=Leaky), update=1)
    assert (operator.baseline, operator.float64) == (0.0, 0.0)
    assert operator.candidate < 0
    assert "where the baseline has aten.relu" in str(operator)
    assert str(operator).startswith("first diverging operator: aten.leaky_relu in the forward of 'model' (")


@pytest.mark.parametrize("net", [Net, Stacked])
def test_what_is_merged_and_correct_has_no_diverging_operator(net):
    text = first_operator(Loop(net=net), contract="Close", float64=True)
    assert text.startswith("the difference does not come again when operators are recorded one by one")
    assert "the last common operator is aten." in text


class Late:
    """Scales the loss of one update."""

    def __init__(self, number):
        self.number, self.updates = number, 0

    def __call__(self, loss):
        self.updates += 1
        (loss * (1.01 if self.updates == self.number else 1.0)).backward()


@pytest.mark.parametrize(("contract", "update"), [(Exact(), 2), (Close(), 2), (Exact(), 3)])
def test_a_verdict_names_the_operator_of_the_update_that_diverges(contract, update):
    verdict = verify(Loop(), lambda: replace(Loop(), backward=Late(update))(), BATCHES, contract)
    assert verdict.outcome is Outcome.FAIL
    assert f"update {update}," in verdict.summary
    assert "; first diverging operator: aten.mul in the backward of 'MulBackward0'" in verdict.summary
    assert verdict.evidence["operator"]["operator"] == "aten.mul"
    json.dumps(verdict.evidence, allow_nan=False)


def test_the_update_is_searched_where_it_is_not_known():
    def late():
        return replace(Loop(), backward=Late(3))()

    reproduction = Reproduction(Loop(), late, Trajectory(BATCHES, 0), 2, "Exact", last=3)
    assert reproduction.narrowed().update == 3
    assert find_first_operator(reproduction).operator == "aten.mul"


def fails(_):
    raise RuntimeError("no second time")


def test_a_search_that_fails_leaves_the_verdict():
    reproduction = Reproduction(Loop(), Loop(net=lambda: fails(0)), Trajectory(BATCHES, 0), 1, "Exact")
    verdict = name_operator(Verdict(Outcome.FAIL, "Exact", "not the same", reproduction=reproduction))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.summary == "not the same; the diverging operator was not found: RuntimeError: no second time"


@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.INCONCLUSIVE])
def test_nothing_is_searched_without_a_failure(outcome):
    reproduction = Reproduction(fails, fails, Trajectory(BATCHES, 0), 1, "Exact")
    verdict = Verdict(outcome, "Exact", "the same", reproduction=reproduction)
    assert name_operator(verdict) is verdict


def test_after_its_time_nothing_is_recorded():
    reproduction = Reproduction(Loop(), Loop(net=Leaky), Trajectory(BATCHES, 0), 1, "Exact")
    assert "no operator" in find_first_operator(reproduction, seconds=0.0)


TENSORS = st.tuples(st.integers(1, 4), st.integers(2, 4), st.integers(2, 4), st.integers(0, 1000))


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.sampled_from(["reshaped", "permuted", "stacked", "joined", "rows", "changed"]), st.integers(0, 2))
def test_a_value_is_found_in_any_arrangement(sizes, arrangement, dimension):
    *shape, seed = sizes
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(shape, generator=generator) for _ in range(2))
    table = ValueTable(0.0)
    for tensor in (first, second):
        table.add(Value.of(tensor))
    arranged = {
        "reshaped": first.reshape(-1),
        "permuted": first.permute(2, 0, 1),
        "stacked": torch.stack([second, first], dimension),
        "joined": torch.cat([first, second], dimension),
        "rows": first[-1:],
        "changed": first + torch.eye(shape[1], shape[2]),
    }[arrangement]
    match = table.find(Value.of(arranged))
    assert (match is None) == (arrangement == "changed")
    if arrangement in ("stacked", "joined"):
        assert sorted(match.pieces) == [0, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(90, 130), st.integers(90, 130), st.data())
def test_a_difference_in_any_column_of_a_large_value_is_found(rows, columns, data):
    generator = torch.Generator().manual_seed(rows)
    tensor = torch.randn(rows, columns, generator=generator)
    table = ValueTable(0.0)
    table.add(Value.of(tensor))
    changed = tensor.clone()
    changed[:, data.draw(st.integers(0, columns - 1))] += 1
    assert table.find(Value.of(tensor))
    assert table.find(Value.of(changed)) is None


@settings(max_examples=50, deadline=None)
@given(st.integers(5, 20), st.integers(1, 6), st.integers(0, 1000))
def test_micro_batches_are_found_also_if_the_last_one_is_smaller(rows, size, seed):
    complete = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    table = ValueTable(0.0)
    table.add(Value.of(complete))
    matches = [table.find(Value.of(part)) for part in complete.split(size)]
    covered = {row for match in matches for row in range(*(match.rows or (0, rows)))}
    assert covered == {*range(rows)}


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(2, 3), st.integers(2, 3), st.permutations(range(3)))
def test_complex_values_are_found_with_their_dimensions_in_any_order(first, second, third, order):
    generator = torch.Generator().manual_seed(first)
    tensor = torch.randn(first, second, third, dtype=torch.complex64, generator=generator)
    table = ValueTable(0.0)
    table.add(Value.of(tensor))
    assert table.find(Value.of(tensor.permute(*order))) is not None
    assert table.find(Value.of(tensor.permute(*order) + 1j)) is None


@pytest.mark.parametrize("count", range(4, 60, 4))
def test_zeros_do_not_consist_of_a_single_zero(count):
    table = ValueTable(0.0)
    for number in (0.0, 1.0, 0.1, 0.2):
        table.add(Value.of(torch.tensor(number)))
    assert table.find(Value.of(torch.zeros(count))) is None
    losses = table.find(Value.of(torch.tensor([0.1, 0.2])))
    assert len(losses.pieces) == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 10**6)), min_size=1, max_size=5))
def test_an_update_in_float64_has_the_seed_that_it_had(seeds):
    """A state may come with a seed, from which updates are counted again."""
    numbers = []

    def build():
        model = nn.Linear(1, 1)
        return Subject(lambda batch: model(batch).detach(), {"model": model}, seed=numbers.append)

    state = {"model": nn.Linear(1, 1).state_dict()}
    updates = [Update(torch.ones(1), None if seed is None else state, seed) for seed in seeds]
    reproduction = Reproduction(build, build, Trajectory(updates, 0), len(updates), "Exact")
    trajectory = reproduction.trajectory
    assert len([*trajectory.updated(trajectory.isolated(build))]) == len(updates)
    single = Trajectory([Update(torch.ones(1), state, seed_of(reproduction))], 0)
    assert len([*single.updated(single.isolated(build))]) == 1
    assert numbers[-1] == numbers[-2]


def test_the_first_update_with_a_difference_is_found_from_a_state():
    batch = BATCHES[0]
    state = saved(Loop()())
    trajectory = Trajectory([Update(batch, state, 3), *map(Update, BATCHES[1:])], 0)
    reproduction = Reproduction(Loop(), Loop(net=Leaky), trajectory, 1, "Exact", last=3)
    assert reproduction.narrowed().update == 1
    assert Reproduction(Loop(), Loop(), trajectory, 1, "Exact", last=3).narrowed().update == 3
