import json
import math
import statistics as reference

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.train.diagnosis import named_tensors, statistics

SPECIAL = st.sampled_from([math.nan, math.inf, -math.inf])
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@given(st.lists(NUMBERS | SPECIAL, max_size=30))
def test_statistics_are_those_of_the_finite_numbers(numbers):
    found = statistics(torch.tensor(numbers, dtype=torch.float32))
    finite = [number for number in numbers if math.isfinite(number)]
    assert found["shape"] == [len(numbers)]
    assert found["dtype"] == "float32"
    assert found["nan"] == sum(math.isnan(number) for number in numbers)
    assert found["nan"] + found["inf"] + len(finite) == len(numbers)
    if finite:
        assert (found["min"], found["max"]) == (min(finite), max(finite))
        scale = max(map(abs, finite))
        assert found["mean"] == pytest.approx(reference.fmean(finite), abs=1e-12 * scale)
        assert found["std"] == pytest.approx(reference.pstdev(finite), rel=1e-6, abs=1e-12 * scale)
    else:
        assert [found[name] for name in ("min", "max", "mean", "std")] == [None] * 4
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.complex64]
)
def test_every_type_of_number_is_described(dtype):
    found = statistics(torch.tensor([[1, 0], [1, 1]]).to(dtype))
    assert found["dtype"] == str(dtype).removeprefix("torch.")
    assert (found["shape"], found["min"], found["max"], found["nan"]) == ([2, 2], 0, 1, 0)


def test_what_overflows_is_still_json():
    found = statistics(torch.tensor([1e308, 1e308, -1e308], dtype=torch.float64))
    assert (found["max"], found["inf"]) == (1e308, 0)
    assert found["std"] in ("Infinity", "NaN")
    json.dumps(found, allow_nan=False)


def test_a_tensor_that_learns_is_described_and_left_alone():
    tensor = torch.tensor([3.0, -4.0], requires_grad=True)
    assert statistics(tensor)["mean"] == -0.5
    assert tensor.requires_grad
    assert tensor.grad_fn is None


def test_tensors_are_named_by_field_position_or_key():
    tensor = torch.zeros(2)
    step = torch.return_types.max((tensor, tensor))
    assert [name for name, _ in named_tensors(tensor)] == ["output"]
    assert [name for name, _ in named_tensors((tensor, 3, tensor))] == ["output 0", "output 2"]
    assert [name for name, _ in named_tensors({"a": tensor, "b": None})] == ["a"]
    assert [name for name, _ in named_tensors(step)] == ["output 0", "output 1"]
    assert named_tensors(None) == []
