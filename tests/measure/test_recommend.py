from dataclasses import replace

from ablations import OFF, SHARE, analysed, case, variant_set

from runner.measure.recommend import recommend
from runner.measure.report import write_recipe
from runner.plugin.registry import Registry
from runner.recipe.loader import load

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
    assert "no gain that can be told from noise" in none.reasons["fused_optimizer"]
    assert "it requires" in none.reasons["stacked_agents"]


def test_start_up_that_a_training_does_not_make_up_for_counts():
    chosen, _ = recommended({"fused_optimizer": 2.0, "stacked_agents": 3.0}, overhead={"fused_optimizer": 30.0})
    assert "fused_optimizer" not in chosen.stages
    assert chosen.updates == round(8 / SHARE)
    assert "start-up of 30 s is not made up for in 48 updates" in chosen.reasons["fused_optimizer"]


def test_what_nobody_measured_is_off_for_that_reason():
    _, found = recommended(dict.fromkeys(ALL, 2.0))
    bare = replace(found, variants=found.variants[:1], worth=())
    chosen = recommend(CASE, bare, REGISTRY)
    assert chosen.stages == ()
    assert {chosen.reasons[kind] for kind in ALL} == {"nothing with it was measured"}


def test_a_stage_of_which_only_all_was_measured_is_not_called_faster():
    _, found = recommended(dict.fromkeys(ALL, 0.5), PASSED | {"all": "INCONCLUSIVE"})
    with_all = tuple(each for each in found.variants if each.name in ("baseline", "all"))
    worth = tuple(replace(each, alone=None, together=None) for each in found.worth)
    reasons = recommend(CASE, replace(found, variants=with_all, worth=worth), REGISTRY).reasons
    assert reasons["forward_cache"].startswith("nothing but all was measured with it, which is no gain: 0.06x")


def test_a_stage_that_passed_alone_is_not_blamed_for_all():
    factors = {"forward_cache": 2.0, "merged_critic_loss": 0.1, "fused_optimizer": 1.5}
    chosen, _ = recommended(factors, PASSED | {"all": "INCONCLUSIVE"})
    assert "nothing but all" not in chosen.reasons.get("fused_optimizer", "")


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
    assert chosen.reasons["fused_optimizer"] == "faster, but not proven harmless: the gate was not asked"
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
