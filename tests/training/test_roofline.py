import pytest
import torch
from interrupted import flat, same
from running import tiny, train_here
from toy_runs import toy_pipeline, trained

from runner.training import loop, roofline
from runner.training.evaluate import load_model
from runner.training.pipeline import assemble
from runner.training.roofline import Rates, UpdateCost, count_work, measure, optimizer_bytes
from runner.training.step import Step


def test_the_limit_is_what_takes_longer():
    found = UpdateCost.of({"flop": 1_600_913_408, "optimizer_bytes": 0, "least": (1_163_132_928, 43_000_000)})
    fast_memory = Rates(1e11, 2e11, 1e-7, 1e15)
    assert found.limit_s(fast_memory) == pytest.approx(found.least_flop / 2e11)
    assert found.limit_s(Rates(1e11, 2e11, 1e-3, 1e15)) == pytest.approx(found.least_flop / 1e11)  # 2e11 is not float32
    assert found.limit_s(Rates(1e15, 1e15, 1e-7, 1e9)) == pytest.approx(found.moved_bytes / 1e9)


def test_of_other_learners_the_least_known_is_what_the_baseline_does():
    found = UpdateCost.of({"flop": 1000, "optimizer_bytes": 280, "least": None})
    assert (found.least_flop, found.counted_flop, found.moved_bytes) == (1000, 1000, 280)


def test_the_fastest_type_that_stages_may_use_sets_the_limit():
    found = UpdateCost.of({"flop": 10**12, "optimizer_bytes": 1, "least": None})
    rates = Rates(1e11, 1e11, 0.0, 1e15, {"bf16": 8e11, "fp16": 5e10})
    assert found.limit_s(rates) == pytest.approx(10)
    assert found.limit_s(rates, "bf16") == pytest.approx(1.25)
    assert found.limit_s(rates, "fp16") == pytest.approx(10)  # it need not use it
    assert found.limit_s(rates, "something else") == pytest.approx(10)


@pytest.mark.parametrize(
    ("kind", "settings", "tensors"),
    [
        ("Adam", {}, 2 + 1 + 4),
        ("SGD", {}, 2 + 1),
        ("SGD", {"momentum": 0.9}, 2 + 1 + 2),
        ("AdamW", {"amsgrad": True}, 2 + 1 + 6),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_moves_what_it_has(kind, settings, tensors, dtype):
    used, unused = (torch.nn.Parameter(torch.ones(1000, dtype=dtype)) for _ in range(2))
    optimizer = getattr(torch.optim, kind)([used, unused], lr=0.1, **settings)
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert optimizer_bytes([optimizer]) == pytest.approx(tensors * used.nbytes, abs=16)  # and a count of steps


def test_rates_are_measured_and_precision_is_put_back(monkeypatch):
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)
    monkeypatch.setattr(roofline, "_SQUARE", {"cpu": 64})
    monkeypatch.setattr(roofline, "_COPIED_BYTES", 2**16)
    rates = measure(torch.device("cpu"))
    assert min(rates.default_flops, rates.relaxed_flops, rates.copy_bytes) > 0
    assert rates.float32_flops >= rates.default_flops
    assert all(rate > 0 for rate in rates.half_flops.values())
    assert set(rates.half_flops) == ({"bf16"} if torch.cpu.get_capabilities().get("avx512_bf16") else set())
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def every_training_is_measured(monkeypatch):
    monkeypatch.setattr(loop, "LEAST_TIMED_S", 0.0)


@pytest.mark.usefixtures("every_training_is_measured", "migrated_workspace")
@pytest.mark.parametrize("name", ["shakespeare_gpt", "marl_phase1", "gcn_cora"])
def test_a_run_logs_the_share_of_its_roofline(name):
    result = train_here(name)
    # What such small updates take is mostly not computing.
    assert 0 < result.metrics["perf/roofline_fraction"] < 0.9


@pytest.mark.usefixtures("migrated_workspace")
def test_measuring_changes_nothing_that_is_kept(monkeypatch):
    plain = train_here("mlp")
    monkeypatch.setattr(loop, "LEAST_TIMED_S", 0.0)
    measured = train_here("mlp")
    assert "perf/roofline_fraction" not in plain.metrics
    assert 0 < measured.metrics["perf/roofline_fraction"] < 0.9
    one, other = (flat(load_model(result, "last").complete_state()) for result in (plain, measured))
    same([one], [other])


@pytest.mark.usefixtures("every_training_is_measured")
def test_a_training_does_not_fail_of_what_is_raised_in_the_measurement(tmp_path, monkeypatch):
    pipeline = toy_pipeline(tmp_path, "train.updates=4")
    loop_, notes = trained(tmp_path, pipeline)

    def fail(*_):
        raise KeyError("label")

    monkeypatch.setattr(pipeline.learner, "noise", fail)
    loop_.measure_roofline_fraction()
    assert loop_.complete
    assert "perf/roofline_fraction" not in notes.points


def test_compiled_products_are_counted_like_those_that_are_not():
    plain, compiled = (
        count_work(step := Step(assemble(tiny("digits_classifier", f"optimization={stages}"))), step.next())
        for stages in ("{}", "{compile: on}")
    )
    assert plain["flop"] == compiled["flop"] > 0


@pytest.mark.parametrize("name", ["graf", "digits_classifier", "marl_baseline", "shakespeare_gpt"])
def test_work_is_counted_for_learners_of_every_kind(name):
    """A gradient penalty is a gradient with respect to a leaf inside of an update."""
    pipeline = assemble(tiny(name, *([] if name == "graf" else ["train.batch_size=4"])))
    step = Step(pipeline)
    drawn = None
    while drawn is None:
        drawn = step.draw()
    work = count_work(step, drawn)
    assert work["flop"] > 0
    assert work["optimizer_bytes"] > 0


def test_precision_is_put_back_if_a_measurement_fails(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(roofline, "_product", fail)
    with pytest.raises(MemoryError):
        measure(torch.device("cpu"), quick=True)
    assert torch.get_float32_matmul_precision() == "highest"
