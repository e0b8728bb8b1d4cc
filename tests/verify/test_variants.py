from dataclasses import replace
from itertools import combinations

import pytest
import torch
from faces import FakeCatalog, write_recipe
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Exact, StageConfig
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.errors import UsageError
from runner.verify.variants import GROUPS, names, required, usual_stages, variants_of

CPU = torch.device("cpu")


def stage(name, of_phase=1, needs=(), idle=None, refuses_beside=None, is_usual=False):
    class Made(StageConfig):
        kind, phase, requires, usual = name, of_phase, tuple(needs), is_usual
        implementation = "Missing"

        def contract(self, setting):
            return Exact()

        def inactive(self, setting):
            if refuses_beside in setting.stages:
                raise UsageError(f"{name} cannot work beside {refuses_beside}")
            return idle

    return Made()


@pytest.fixture
def recipe(tmp_path):
    base = load(write_recipe(tmp_path), (), FakeCatalog())

    def recipe(*stages):
        return replace(base, stages={each.kind: each for each in sorted(stages, key=lambda s: (s.phase, s.kind))})

    return recipe


def sets(planned):
    return {variant.name: "".join(variant.stages) for variant in planned.variants}


def test_every_kind_of_variant_with_what_is_required(recipe):
    found = variants_of(recipe(stage("a"), stage("b"), stage("c", 2, ("a", "b")), stage("d", 3)), CPU)
    assert sets(found) == {
        "baseline": "",
        "all": "abcd",
        "phase 1": "ab",
        "phases 1-2": "abc",
        "a": "a",
        "b": "b",
        "d": "d",
        "all but a": "bd",
        "all but b": "ad",
        "all but c": "abd",
    }
    assert found.named("all").also == ("phases 1-3",)
    assert found.named("c").name == "phases 1-2"  # alone with what it requires
    assert "all but d" in found.named("phases 1-2").names  # measured once


def test_leaving_one_out_takes_along_what_requires_it(recipe):
    found = variants_of(recipe(stage("a"), stage("b", 2, ("a",)), stage("c", 3, ("b",)), stage("d", 3)), CPU)
    assert found.named("all but a").stages == ("d",)
    assert found.named("all but b").stages == ("a", "d")
    assert found.named("c").stages == ("a", "b", "c")


def test_stages_with_nothing_to_do_are_listed_and_not_measured(recipe):
    found = variants_of(recipe(stage("a"), stage("b", 2, idle="no GPU"), stage("c", 3, ("b",))), CPU)
    assert dict(found.inactive) == {"b": "no GPU", "c": "it requires 'b', which is inactive: no GPU"}
    assert [variant.stages for variant in found.variants] == [(), ("a",)]


def test_sets_that_cannot_be_are_refused_with_the_reason(recipe):
    odd = stage("odd", 3, refuses_beside="a")
    with pytest.raises(UsageError, match="beside a"):
        variants_of(recipe(stage("a"), odd), CPU)  # the recipe as a whole
    fussy = stage("fussy", 3)
    type(fussy).inactive = lambda self, setting: "lonely" if "a" not in setting.stages else None
    found = variants_of(recipe(stage("a"), fussy), CPU)
    assert found.refused == dict.fromkeys(("fussy", "all but a"), "fussy would be inactive: lonely")
    assert found.named("fussy") is None


def test_only_the_groups_that_are_asked_for(recipe):
    stages = recipe(stage("a"), stage("b", 2), stage("c", 3))
    assert set(sets(variants_of(stages, CPU, ["all"]))) == {"baseline", "all"}
    assert set(sets(variants_of(stages, CPU, ["all", "phases"]))) == {"baseline", "all", "phase 1", "phases 1-2"}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_no_set_is_measured_twice_and_every_one_is_closed(phases, wishes):
    kinds = "abcde"[: len(phases)]
    needs = {
        kind: tuple(
            sorted(kinds[i] for j, i in wishes if j == n and i < len(kinds) and (phases[i], i) < (phases[n], n))
        )
        for n, kind in enumerate(kinds)
    }
    made = {kind: stage(kind, phase, needs[kind]) for kind, phase in zip(kinds, phases, strict=True)}
    ordered = {kind: made[kind] for kind in sorted(made, key=lambda kind: (made[kind].phase, kind))}
    found = variants_of(_Stub(ordered), CPU)
    measured = [variant.stages for variant in found.variants]
    assert len(set(measured)) == len(measured)
    assert measured[0] == ()
    for stages in measured:
        assert all(required(ordered, kind) <= set(stages) for kind in stages)
    given_names = [name for variant in found.variants for name in variant.names]
    assert set(given_names) == names(_Stub(ordered))
    for one, other in combinations(found.variants, 2):
        assert set(one.stages) != set(other.stages)
    assert set(GROUPS) == {"alone", "phases", "all", "all_but", "usual"}


class _Stub:
    """A recipe as far as variants look at it."""

    def __init__(self, stages):
        self.stages = stages
        self.model = self.data = self
        self.length = ("updates", 1)


@pytest.mark.parametrize(
    ("usual", "expected"),
    [("", ""), ("a", "a"), ("ab", "ab"), ("abc", "abc"), ("c", "abc")],
)
def test_stages_that_scripts_usually_have_are_a_set_with_what_they_require(usual, expected, recipe):
    stages = [stage(name, needs=needs, is_usual=name in usual) for name, needs in (("a", ()), ("b", ()), ("c", "ab"))]
    found = variants_of(recipe(*stages), CPU)
    assert "".join(usual_stages({each.kind: each for each in stages}, "abc")) == expected
    # A set of its own only if it has several stages.
    variant = found.named("usual")
    assert (variant is None) == (len(expected) < 2)
    assert variant is None or "".join(variant.stages) == expected
    # No set is measured twice.
    measured = [variant.stages for variant in found.variants]
    assert len(set(measured)) == len(measured)


def test_amp_fused_optimizers_and_compilers_are_usual():
    registry = Registry()
    configs = [registry.get("optimization", kind) for kind in registry.kinds("optimization")]
    assert {config.kind for config in configs if config.usual} == {"amp", "compile", "fused_optimizer"}
