"""Sums of gradients and results, in groups of threads."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.distributed.data_parallel import DataParallel
from runner.distributed.reduction import ResultSums, sum_gradients
from runner.plugin.contract import Mean
from runner.system.errors import RunnerError


class Threads:
    """A group whose processes are threads.

    Args:
        count: Number of threads.
    """

    def __init__(self, count):
        self.count = count
        self._barrier = threading.Barrier(count)
        self._values = [None] * count
        self.local = threading.local()

    def gather(self, value):
        self._values[self.local.rank] = value
        self._barrier.wait(10)
        values = list(self._values)
        self._barrier.wait(10)
        return values

    def sum_in_place(self, tensor):
        tensor.copy_(sum(self.gather(tensor.clone())))

    def run(self, function):
        """Returns the results of a function for each rank."""
        results = [None] * self.count

        def work(rank):
            self.local.rank = rank
            results[rank] = function(rank)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


TYPES = (torch.float32, torch.float64, torch.complex64, torch.bfloat16)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(data=st.data(), count=st.integers(2, 4))
def test_gradients_become_their_sums(data, count):
    sizes = data.draw(st.lists(st.tuples(shapes, st.sampled_from(TYPES), st.integers(0, 2**count - 1)), max_size=5))
    group = Threads(count)

    def gradient(shape, dtype, rank):
        return torch.full(shape, rank + 1.0).to(dtype)

    def work(rank):
        parameters = []
        for shape, dtype, members in sizes:
            parameter = torch.zeros(shape, dtype=dtype, requires_grad=True)
            if members >> rank & 1:
                parameter.grad = gradient(shape, dtype, rank)
            parameters.append(parameter)
        sum_gradients(parameters, group)
        return [parameter.grad for parameter in parameters]

    for gradients in group.run(work):
        for actual, (shape, dtype, members) in zip(gradients, sizes, strict=True):
            ranks = [rank for rank in range(count) if members >> rank & 1]
            # A parameter without a gradient anywhere keeps none, or the optimizer would step it.
            assert (actual is None) == (not ranks)
            if ranks:
                assert torch.equal(actual, sum(gradient(shape, dtype, rank) for rank in ranks))


@given(data=st.data(), count=st.integers(2, 4))
def test_results_are_those_of_the_entire_batch(data, count):
    """Names may differ between processes and updates; sums of integers stay integers."""
    names = ("loss", "accuracy", "rate")
    numbers = st.integers(0, 5)
    update = st.dictionaries(st.sampled_from(names), st.tuples(numbers, numbers), max_size=3)
    updates = data.draw(st.lists(st.lists(update, min_size=count, max_size=count), min_size=1, max_size=3))
    rows = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    group = Threads(count)

    def result(name, value):
        if name == "loss":
            return Mean(torch.tensor(value[0] / 8), torch.tensor(value[1]))
        return Mean(torch.tensor(value[0]), value[1]) if name == "accuracy" else torch.tensor(value[0] / 8)

    def work(rank):
        sums = ResultSums(group, torch.device("cpu"), "Net")
        share = rows[rank] / sum(rows)
        results = []
        for parts in updates:
            output = {name: result(name, value) for name, value in parts[rank].items()}
            results.append(sums.add_up(output, share, [float(rank == 1), 0.0]))
        return results

    for results in group.run(work):
        for (actual, votes), parts in zip(results, updates, strict=True):
            assert votes == [1.0, 0.0]
            assert actual.keys() == {name for part in parts for name in part}
            for name in actual.keys() - {"rate"}:
                values = [part[name] for part in parts if name in part]
                scale = 8 if name == "loss" else 1
                assert float(actual[name].sum) == sum(value[0] for value in values) / scale
                assert float(actual[name].count) == sum(value[1] for value in values)
            if "rate" in actual:
                pairs = [(size, part["rate"][0] / 8) for size, part in zip(rows, parts, strict=True) if "rate" in part]
                weights = sum(size for size, _ in pairs)
                assert float(actual["rate"]) == pytest.approx(sum(size * rate for size, rate in pairs) / weights)


def test_integers_stay_integers():
    group = Threads(2)

    def work(rank):
        output = {"right": Mean(torch.tensor(3), 4), "loss": Mean(torch.tensor(0.5), torch.tensor(2))}
        results, _ = ResultSums(group, torch.device("cpu"), "Net").add_up(output, 0.5, [])
        return results

    for results in group.run(work):
        right = results["right"]
        assert (right.sum.dtype, int(right.sum), type(right.count), right.count) == (torch.int64, 6, int, 8)
        assert (results["loss"].sum.dtype, results["loss"].count.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1, torch.bool), (200, torch.uint8), (100, torch.int8), (60_000.0, torch.float16), (257.0, torch.bfloat16)],
)
def test_sums_of_narrow_types_are_those_of_numbers(value, dtype):
    group = Threads(3)
    number = torch.tensor(value, dtype=dtype)

    def work(rank):
        output = {"mean": Mean(number, number), "scalar": number}
        results, _ = ResultSums(group, torch.device("cpu"), "Net").add_up(output, 1 / 3, [])
        return results

    for results in group.run(work):
        assert [float(total) for total in results["mean"]] == [3 * float(number)] * 2
        assert float(results["scalar"]) == pytest.approx(float(number))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_a_scalar_of_integers_becomes_their_mean(dtype):
    group = Threads(2)

    def work(rank):
        output = {"flag": torch.tensor(rank, dtype=dtype)}
        results, _ = ResultSums(group, torch.device("cpu"), "Net").add_up(output, 0.5, [])
        return float(results["flag"])

    assert group.run(work) == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.int64, torch.float32])
def test_counts_of_all_processes_are_added_up_as_numbers(dtype):
    group = Threads(3)
    count = torch.ones((), dtype=dtype) if dtype is torch.bool else torch.full((), 100, dtype=dtype)

    def work(rank):
        process = SimpleNamespace(group=group, device=torch.device("cpu"))
        return float(DataParallel.total_count(process, count))

    assert group.run(work) == [3 * float(count)] * 3


def test_sparse_gradients_are_refused():
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.zeros(2).to_sparse()
    with pytest.raises(RunnerError, match="sparse gradients"):
        sum_gradients([parameter], Threads(1))
