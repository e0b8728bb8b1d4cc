import json
import random

import pytest
from ablations import BASE_S, OFF, analysed, case, entries, result, variant_set
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.ablation.analysis import analyse, slope
from runner.ablation.case_log import CaseLog
from runner.proof.ratios import Effect
from runner.system.errors import ExitCode, RunnerError
from runner.verify.variants import BASELINES

CASE = case()
STAGES = ("forward_cache", "merged_critic_loss", "stacked_agents", "fused_optimizer")


@settings(max_examples=10)
@given(st.fixed_dictionaries({stage: st.floats(0.3, 3) for stage in STAGES}))
def test_gains_that_multiply_come_out_as_such(factors):
    found = analysed(CASE, factors)
    product = 1.0
    for gain in found.worth:
        assert gain.alone.value == pytest.approx(factors[gain.stage])
        product *= factors[gain.stage]
    assert found.named("all").ratio.value == pytest.approx(product)
    assert found.interaction.value == pytest.approx(1.0)
    assert found.a_a.value == pytest.approx(1.0)
    assert found.named("all").steady_ms == pytest.approx(1e3 * BASE_S / product)


def test_a_stage_that_others_require_adds_what_is_lost_with_all_of_them():
    factors = {"forward_cache": 2.0, "stacked_agents": 3.0}
    worth = {each.stage: each for each in analysed(CASE, factors).worth}
    assert worth["stacked_agents"].together.value == pytest.approx(3.0)
    assert worth["forward_cache"].together.value == pytest.approx(6.0)  # without it, no stacked_agents


def test_interaction_is_seen():
    own = list(entries(CASE, {"fused_optimizer": 1.5}))
    for entry in own:
        if "update" in entry:
            entry["update"]["all"] *= 1.25
    found = analyse(CASE, variant_set(CASE), CaseLog(own))
    assert found.interaction.value == pytest.approx(0.8)


def test_the_gain_beyond_what_scripts_have_is_that_of_the_other_stages():
    found = analysed(CASE, {"fused_optimizer": 2.0, "stacked_agents": 3.0, "forward_cache": 1.5})
    assert found.beyond_usual.value == pytest.approx(4.5)
    assert found.usual == ("fused_optimizer",)
    # Without other stages there is nothing beyond.
    only = case(sets=(*OFF, *(f"optimization.{kind}=off" for kind in STAGES if kind != "fused_optimizer")))
    assert analysed(only, {"fused_optimizer": 2.0}).beyond_usual is None
    caught = analysed(CASE, {}, caught={"all": "it skips updates"})
    assert caught.beyond_usual is None


def test_break_even_is_where_the_start_up_has_paid():
    found = analysed(CASE, {"fused_optimizer": 2.0}, overhead={"fused_optimizer": 10.0})
    assert found.named("fused_optimizer").break_even_updates == pytest.approx(
        10.0 / BASE_S, abs=1
    )  # half of a step is the update
    assert found.named("forward_cache").break_even_updates is None  # it gains nothing


def test_effects_that_a_a_reaches_are_unclear():
    factors = {"fused_optimizer": 1.05, "stacked_agents": 3.0}
    noisy = analysed(CASE, factors, a_a=1.2)
    assert noisy.named("fused_optimizer").effect is Effect.UNCLEAR
    assert noisy.named("stacked_agents").effect is Effect.FASTER
    assert analysed(CASE, factors).named("fused_optimizer").effect is Effect.FASTER
    assert analysed(CASE, {"stacked_agents": 0.5}).named("stacked_agents").effect is Effect.SLOWER


def test_luck_of_a_process_is_in_the_interval_and_no_effect():
    """No round is noisy here, and yet stages are told from luck by several processes alone."""
    variants = analysed(CASE, {"stacked_agents": 3.0}, lucky=0.03, rounds=18).variants[1:]
    assert {variant.ratio.processes for variant in variants} == {6}
    for variant in variants:
        assert 0.005 < variant.ratio.half_width < 0.2
        assert variant.throughput.ratio.half_width > 0.005
        assert variant.effect is (Effect.FASTER if "stacked_agents" in variant.stages else Effect.UNCLEAR)


