"""Budgets, signals and failures that end a verification early: what was reached by then is reported."""

import math
import os
import signal
import threading
import time
from contextlib import nullcontext, suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import tiny
from words import MIXED, REGISTRY, words

from runner.child.spawn import Cause, ChildError, may_fork
from runner.proof.verdict import Outcome, Verdict
from runner.system.errors import ExitCode, RunnerError, UsageError
from runner.verify import training_plan as plan_module
from runner.verify import training_pool as trainings_module
from runner.verify.checks.evaluations import EvaluationsCheck
from runner.verify.checks.sampled_batches import SampledBatchesCheck
from runner.verify.checks.updates import UpdatesCheck
from runner.verify.coverage import Coverage
from runner.verify.gate import Gate, verify_recipe
from runner.verify.options import Options
from runner.verify.time_limit import Interrupted, OutOfTime, TimeLimit, interruptible
from runner.verify.training_pool import TrainingOrder, Trainings
from runner.verify.variants import Variant, VariantSet
from runner.verify.verification import _Forecast, judged

FUSED = "optimization.fused_optimizer=on"


def wait():
    while True:
        time.sleep(0.01)


def test_a_limit_ends_what_does_not_return_and_leaves_nothing_behind():
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with pytest.raises(OutOfTime), TimeLimit(60).within(0.05):
        wait()
    assert signal.getsignal(signal.SIGALRM) is handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) is (timer[0] > 0), "another timer goes on"


def test_an_inner_limit_ends_the_inner_part_alone():
    limit, reached = TimeLimit(60), []

    def run():
        with pytest.raises(OutOfTime), limit.within(0.05):
            wait()
        reached.append("after the inner part")
        wait()

    with pytest.raises(OutOfTime), limit.within(1.0):
        run()
    assert reached == ["after the inner part"]


@pytest.mark.parametrize("outer", [0.05, 0.2])
def test_an_outer_limit_ends_a_longer_inner_one_too(outer):
    limit = TimeLimit(60)

    def run():
        with pytest.raises(OutOfTime), limit.within(60):
            wait()
        wait()

    with pytest.raises(OutOfTime), limit.within(outer):
        run()


def test_user_code_that_handles_every_exception_does_not_stop_a_limit():
    def careless():
        while True:
            with suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(OutOfTime), TimeLimit(60).within(0.05):
        careless()


@pytest.mark.parametrize("seconds", [0.0, -1.0, -math.inf])
def test_no_time_is_over_before_anything_begins(seconds):
    with pytest.raises(OutOfTime), TimeLimit(60).within(seconds):
        pytest.fail("it began")


