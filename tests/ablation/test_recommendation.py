import random
import re
from dataclasses import replace

import pytest
from ablations import BASE_S, OFF, SHARE, analysed, case, entries, result, variant_set
from canvases import kept

from runner.ablation.ablation_plots import draw
from runner.ablation.analysis import analyse
from runner.ablation.case_log import CaseLog
from runner.ablation.recommendation import recommend
from runner.ablation.report import summary, write_recipe
from runner.plugin.registry import Registry
from runner.proof.ratios import noise_factor
from runner.recipe.loader import load
from runner.system.errors import ExitCode

REGISTRY = Registry()
CASE = case()
ALL = {"forward_cache", "merged_critic_loss", "stacked_agents", "fused_optimizer"}


PASSED = {variant.name: "PASS" for variant in variant_set(CASE).variants if variant.stages}


def recommended(factors, verdicts=PASSED, **settings):
    found = analysed(CASE, factors, verdicts=verdicts, **settings)
    return recommend(CASE, found, REGISTRY), found


def test_the_fastest_is_recommended_with_a_reason_for_every_stage_that_is_off():
    chosen, _ = recommended(dict.fromkeys(ALL, 2.0))
    assert set(chosen.stages) == ALL
    assert set(chosen.reasons) == {"async_transfer", "cuda_graph"}
    assert chosen.reasons["cuda_graph"] == "inactive here: CUDA graphs need a CUDA device"
    assert chosen.seconds < chosen.baseline_seconds


def test_a_stage_without_gain_is_off_and_a_slower_one_too():
    chosen, _ = recommended({"stacked_agents": 3.0, "fused_optimizer": 0.5})
    assert set(chosen.stages) == ALL - {"fused_optimizer"}
    assert chosen.reasons["fused_optimizer"].startswith("slower: 0.50x")
    none, _ = recommended({})
    assert none.stages == ()
    assert "no gain beyond the noise" in none.reasons["fused_optimizer"]
    assert "it requires" in none.reasons["stacked_agents"]


def test_start_up_that_a_training_does_not_make_up_for_counts():
    chosen, _ = recommended({"fused_optimizer": 2.0, "stacked_agents": 3.0}, overhead={"fused_optimizer": 30.0})
    assert "fused_optimizer" not in chosen.stages
    assert chosen.updates == round(8 / SHARE)
    assert "it starts 30 s later, and 48 updates save only 0.2 s of that" in chosen.reasons["fused_optimizer"]


def test_what_nobody_measured_is_off_for_that_reason():
    _, found = recommended(dict.fromkeys(ALL, 2.0))
    bare = replace(found, variants=found.variants[:1], worth=())
    chosen = recommend(CASE, bare, REGISTRY)
    assert chosen.stages == ()
    assert {chosen.reasons[kind] for kind in ALL} == {"no set of stages with it was measured"}


def test_a_stage_of_which_only_all_was_measured_is_not_called_faster():
    _, found = recommended(dict.fromkeys(ALL, 0.5), PASSED | {"all": "INCONCLUSIVE"})
    with_all = tuple(each for each in found.variants if each.name in ("baseline", "all"))
    worth = tuple(replace(each, alone=None, together=None) for each in found.worth)
    reasons = recommend(CASE, replace(found, variants=with_all, worth=worth), REGISTRY).reasons
    assert reasons["forward_cache"].startswith("only all was measured with it, which is not faster: 0.06x")


def test_a_stage_that_passed_alone_is_not_blamed_for_all():
    factors = {"forward_cache": 2.0, "merged_critic_loss": 0.1, "fused_optimizer": 1.5}
    chosen, _ = recommended(factors, PASSED | {"all": "INCONCLUSIVE"})
    assert "was measured with it" not in chosen.reasons.get("fused_optimizer", "")


def test_a_stage_that_passed_alone_is_not_called_unproven_because_all_is():
    factors = {"stacked_agents": 3.0, "fused_optimizer": 1.2}
    verdicts = {"fused_optimizer": "PASS", "phases 1-2": "PASS", "all": "INCONCLUSIVE"}
    chosen, _ = recommended(factors, verdicts)
    assert chosen.variant == "phases 1-2"
    assert chosen.reasons["fused_optimizer"].startswith("a training takes longer with it (fused_optimizer: ")


def test_what_the_gate_failed_is_never_recommended():
    chosen, _ = recommended(dict.fromkeys(ALL, 2.0), PASSED | {"all": "FAIL", "fused_optimizer": "FAIL"})
    assert "fused_optimizer" not in chosen.stages
    assert chosen.reasons["fused_optimizer"].startswith("the gate failed: fused_optimizer fails in critic_step")


