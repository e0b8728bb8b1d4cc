"""Gradients of two processes are added up in fewer bytes, and nothing is lost for good."""

import pytest
import torch
from compressed import SHAPES, computed_bytes, gradients_of, sums
from process_pairs import started_pair, tiny_recipe, train

from runner.plugins.stages.compressed_gradients import shared_powers
from runner.training.pipeline import assemble

FORMATS = {"fp16": 2**-11, "bf16": 2**-8}
"""By format, its relative rounding error."""


@pytest.fixture(scope="module")
def pair():
    with started_pair() as pair:
        yield pair


def exact_sums(update, shapes=SHAPES, **options):
    first, second = (gradients_of(rank, update, shapes, **options) for rank in (0, 1))
    return [a + b for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("name", FORMATS)
def test_sums_are_rounded_to_the_format_and_half_as_large(pair, name):
    (first, state, bytes_of_first), (second, _, _) = pair.call(sums, {"format": name}, 3)
    for update, (mine, others) in enumerate(zip(first, second, strict=True)):
        for value, other, expected in zip(mine, others, exact_sums(update), strict=True):
            assert torch.equal(value, other)
            # Each part is rounded, and so is their sum.
            assert float((value - expected).abs().max()) <= 3 * FORMATS[name] * 6
    assert state == {}
    handed, counted, (note,) = bytes_of_first
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES)
    assert handed == counted == 3 * 2 * numbers
    assert "4.0 times fewer" in note  # the gradients here have eight bytes


def test_powersgd_sends_the_bytes_of_its_formula(pair):
    for rank in (1, 2, 5, 64):
        (_, _, (handed, counted, _)), _ = pair.call(sums, {"format": "powersgd", "rank": rank}, 5)
        assert handed == counted == computed_bytes(rank, SHAPES, 5)


def test_powersgd_loses_nothing_of_matrices_with_its_rank(pair):
    shapes = ((24, 30), (40, 18))
    arguments = {"format": "powersgd", "rank": 2}, 5, shapes, 2
    (results, _, _), (others, _, _) = pair.call(sums, *arguments)
    for update, (mine, theirs) in enumerate(zip(results, others, strict=True)):
        for value, other, expected in zip(mine, theirs, exact_sums(update, shapes, rank_of_matrices=2), strict=True):
            assert torch.equal(value, other)
            assert torch.allclose(value, expected, rtol=1e-4, atol=1e-4)


def test_powersgd_sends_later_what_it_has_lost(pair):
    (results, state, _), _ = pair.call(sums, {"format": "powersgd", "rank": 1}, 12)
    sent = [sum(values) for values in zip(*results, strict=True)]
    wanted = [sum(values) for values in zip(*(exact_sums(update) for update in range(12)), strict=True)]
    errors = sum(powers["weight0"]["errors"][0] for powers in state["powers"])
    missing = torch.cat([(a - b).reshape(-1) for a, b in zip(wanted, sent, strict=True)])
    assert float(missing.abs().max()) > 0.1
    assert torch.allclose(missing, errors, atol=1e-9)


@pytest.mark.parametrize("interrupted_after", [1, 2, 3, 6])
def test_a_resumed_training_adds_up_the_same_bits(pair, interrupted_after):
    arguments = {"format": "powersgd", "rank": 2}, 8, SHAPES, None
    expected, _ = pair.call(sums, *arguments)
    resumed, _ = pair.call(sums, *arguments, interrupted_after)
    for whole, parts in zip(expected[0], resumed[0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("changes", [{"rank": 3}, {"format": "fp16"}])
def test_changed_settings_are_applied_at_resume(pair, changes):
    arguments = {"format": "powersgd", "rank": 2}, 8, SHAPES, None, 5, changes
    (results, state, _), (others, _, _) = pair.call(sums, *arguments)
    for value, other, expected in zip(results[-1], others[-1], exact_sums(7), strict=True):
        assert torch.equal(value, other)
        # One that is small is sent as it is.
        assert value.dim() > 1 or torch.allclose(value, expected, rtol=1e-2, atol=1e-2)
    if "rank" in changes:
        assert state["powers"][0]["weight0"]["rank"] == 3


@pytest.mark.parametrize("settings", ["{format: fp16}", "{format: bf16}", "{format: powersgd, rank: 1}"])
@pytest.mark.parametrize("name", ["images", "tokens", "gan"])
def test_learners_of_all_kinds_train_with_it(pair, name, settings):
    plain, _ = pair.call(train, name, (), 4)
    first, second = pair.call(train, name, (f"optimization.compressed_gradients={settings}",), 4)
    for (key, value), other in zip(flat(first).items(), flat(second).values(), strict=True):
        assert torch.equal(value, other), key
    differences = [float((value - flat(plain)[key]).abs().max()) for key, value in flat(first).items()]
    assert max(differences) < 0.2
    # The matrices of the smallest learner would not become smaller.
    assert max(differences) > 0 or (name == "gan" and "powersgd" in settings)


def flat(result):
    return {f"{role}.{name}": value for role, values in result["modules"].items() for name, value in values.items()}


def test_one_process_sends_nothing():
    recipe = tiny_recipe("images", "optimization.compressed_gradients=on")
    (report,) = [each for each in assemble(recipe, []).reports.values() if each.kind == "compressed_gradients"]
    assert (report.active, report.reason) == (False, "one process sends no gradients")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_another_number_of_processes_sends_what_was_lost_later(pair, count):
    (_, state, _), _ = pair.call(sums, {"format": "powersgd", "rank": 1}, 6)
    by_rank = state["powers"]
    shared = shared_powers(by_rank, count)
    assert shared.keys() == by_rank[0].keys()
    for key, power in shared.items():
        assert power["errors"]
        for index, error in power["errors"].items():
            lost = sum(each[key]["errors"][index] for each in by_rank)
            assert torch.allclose(count * error, lost, atol=1e-12)
            assert float(lost.abs().max()) > 0