def test_a_limit_in_another_thread_ends_nothing():
    reached = []

    def run():
        with TimeLimit(60).within(0.01):
            time.sleep(0.05)
            reached.append("the end")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert reached == ["the end"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_interrupts_once(number, code):
    before = signal.getsignal(number)

    def run():
        os.kill(os.getpid(), number)
        wait()

    with pytest.raises(Interrupted) as interruption, interruptible():
        run()
    assert interruption.value.exit_code == code
    assert signal.getsignal(number) is before


class Judge:
    """Passes everything, until a signal comes."""

    def __init__(self, until):
        self.until = until

    def __call__(self, stages):
        if stages == self.until:
            raise Interrupted(signal.SIGTERM)
        return Verdict(Outcome.PASS, "Close", "nothing is wrong")

    def idle(self, stages):
        return {}


@pytest.mark.parametrize(
    ("until", "verdicts"),
    [
        (("fused_optimizer",), ["INCONCLUSIVE", "INCONCLUSIVE"]),
        (("fused_optimizer", "heap_retention"), ["PASS", "INCONCLUSIVE"]),
        ((), ["PASS", "PASS"]),
    ],
)
def test_verdicts_that_were_reached_before_a_signal_are_reported(until, verdicts):
    recipe = tiny("digits_classifier", FUSED)
    variants = VariantSet(
        (Variant("fused_optimizer", ("fused_optimizer",)), Variant("all", ("fused_optimizer", "heap_retention"))),
        {},
        {},
    )
    report = judged(recipe, variants, (), Judge(until), lambda _: None)
    assert [row.verdict for row in report.rows] == verdicts
    assert report.exit_code == (ExitCode.TERMINATED if until else ExitCode.DONE)
    assert report.data().get("interrupted") == (143 if until else None)
    assert all("SIGTERM" in row.summary for row in report.rows if row.verdict != "PASS")


@pytest.mark.parametrize(
    ("inactive", "active", "message"),
    [
        ({"amp": "no bf16 here"}, (), r"'amp' \(no bf16 here\); no stage of the recipe is active on this machine"),
        ({"amp": "no bf16 here"}, ("forward_cache",), r"'amp' \(no bf16 here\); choose from: forward_cache"),
        ({}, ("forward_cache", "compile"), r"'amp' \(the recipe does not turn it on\); choose from: forward_cache, "),
    ],
)
def test_a_stage_that_is_not_active_is_named_with_the_reason(inactive, active, message):
    variants = VariantSet(tuple(Variant(kind, (kind,)) for kind in active), inactive, {})
    with pytest.raises(UsageError, match=message):
        judged(tiny("digits_classifier"), variants, ("amp",), Judge(()), lambda _: None)


@pytest.mark.parametrize(
    ("budget", "sets", "reports"),
    [
        (160.0, 9, "the budget of 160 s has room for about 5 of 9 sets of stages; all need about 270 s"),
        (300.0, 9, None),
        (20.0, 3, "the budget of 20 s has room for about 1 of 3 sets of stages; all need about 90 s"),
        (0.0, 9, None),
    ],
)
def test_a_budget_without_room_for_all_sets_is_reported_after_the_first(budget, sets, reports):
    lines = []
    forecast = _Forecast(budget, sets, lines.append)
    for number in range(1, sets + 1):
        forecast.update(number, 30.0 * number)
    assert lines == ([] if reports is None else [reports])


@pytest.mark.parametrize(("seconds", "reports"), [({"amp": 900.0}, 0), ({"fused_optimizer": 900.0}, 1)])
def test_trainings_that_sets_share_are_no_forecast(seconds, reports, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("runner.verify.verification.time.perf_counter", lambda: clock[0])

    class SlowJudge(Judge):
        def __call__(self, stages):
            clock[0] += seconds.get(stages[-1], 1.0)
            return super().__call__(stages)

    recipe = tiny("digits_classifier", FUSED, "optimization.amp=on", "optimization.heap_retention=on")
    sets = [(kind,) for kind in ("fused_optimizer", "amp", "heap_retention")]
    variants = VariantSet(tuple(Variant(stages[0], stages) for stages in sets), {}, {})
    lines = []
    judged(recipe, variants, (), SlowJudge(()), lines.append, budget=1000.0)
    assert sum("has room for about" in line for line in lines) == reports


@given(judged_sets=st.integers(0, 8), more=st.integers(1, 12), budget=st.floats(1.0, 1e4))
def test_a_set_may_take_half_of_the_remaining_budget_at_least(judged_sets, more, budget):
    """A set that is interrupted has spent its time without a verdict."""
    coverage = Coverage(budget)
    sets = [(f"stage{number}",) for number in range(judged_sets + more)]
    for stages in sets[:judged_sets]:
        coverage.begin(stages)
    # The time that is left becomes less while the share is computed.
    left_before = coverage.limit.seconds_left
    share = coverage.share(sets, trained=False)
    assert 0.5 * coverage.limit.seconds_left <= share <= left_before
    if more <= 2:
        assert share >= coverage.limit.seconds_left


def options(**settings):
    return Options(updates=3, horizon=0, **settings)


def test_a_spent_budget_names_what_was_not_begun():
    report = verify_recipe(words(FUSED), REGISTRY, options(budget=1e-6), lambda _: None)
    assert {row.verdict for row in report.rows} == {"INCONCLUSIVE"}
    assert all("not started within the budget" in row.summary for row in report.rows)
    assert report.exit_code is ExitCode.INCONCLUSIVE


RECORDED = ["torch's settings", "declared slots", "process state"]


@pytest.mark.parametrize(
    ("slow", "covered", "missed"),
    [
        (UpdatesCheck, [], "updates, torch's settings"),
        (EvaluationsCheck, ["updates", *RECORDED, "predictions"], "evaluations, sampled batches"),
        (
            SampledBatchesCheck,
            ["updates", *RECORDED, "predictions", "evaluations"],
            "sampled batches, a resumed training",
        ),
    ],
)
def test_what_the_budget_did_not_cover_is_named(monkeypatch, slow, covered, missed):
    gate = Gate(words(FUSED), REGISTRY, options(), lambda _: None)

    def hang(*_):
        with gate.coverage.limit.within(0.01):
            wait()

    for check in gate.checks:
        run = hang if isinstance(check, slow) else lambda pair, _: pair.passed("the same")
        monkeypatch.setattr(check, "run", run)
    verdict = gate(("fused_optimizer",))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.evidence["covered"] == covered
    assert f"not covered within the budget of 3600 s: {missed}" in verdict.summary
    assert "runner verify" not in verdict.summary


@pytest.mark.usefixtures("few_checks")
def test_a_training_that_fails_takes_no_other_verdict_with_it(monkeypatch):
    class Failing(nullcontext):
        def __enter__(self):
            return self

        def receive(self, stop):
            raise ChildError(Cause.FAILED, "the disk is full")

    monkeypatch.setattr(trainings_module, "Child", lambda *_, **__: Failing())
    recipe = words(*MIXED)
    report = verify_recipe(recipe, REGISTRY, options(steps=2, stages=("fused_optimizer", "rounding")), lambda _: None)
    verdicts = {row.name: row for row in report.rows}
    assert verdicts["fused_optimizer"].verdict == "PASS"
    assert verdicts["rounding"].verdict == "INCONCLUSIVE"
    assert "the disk is full" in verdicts["rounding"].summary
    assert report.exit_code is ExitCode.FAILED


@pytest.mark.parametrize(
    ("device", "accelerator", "forks"),
    [
        ("cpu", False, True),
        ("auto", False, True),
        ("auto", True, False),
        ("cuda", True, False),
        ("cuda:1", False, False),
        ("cpu", True, False),
    ],
)
def test_a_training_is_a_copy_of_a_process_only_without_an_accelerator(monkeypatch, device, accelerator, forks):
    assert may_fork(device, accelerator) is forks
    started = []

    def child(*_, **settings):
        started.append(settings)
        raise ChildError(Cause.FAILED, "not now")

    monkeypatch.setattr(trainings_module, "Child", child)
    monkeypatch.setattr(plan_module, "resolve_device", lambda name: torch.device("cuda" if "cuda" in name else "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: accelerator)
    monkeypatch.setattr(plan_module, "free_memory", lambda device: 2**40)
    recipe = tiny("digits_classifier", f"device={device}")
    trainings = Gate(recipe, REGISTRY, options(), lambda _: None).plan.trainings
    with pytest.raises(RunnerError, match="not now"):
        trainings.run([TrainingOrder({"seed": 1, "train": {}})], [1], 2)
    assert started[0]["forked"] is forks
    assert not started[0]["compiles"]
    assert isinstance(trainings, Trainings)