def test_the_file_is_a_recipe_with_exactly_these_stages(tmp_path):
    sets = (*OFF, "data.followers=1", "optimization.batch_autotune=off")
    given = case("few", sets)
    found = analysed(given, {"stacked_agents": 3.0, "fused_optimizer": 0.5}, verdicts=PASSED)
    chosen = recommend(given, found, REGISTRY)
    path = tmp_path / "deep" / "recommended.yaml"
    path.parent.mkdir()
    write_recipe(chosen, given, found, path)
    loaded = load(path, (), Registry())
    assert set(loaded.stages) == set(chosen.stages)
    assert loaded.data.followers == 1
    text = path.read_text()
    assert "  fused_optimizer: off  # slower: 0.50x" in text


def test_settings_of_a_stage_are_kept(tmp_path):
    given = case(sets=("optimization.fused_optimizer=off", "optimization.compile=off", "optimization.amp.dtype=bf16"))
    passed = {variant.name: "PASS" for variant in variant_set(given).variants if variant.stages}
    found = analysed(given, {"amp": 2.0, "stacked_agents": 2.0, "float32_matmul": 2.0}, verdicts=passed)
    chosen = recommend(given, found, REGISTRY)
    write_recipe(chosen, given, found, tmp_path / "recommended.yaml")
    loaded = load(tmp_path / "recommended.yaml", (), Registry())
    for kind in chosen.stages:
        assert loaded.stages[kind].model_dump() == given.recipe.stages[kind].model_dump()


def test_what_is_faster_but_not_passed_is_listed_with_the_command_that_proves_it():
    without = {name: "PASS" for name in PASSED if name != "fused_optimizer" and "all but" not in name}
    chosen, _ = recommended(dict.fromkeys(ALL, 2.0), without | {"all": "INCONCLUSIVE", "phases 1-2": "PASS"})
    assert chosen.variant == "phases 1-2"
    assert chosen.reasons["fused_optimizer"] == "faster, but not proven harmless: the gate has not judged it"
    (whole,) = chosen.unproven
    assert (whole.variant, whole.verdict, set(whole.stages)) == ("all", "INCONCLUSIVE", ALL)
    assert whole.seconds < chosen.seconds
    offs = " ".join(f"--set {assignment}" for assignment in OFF)
    assert whole.command.startswith("runner verify marl_phase3 ")
    assert whole.command.endswith(f" {offs} --stage all")


def test_nothing_is_used_that_nobody_has_judged():
    chosen, _ = recommended(dict.fromkeys(ALL, 2.0), {})
    assert chosen.stages == ()
    assert chosen.unproven[0].variant == "all"
    assert chosen.unproven[0].verdict is None
    seconds = [each.seconds for each in chosen.unproven]
    assert seconds == sorted(seconds)
    commands = {each.variant: each.command for each in chosen.unproven}
    assert commands["fused_optimizer"].endswith("--stage fused_optimizer")
    assert commands["phase 1"].endswith("stacked_agents=off --set optimization.fused_optimizer=off --stage all")


def test_what_cannot_be_told_from_the_recommended_is_not_listed():
    chosen, _ = recommended({"stacked_agents": 3.0}, {"phases 1-2": "PASS"}, a_a=1.02)
    assert chosen.variant == "phases 1-2"
    assert chosen.unproven == ()


@pytest.mark.parametrize(("sampling", "used"), [(0.0, True), (BASE_S, True), (100 * BASE_S, False)])
def test_what_is_recommended_makes_the_whole_training_faster(sampling, used):
    """An update of half the time saves a half of a training, a quarter, or a two-hundredth."""
    chosen, found = recommended({"fused_optimizer": 2.0}, sampling=sampling, noise=0.02, a_a=1.02)
    assert found.named("fused_optimizer").ratio.value == pytest.approx(2.0, rel=0.1)
    assert ("fused_optimizer" in chosen.stages) is used
    expected = chosen.updates * (sampling + BASE_S * (0.5 if used else 1.0))
    assert chosen.seconds == pytest.approx(expected, rel=0.1)
    assert chosen.baseline_seconds == pytest.approx(chosen.updates * (sampling + BASE_S), rel=0.1)
    if not used:
        pattern = r"but a training step is unclear, (0\.9|1\.0).*; updates are 1% of its time"
        assert re.search(pattern, chosen.reasons["fused_optimizer"])


def test_a_stage_that_makes_sampling_slower_is_not_recommended_for_its_update():
    """Complete training steps are compared: what an update saves is lost elsewhere."""
    log = list(entries(CASE, {"fused_optimizer": 1.5}, verdicts=PASSED, sampling=BASE_S))
    stages = {variant.name: variant.stages for variant in variant_set(CASE).variants}
    for entry in log:
        for name, trained in entry.get("train", {}).items():
            if "fused_optimizer" in stages.get(name, ()):
                trained["seconds"] += 8 * BASE_S
    found = analyse(CASE, variant_set(CASE), CaseLog(log))
    chosen = recommend(CASE, found, REGISTRY)
    assert found.named("fused_optimizer").effect == "faster"
    assert found.named("fused_optimizer").throughput.effect == "slower"
    assert "fused_optimizer" not in chosen.stages
    reason = chosen.reasons["fused_optimizer"]
    assert "but a training step is slower, 0.75x" in reason
    assert reason.endswith("; updates are 25% of its time")


