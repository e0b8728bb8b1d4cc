"""Drawing by masses, against cumulative sums in plain Python."""

from bisect import bisect_right
from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugins.marl.replay.block_sums import BLOCK, BlockSums

CPU = torch.device("cpu")
MASSES = st.lists(st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 2**50)), min_size=1, max_size=3 * BLOCK + 5)
EDGES = torch.tensor([0.0, 2.0**-60, 0.5, 1 - 2.0**-50, 1 - 2.0**-53, 1.0], dtype=torch.float64)


def sums_of(masses):
    sums = BlockSums(len(masses), CPU)
    sums.set(torch.arange(len(masses)), torch.tensor(masses))
    return sums


@given(masses=MASSES.filter(any), seed=st.integers(0, 2**32))
def test_the_slot_is_that_of_the_plain_cumulative_sum(masses, seed):
    cumulative = list(accumulate(masses))
    fractions = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    # The same float64 arithmetic, so that both look for the same integer.
    targets = [int(fraction * (1 - 2**-50) * float(cumulative[-1])) for fraction in fractions.tolist()]
    assert sums_of(masses).find(fractions).tolist() == [bisect_right(cumulative, target) for target in targets]


@given(masses=MASSES.filter(any))
def test_no_edge_leads_to_a_slot_without_mass(masses):
    # The fractions at which slots begin and end are where rounding could go wrong.
    ends = torch.tensor(list(accumulate(masses)), dtype=torch.float64) / sum(masses)
    around = [ends, torch.nextafter(ends, torch.zeros(1).double()), torch.nextafter(ends, torch.ones(1).double())]
    slots = sums_of(masses).find(torch.cat([EDGES, *around]))
    assert all(masses[slot] > 0 for slot in slots.tolist())


def test_a_single_unit_is_found_wherever_it_is():
    for slot in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 1):
        masses = [0] * (2 * BLOCK + 2)
        masses[slot] = 1
        assert sums_of(masses).find(EDGES).tolist() == [slot] * len(EDGES)


def test_a_total_next_to_the_limit_is_exact():
    masses = [2**55] * 100
    masses[40] = 2**55 - 1
    sums = sums_of(masses)
    assert sums.find(EDGES).tolist()[-1] == 99
    assert sums._ends[-1].item() == sum(masses)


@given(masses=MASSES, changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 2**50)), max_size=40))
def test_of_several_masses_for_one_slot_the_largest_stays(masses, changes):
    index = [slot % len(masses) for slot, _ in changes]
    sums = sums_of(masses)
    sums.set(torch.tensor(index, dtype=torch.int64), torch.tensor([mass for _, mass in changes], dtype=torch.int64))
    for slot in set(index):
        masses[slot] = max(mass for i, (_, mass) in zip(index, changes, strict=True) if i == slot)
    assert sums.masses[: len(masses)].tolist() == masses
    assert sums._sums.tolist() == [sum(masses[i : i + BLOCK]) for i in range(0, len(masses), BLOCK)]


def test_loading_forgets_what_was_there():
    sums = sums_of([7] * 2 * BLOCK)
    sums.load(torch.tensor([1, 2, 3]))
    assert sums.masses.sum() == 6
    assert sums._sums.tolist() == [6, 0]
