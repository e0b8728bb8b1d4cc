"""States of random generators are compared, also where batches are sampled in advance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Close, Exact
from runner.proof import Outcome, Subject
from runner.proof.isolation import STEP, Location
from runner.verify.generator_states import MOST_IN_ADVANCE, GeneratorStates
from runner.verify.sampling_checks import REHEARSAL, ComparisonLength, same_draws

PLACE = Location(STEP, "output", "generators.replay")


def frame(number):
    return {PLACE: torch.tensor([number])}


@given(lead=st.lists(st.integers(0, MOST_IN_ADVANCE), min_size=1, max_size=30))
def test_a_candidate_may_be_ahead_of_the_baseline(lead):
    states, number = GeneratorStates(), 0
    for update, ahead in enumerate(lead):
        number = max(number, update + ahead)  # a generator never goes back
        assert states.add(update, frame(update), frame(min(number, update + MOST_IN_ADVANCE))) is None


@given(wrong_from=st.integers(0, 20), number=st.integers(1000, 2000))
def test_a_state_that_the_baseline_never_reaches_is_found(wrong_from, number):
    states = GeneratorStates()
    for update in range(wrong_from + MOST_IN_ADVANCE + 1):
        found = states.add(update, frame(update), frame(update if update < wrong_from else number))
        assert (found is not None) == (update == wrong_from + MOST_IN_ADVANCE)


def test_a_candidate_behind_the_baseline_is_found():
    states = GeneratorStates()
    found = [states.add(update, frame(update), frame(update - 1)) for update in range(MOST_IN_ADVANCE + 1)]
    assert found[-1] == PLACE


def test_a_generator_of_the_candidate_alone_is_found():
    states = GeneratorStates()
    found = [states.add(update, {}, frame(update)) for update in range(MOST_IN_ADVANCE + 1)]
    assert found[-1] == PLACE


class Unused:
    """Something with a state that nobody looks at."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def sampling(in_advance=0, extra_numbers=0, further=()):
    """Samples batches of random numbers, some before their update."""

    def build():
        generator = torch.Generator().manual_seed(0)
        batches = []

        def step(request):
            if request is REHEARSAL:
                return {}
            while len(batches) <= in_advance:
                batches.append(torch.rand(4, generator=generator))
            if extra_numbers:
                torch.rand(extra_numbers, generator=generator)
                generator.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            states = dict.fromkeys(("replay", *further), generator.get_state())
            return {"batch": batches.pop(0), "generators": states}

        return Subject(step, {"learner": Unused()})

    return build


@pytest.mark.parametrize("contract", [Exact(), Close()])
@pytest.mark.parametrize("updates", [1, 3, 20])
@pytest.mark.parametrize("in_advance", range(6))
def test_sampling_in_advance_is_the_same(contract, updates, in_advance):
    verdict = same_draws(sampling(), sampling(in_advance), contract, ComparisonLength(updates))
    assert verdict.outcome is Outcome.PASS, verdict.summary


@pytest.mark.parametrize("updates", [1, 3, 20])
def test_a_generator_that_is_used_for_more_is_not(updates):
    verdict = same_draws(sampling(), sampling(extra_numbers=1), Exact(), ComparisonLength(updates))
    assert verdict.outcome is Outcome.FAIL
    assert "generators.replay" in verdict.summary or "'batch'" in verdict.summary


@pytest.mark.parametrize("updates", [1, 3, 20])
def test_a_generator_that_the_baseline_does_not_have_is_found_at_the_end(updates):
    verdict = same_draws(sampling(), sampling(further=("own",)), Exact(), ComparisonLength(updates))
    assert verdict.outcome is Outcome.FAIL
    assert "generators.own" in verdict.summary
