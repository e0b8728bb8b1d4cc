"""What operations of several processes send, as it is computed."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from process_pairs import PLUGINS, started_pair, tiny_recipe

from runner.distributed.traffic import SentBytes, computed_traffic, received_bytes
from runner.plugins.stages.compressed_gradients import EXACT_UPDATES, bytes_of_powersgd
from runner.training.pipeline import assemble
from runner.training.step import Step

NUMBERS = 2**16
BYTES = 4 * NUMBERS
OPERATIONS = {
    "all_reduce": (2 * BYTES, lambda whole, part: dist.all_reduce(whole)),
    "all_reduce of pairs": (
        2 * BYTES,
        lambda whole, part: dist.all_reduce(torch.view_as_real(whole.view(torch.cfloat))),
    ),
    "broadcast": (BYTES, lambda whole, part: dist.broadcast(whole, 0)),
    "all_gather": (BYTES, lambda whole, part: dist.all_gather([part.clone(), part.clone()], part)),
    "all_gather_single": (BYTES, lambda whole, part: dist.all_gather_single(whole, part)),
    "reduce_scatter_single": (BYTES, lambda whole, part: dist.reduce_scatter_single(part, whole)),
}


@pytest.fixture(scope="module")
def pair():
    with started_pair() as pair:
        yield pair


def sent(group, name):
    """Returns what an operation sends, as computed and as counted."""
    _, operation = OPERATIONS[name]
    whole, part = torch.ones(NUMBERS), torch.ones(NUMBERS // 2)
    with torch.no_grad():
        with computed_traffic(group.count) as traffic:
            operation(whole, part)
        group.gather(None)
        before = received_bytes()
        operation(whole, part)
        group.gather(None)
        after = received_bytes()
    return sum(traffic.sent.values()), traffic.unknown, after - before


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_sends_is_known(pair, name):
    (computed, unknown, counted), _ = pair.call(sent, name)
    assert (computed, unknown) == (OPERATIONS[name][0], set())
    # Other tests may use the interface, too.
    assert counted >= computed


def sent_by_update(group, *sets):
    """Returns what an update of a language model sends, and the shapes of its gradients."""
    step = Step(assemble(tiny_recipe("tokens", *sets), PLUGINS, processes=group))
    # PowerSGD sends the first gradients as they are.
    for _ in range(EXACT_UPDATES + 1):
        step()
    with computed_traffic(group.count) as traffic:
        step()
    shapes = [parameter.shape for _, parameter in step.learner.named_parameters()]
    return sum(traffic.sent.values()), traffic.unknown, shapes


def size(shapes, factor):
    return factor * 4 * sum(shape.numel() for shape in shapes)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ((), partial(size, factor=2)),
        (("optimization.compressed_gradients.format=fp16",), partial(size, factor=1)),
        # Collects parameters twice, and adds up gradients without returning the sums.
        (("optimization.fsdp=on",), partial(size, factor=3)),
        (
            ("optimization.compressed_gradients={format: powersgd, rank: 1}",),
            lambda shapes: 2 * bytes_of_powersgd(shapes, 4, 1),
        ),
    ],
)
def test_an_update_sends_its_gradients_and_little_else(pair, stage, expected):
    (computed, unknown, shapes), _ = pair.call(sent_by_update, *stage)
    assert unknown == set()
    assert 0 <= computed - expected(shapes) < 0.05 * size(shapes, 1) + 2000


def test_an_operation_without_a_rule_is_named():
    traffic = SentBytes(2)
    traffic.add("alltoall_base_", (torch.ones(3),), None)
    traffic.add("barrier", (), None)
    assert (traffic.sent, traffic.unknown) == ({}, {"alltoall_base_"})
