import pytest
import torch

from runner.measure import limit
from runner.measure.limit import Rates, least_cost, measure


def test_the_limit_is_what_takes_longer():
    found = least_cost({"flop": 1_600_913_408, "parameters": 891_932, "least": (1_163_132_928, 43_000_000)})
    fast_memory = Rates(1e11, 2e11, 1e-7, 1e15)
    assert found.limit_s(fast_memory) == pytest.approx(found.least_flop / 2e11)
    assert found.limit_s(Rates(1e11, 2e11, 1e-3, 1e15)) == pytest.approx(found.least_flop / 1e11)  # 2e11 is not float32
    assert found.limit_s(Rates(1e15, 1e15, 1e-7, 1e9)) == pytest.approx(found.moved_bytes / 1e9)


def test_of_other_learners_the_least_known_is_what_the_baseline_does():
    found = least_cost({"flop": 1000, "parameters": 10, "least": None})
    assert (found.least_flop, found.counted_flop, found.moved_bytes) == (1000, 1000, 280)


def test_rates_are_measured_and_precision_is_put_back(monkeypatch):
    monkeypatch.setattr(limit, "SECONDS", 1e-4)
    monkeypatch.setattr(limit, "_SQUARE", {"cpu": 64})
    monkeypatch.setattr(limit, "_COPIED_BYTES", 2**16)
    rates = measure(torch.device("cpu"))
    assert min(rates.default_flops, rates.relaxed_flops, rates.copy_bytes) > 0
    assert rates.float32_flops >= rates.default_flops
    assert torch.get_float32_matmul_precision() == "highest"
