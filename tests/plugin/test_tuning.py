import json

import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from runner.plugin.tuning import Tuning, machine_refusal, parse_tuning
from runner.system.tuning_machine import machine_differences, tuning_machine

MACHINE = {"cpu": "one", "threads": 2, "torch": "2.13.0"}
KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.text("abc", max_size=4) | st.floats(-1e6, 1e6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
CHOICES = st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), min_size=1, max_size=3)


def tuning_with(choices, **options):
    tuning = Tuning(dict(MACHINE), **options)
    for kind, of_stage in choices.items():
        for key, value in of_stage.items():
            tuning.of(kind).record(key, value)
    return tuning


@profile(max_examples=60)
@given(CHOICES)
def test_choices_survive_json_and_another_pipeline(choices):
    data = json.loads(json.dumps(tuning_with(choices).data()))
    setup = parse_tuning(data)
    assert (setup.machine, setup.choices) == (MACHINE, choices)
    locked = Tuning(dict(MACHINE))
    locked.lock(setup.choices)
    restored = Tuning(dict(MACHINE))
    restored.restore(data)
    assert locked.data() == restored.data() == data
    for kind, of_stage in choices.items():
        assert locked.of(kind).items() == of_stage


FORMS = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


@profile(max_examples=60)
@given(FORMS, st.sampled_from(["all", "machine", "choices", "stage"]))
def test_other_forms_are_refused(value, place):
    values = tuning_with({"compile": {"a": 1}}).data()
    broken = {
        "all": value,
        "machine": values | {"machine": value},
        "choices": values | {"choices": value},
        "stage": values | {"choices": {"compile": value}},
    }
    with pytest.raises(ValueError, match="should be a mapping"):
        parse_tuning(broken[place])


def test_a_choice_is_searched_once():
    choices = Tuning(dict(MACHINE)).of("compile")
    searches = []
    selected = [choices.select("key", lambda: searches.append(1) or len(searches)) for _ in range(5)]
    assert selected == [1] * 5
    assert choices.select("other", lambda: 7) == 7


def test_choices_of_one_stage_are_not_those_of_another():
    tuning = tuning_with({"compile": {"key": 1}})
    assert tuning.of("cuda_graph").get("key") is None
    assert tuning.of("compile").get("key") == 1


def test_a_lock_wins_over_a_checkpoint_and_a_checkpoint_over_a_search():
    saved = tuning_with({"compile": {"a": 1, "b": 2}}).data()
    locked = Tuning(dict(MACHINE))
    locked.lock({"compile": {"a": 10}})
    locked.restore(saved)
    assert locked.of("compile").items() == {"a": 10, "b": 2}
    searched = tuning_with({"compile": {"a": 5}})
    searched.restore(saved)
    assert searched.of("compile").items() == {"a": 1, "b": 2}


def test_who_searches_again_keeps_only_what_cannot_change():
    saved = tuning_with({"compile": {"a": 1}, "batch_autotune": {"batch_size": 64}}).data()
    fresh = Tuning(dict(MACHINE), is_fresh=True)
    fresh.restore(saved, frozenset({"batch_autotune"}))
    assert fresh.of("compile").items() == {}
    assert fresh.of("batch_autotune").items() == {"batch_size": 64}


@pytest.mark.parametrize("name", MACHINE)
def test_choices_of_another_machine_are_refused_with_the_difference(name):
    setup = parse_tuning(tuning_with({"compile": {"a": 1}}).data())
    assert machine_refusal(setup, MACHINE, "lock") is None
    other = MACHINE | {name: "another"}
    refusal = machine_refusal(setup, other, "lock")
    assert "\n" not in refusal
    for text in ("compile", f"{name} {MACHINE[name]}, here another", "--retune"):
        assert text in refusal
    restored = Tuning(other)
    restored.restore(tuning_with({"compile": {"a": 1}}).data())
    assert restored.data() == {}


@profile(max_examples=60)
@given(st.dictionaries(KEYS, st.integers(0, 3), max_size=5), st.dictionaries(KEYS, st.integers(0, 3), max_size=5))
def test_machines_differ_exactly_where_their_values_do(recorded, present):
    differences = machine_differences(recorded, present)
    names = {name for name in recorded.keys() | present.keys() if recorded.get(name) != present.get(name)}
    assert len(differences) == len(names)
    assert bool(differences) == (recorded != present)


def test_a_machine_knows_threads_device_and_versions():
    machine = tuning_machine(torch.device("cpu"))
    assert machine["threads"] == torch.get_num_threads()
    assert machine["device"] == "cpu"
    assert machine["torch"].startswith(torch.__version__.split("+")[0])
    assert json.loads(json.dumps(machine)) == machine


def test_a_commit_passes_all_choices_once():
    tuning = tuning_with({"compile": {"a": 1}})
    stored = []
    tuning.listen(stored.append)
    tuning.commit()
    tuning.commit()
    assert stored == [tuning.data()]
    tuning.of("compile").record("b", 2)
    tuning.commit()
    assert len(stored) == 2
