"""Losses and metrics of batches in parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Loss, Mean

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def largest(dtype):
    """Returns a number near the largest of a type, in which it is exact."""
    if dtype is torch.bool:
        return 1
    return min(torch.finfo(dtype).max / 2, 2.0**40) if dtype.is_floating_point else torch.iinfo(dtype).max // 2


@given(
    dtype=st.sampled_from([*INTEGERS[:-1], *FLOATS[:-2]]),
    count_dtype=st.sampled_from(INTEGERS),
    parts=st.integers(1, 40),
)
def test_sums_and_counts_of_any_type_are_those_of_numbers(dtype, count_dtype, parts):
    number = torch.tensor(largest(dtype), dtype=dtype)
    count = torch.tensor(1, dtype=count_dtype)
    loss = Loss.total([Loss(number, count, {"metric": Mean(number, count)})] * parts)
    for mean in loss.means().values():
        assert float(mean.sum) == pytest.approx(parts * float(number), rel=1e-6)
        assert int(mean.count) == parts


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_total_has_the_gradient_of_its_parts(dtype):
    number = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    total = Loss.total([Loss(number * number, 1)] * 4)
    total.sum.backward()
    assert number.grad == 24


@pytest.mark.parametrize("sums", [(3, 4), (0.5, 0.25)])
def test_python_numbers_stay_numbers(sums):
    parts = [Loss(torch.tensor(1.0), 2, {"metric": Mean(number, 2)}) for number in sums]
    assert Loss.total(parts).also["metric"] == (sum(sums), 4)