@pytest.mark.parametrize("verdict", ["PASS", "INCONCLUSIVE", None])
def test_what_does_not_do_the_baselines_work_is_neither_recommended_nor_listed(verdict):
    verdicts = {name: outcome for name, outcome in PASSED.items() if name != "fused_optimizer"}
    verdicts |= {} if verdict is None else {"fused_optimizer": verdict}
    said = "'modules model.weight' did not change in 6 of 13 updates"
    with_it = [each.name for each in variant_set(CASE).variants if "fused_optimizer" in each.stages]
    caught = dict.fromkeys(with_it, said)
    chosen, found = recommended({"fused_optimizer": 634.0}, verdicts, caught=caught)
    fake = found.named("fused_optimizer")
    assert fake.effect == "invalid"
    assert fake.shown_ratio == "-"
    assert "fused_optimizer" not in chosen.stages
    assert all("fused_optimizer" not in each.stages for each in chosen.unproven)
    assert chosen.reasons["fused_optimizer"].startswith("it does not do the baseline's work: 'modules model.weight'")
    assert result(found).exit_code is ExitCode.GATE_FAILED
    rows = {row["name"]: row for row in result(found).data()["variants"]}
    assert rows["fused_optimizer"]["ratio"] is None
    assert "634" not in summary(result(found))
    assert "fused_optimizer has no ratio, because it does not do the baseline's work" in summary(result(found))


def test_a_set_whose_updates_are_unclear_is_recommended_only_for_its_training_steps(tmp_path, monkeypatch):
    """A stage that speeds up sampling leaves an update as it is."""
    log = list(entries(CASE, {}, verdicts=PASSED, sampling=BASE_S, noise=0.001, a_a=1.01))
    stages = {variant.name: variant.stages for variant in variant_set(CASE).variants}
    for entry in log:
        for name, trained in entry.get("train", {}).items():
            if "fused_optimizer" in stages.get(name, ()):
                trained["seconds"] /= 2
    found = analyse(CASE, variant_set(CASE), CaseLog(log))
    chosen = recommend(CASE, found, REGISTRY)
    used = found.named(chosen.variant)
    assert "fused_optimizer" in chosen.stages
    assert (used.effect, used.training_effect) == ("unclear", "faster")
    assert f"(updates alone are unclear: {used.ratio})" in str(chosen)
    whole = result(found, recommendations=(chosen,))
    assert whole.exit_code is ExitCode.DONE
    row = next(line for line in summary(whole).splitlines() if line.startswith("| fused_optimizer |"))
    assert "| unclear |" in row
    assert f"{found.named('fused_optimizer').training_ratio} faster" in row

    figures = kept(monkeypatch)
    draw(whole, tmp_path)
    updates, steps = figures["ratios"].axes
    assert "recommended" in [text.get_text() for text in steps.texts]
    assert "recommended" not in [text.get_text() for text in updates.texts]
    assert [line for line in updates.lines if line.get_label() == "faster"] == []
    assert [line for line in steps.lines if line.get_label() == "faster"] != []


@pytest.mark.parametrize("number", range(50))
def test_recommendation_and_reasons_agree_with_the_measured_numbers(number):
    """Random speeds, start-ups and verdicts: every statement follows from the numbers beside it."""
    rng = random.Random(number)
    factors = {kind: rng.choice((0.7, 0.98, 1.0, 1.03, 1.5, 3.0)) for kind in ALL}
    overhead = {kind: rng.choice((0.0, 0.01, 0.3, 40.0)) for kind in ALL}
    verdicts = {name: rng.choice(("PASS", "PASS", "INCONCLUSIVE", "FAIL")) for name in PASSED}
    chosen, found = recommended(factors, verdicts, overhead=overhead, noise=0.01, a_a=rng.choice((1.0, 1.02, 1.1)))
    text = str(chosen)
    assert f"Rule: {chosen.rule}." in text
    used = found.named(chosen.variant)
    assert used.verdict == "PASS" or not chosen.stages
    if chosen.stages:
        assert chosen.seconds < chosen.baseline_seconds
        assert f"{1 - chosen.seconds / chosen.baseline_seconds:.0%}) less than without stages" in text
        assert used.training_effect == "faster"
        noise = noise_factor(found.training_a_a)
        assert f"training steps are faster: {used.training_ratio}, noise {noise:.2f}x" in text
        assert (f"(updates alone are {used.effect}: {used.ratio})" in text) is (used.effect != "faster")
    for kind, reason in chosen.reasons.items():
        assert kind not in chosen.stages
        if match := re.search(r"it starts ([\d.]+) s later", reason):
            extra = [v.overhead_s - used.overhead_s for v in found.variants if kind in v.stages]
            assert any(abs(float(match[1]) - value) < 0.51 for value in extra)
        assert "A/A" not in reason
    band = noise_factor(found.training_a_a)
    for variant in found.variants:
        if variant.training_effect == "faster":
            assert variant.training_ratio.value > band