def test_what_one_process_says_is_nothing():
    own = list(entries(CASE, {"fused_optimizer": 2.0}))
    for entry in own:
        if "update" in entry and entry["process"] > 1:
            del entry["update"]["fused_optimizer"]
    found = analyse(CASE, variant_set(CASE), CaseLog(own))
    assert found.missing == {"fused_optimizer": "only one process was measured"}
    assert next(gain for gain in found.worth if gain.stage == "fused_optimizer").alone is None
    with pytest.raises(RunnerError, match="no two processes"):
        analyse(CASE, variant_set(CASE), CaseLog([e for e in own if e.get("process", 1) == 1]))


def test_load_in_bursts_favours_nobody():
    """One of five turns takes longer. The median of the ratio to the mean of both baselines would be off by 2.4 %."""
    draw, names = random.Random(0), ("x", *BASELINES)
    met = (draw.randrange(5) for _ in range(20_000))
    updates = ({name: 1.3 if place == turn else 1.0 for place, name in enumerate(names)} for turn in met)
    log = CaseLog([{"process": number // 4, "update": update} for number, update in enumerate(updates)])
    assert log.ratio("x").value == pytest.approx(1.0, abs=0.005)


def test_limit_shares_and_throughput():
    found = analysed(CASE, {"fused_optimizer": 2.0})
    variant = found.named("fused_optimizer")
    assert variant.limit_fraction == pytest.approx(found.limit_ms / variant.steady_ms)
    assert variant.throughput.ratio.value == pytest.approx(2.0)
    assert variant.throughput.shares == pytest.approx(
        {"collect": 0.5, "draw": 0.0, "transfer": 0.0, "update": 0.5, "other": 0.0}
    )


def test_what_was_not_measured_is_missing_with_its_reason():
    own = [entry for entry in entries(CASE, {}) if entry.get("variant") != "all"]
    for entry in own:
        if "update" in entry:
            del entry["update"]["all"]
    own.append({"session": 1, "case": "", "variant": "all", "failed": "memory does not suffice"})
    found = analyse(CASE, variant_set(CASE), CaseLog(own))
    assert found.missing == {"all": "memory does not suffice"}
    assert found.interaction is None
    assert found.named("all") is None


def test_without_a_round_there_is_nothing_to_say():
    with pytest.raises(RunnerError, match="larger budget"):
        analyse(CASE, variant_set(CASE), CaseLog([]))


def test_the_slope_compares_time_with_flop():
    small, large = (case(f"{n} agents", (*OFF, f"data.followers={n - 1}")) for n in (2, 4))
    few, many = analysed(small, {}, agents=2), analysed(large, {"fused_optimizer": 0.5}, agents=4)
    assert slope([few]) is None
    assert slope([few, many]) > 0


def test_exit_codes_and_json():
    clear = {"stacked_agents": 3.0}
    assert result(analysed(CASE, clear)).exit_code is ExitCode.DONE
    assert result(analysed(CASE, {})).exit_code is ExitCode.INCONCLUSIVE
    unproven = analysed(CASE, clear, verdicts={"all": "INCONCLUSIVE"})
    assert result(unproven).exit_code is ExitCode.DONE  # it is the time that was asked for
    failed = result(analysed(CASE, clear, verdicts={"all": "FAIL", "fused_optimizer": "INCONCLUSIVE"}))
    assert failed.exit_code is ExitCode.GATE_FAILED
    data = json.loads(json.dumps(failed.data(), allow_nan=False))
    wanted = {"name", "stages", "ratio", "ci95", "compile_s", "warmup_s", "steady_ms", "peak_memory", "verdict",
              "limit_fraction"}  # fmt: skip
    for variant in data["variants"]:
        assert wanted <= variant.keys()
        assert variant["ci95"][0] <= variant["ratio"] * (1 + 1e-9)
    assert next(v for v in data["variants"] if v["name"] == "all")["verdict"] == "FAIL"


def test_a_variant_that_may_use_16_bits_is_judged_by_their_limit():
    own = case(sets=("optimization.compile=off", "optimization.amp.dtype=bf16"))
    found = analysed(own, {})
    for variant in found.variants:
        rate = found.rates.half_flops["bf16"] if "amp" in variant.stages else found.rates.float32_flops
        limit_s = max(found.cost.least_flop / rate, found.cost.moved_bytes / found.rates.copy_bytes)
        assert variant.limit_fraction == pytest.approx(1e3 * limit_s / variant.steady_ms)
