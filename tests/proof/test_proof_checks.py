"""The checks of ``runner.proof``: their list, the loop that runs them, and the verdict that it makes of theirs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from runner.plugin.check import PairCheck
from runner.proof import Close, Exact, Outcome, Subject, Verdict, checks, worst
from runner.proof.checks import CHECKS
from runner.proof.subject_pair import SubjectCheck, SubjectPair
from runner.proof.verify_subjects import compare
from runner.verify.checks import CHECKS as GATE_CHECKS


def build(factor=1.0):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        loss = factor * model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Subject(step, {"model": model, "optimizer": optimizer})


BATCHES = [torch.ones(2, 3) * number for number in (1.0, 2.0)]


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_has_a_question_examples_and_a_cost(check):
    assert check.question.endswith("?")
    assert check.name == check.name.lower()
    assert len(check.catches.split()) > 4
    for contract in (Exact(), Close()):
        assert check().cost(SubjectPair(build, build, BATCHES, contract))


def test_the_gate_and_the_library_share_the_interface_of_checks():
    assert all(issubclass(check, PairCheck) for check in (*CHECKS, *GATE_CHECKS))
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("contract", [Exact(), Close()])
def test_all_checks_of_an_equal_change_run_in_their_order(contract, monkeypatch):
    names = []
    for check in CHECKS:

        def run(self, *inputs, original=check.run):
            names.append(self.name)
            return original(self, *inputs)

        monkeypatch.setattr(check, "run", run)
    assert compare(build, build, BATCHES, contract)
    pair = SubjectPair(build, build, BATCHES, contract)
    assert names == [check.name for check in CHECKS if check().applies(pair)]


def test_after_a_different_step_only_what_it_has_recorded_is_judged(monkeypatch):
    for check in CHECKS[1:4]:
        monkeypatch.setattr(check, "run", None)
    verdict = compare(build, lambda: build(1.1), BATCHES, Exact())
    assert verdict.outcome is Outcome.FAIL
    assert verdict.evidence["gradients"]["verdict"] == "PASS"


def make_check(number, outcome, judges):
    """Returns a check with that verdict; one of the contract runs only after others have passed."""

    class Given(SubjectCheck):
        name = f"check {number}"
        judges_contract = judges

        def applies(self, pair):
            return pair.is_kept or not judges

        def cost(self, pair):
            return "nothing"

        def run(self, pair, budget):
            return Verdict(outcome, pair.promise_name, f"reason {number}", {f"key {number}": number})

    return Given


OUTCOMES = st.sampled_from(Outcome)


@settings(max_examples=100, deadline=None)
@given(contract=st.lists(OUTCOMES, min_size=1, max_size=4), others=st.lists(OUTCOMES, max_size=3))
def test_the_worst_check_decides_and_only_the_worst_are_named(contract, others):
    count = len(contract)
    run = next((i + 1 for i, outcome in enumerate(contract) if outcome is not Outcome.PASS), count)
    given_checks = [make_check(i, outcome, judges=True) for i, outcome in enumerate(contract)]
    given_checks += [make_check(count + i, outcome, judges=False) for i, outcome in enumerate(others)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "CHECKS", tuple(given_checks))
        verdict = compare(build, build, BATCHES, Exact())

    decisive = 0 if contract[run - 1] is Outcome.PASS else run - 1
    outcomes = {decisive: contract[decisive], **{count + i: outcome for i, outcome in enumerate(others)}}
    assert verdict.outcome is worst(outcomes.values())
    named = [f"reason {i}" for i, outcome in outcomes.items() if outcome is verdict.outcome]
    assert verdict.summary.split("; ")[: len(named)] == named
    assert [f"key {i}" in verdict.evidence["contract"] for i in range(count)] == [i < run for i in range(count)]
    assert all(f"check {count + i}" in verdict.evidence for i in range(len(others)))
