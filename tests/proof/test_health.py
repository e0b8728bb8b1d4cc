"""Gradients, caches, and the verdict on everything together."""

import json

import pytest
import torch
from loops import Loop, Net, batches
from torch import nn

from runner.proof import Close, Exact, Outcome, close, exact, fresh, health, verify

BATCHES = batches(4)


class Detached(Net):
    def forward(self, x):
        self.seen += 1
        return self.head(self.norm(self.hidden(x)).relu().detach())


class Unused(Net):
    """Has a module that no loss uses, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("options", [{"lr": 1e-2}, {"lr": 1e-2, "fused": True}])
def test_gradients_are_seen_also_where_a_step_forgets_them(forgets, options):
    verdict = health(Loop(forgets=forgets, options=options), BATCHES)
    assert verdict.outcome is Outcome.PASS, verdict
    assert "gradients reach all parameters" in str(verdict)


def test_detached_modules_are_named():
    verdict = health(Loop(net=Detached), BATCHES, Loop())
    assert verdict.outcome is Outcome.FAIL
    assert "'model.hidden.weight' receives no gradient; 'model.hidden.bias'" in str(verdict)
    assert "and 1 more:" in str(verdict)
    assert set(verdict.evidence["without_gradient"]) == {
        f"model.{name}" for name in ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias")
    }


def test_what_the_baseline_does_not_train_is_not_held_against_the_change():
    assert health(Loop(net=Unused), BATCHES).outcome is Outcome.FAIL
    verdict = health(Loop(net=Unused), BATCHES, Loop(net=Unused))
    assert verdict.outcome is Outcome.PASS
    assert verify(Loop(net=Unused), Loop(net=Unused), BATCHES, Exact())


@pytest.mark.parametrize(("factor", "reason"), [(0.0, "of zeros alone"), (float("nan"), "that is not finite")])
def test_a_gradient_of_zeros_or_of_no_numbers_is_none(factor, reason):
    verdict = health(Loop(backward=lambda loss: (loss * factor).backward()), BATCHES)
    assert verdict.outcome is Outcome.FAIL
    assert f"'model.head.weight' receives a gradient {reason}" in verdict.summary + str(verdict.evidence).replace(
        "': '", "' "
    )


def test_a_gradient_that_arrives_in_one_update_of_many_is_enough():
    turns = iter([0.0, 0.0, 1.0, 0.0])
    assert health(Loop(backward=lambda loss: (loss * next(turns)).backward()), BATCHES)


def guided(model, x):
    """Adds a share of the model's own prediction, without a gradient."""
    return model(x) + 0.1 * model(x).detach()


def cached():
    """The same, remembering that share for as long as the input is the same."""
    kept = {}

    def forward(model, x):
        prediction, again = model(x), model(x).detach()
        if kept.get("x") is not x:
            kept.update(x=x, share=again)
        return prediction + 0.1 * kept["share"]

    return Loop(forward=forward, named=True)()


@pytest.mark.parametrize("contract", [Exact(), Close()])
def test_a_cache_that_outlives_the_parameters_is_found(contract):
    verdict = fresh(Loop(forward=guided, named=True), cached, BATCHES, contract)
    assert verdict.outcome is Outcome.FAIL
    assert "with the same batch again and other parameters, not the same" in str(verdict)
    assert "update 2, slot 'forward': 'output' differs" in str(verdict)
    assert fresh(Loop(forward=guided), Loop(forward=guided), BATCHES, contract)


def mirrored(reaches):
    """Uses a copy of a weight that is renewed by every step, and by the loading of a state only if that ``reaches``."""

    def build():
        kept = {}

        def forward(model, x):
            weight = model.head.weight.detach() if reaches else kept.setdefault("head", model.head.weight.detach())
            return model(x) + nn.functional.linear(model.hidden(x).detach(), weight)

        subject = Loop(forward=forward, named=True)()
        head = subject.state["model"].head
        subject.state["optimizer"].register_step_post_hook(lambda *_: kept.update(head=head.weight.detach().clone()))
        return subject

    return build


def test_a_copy_that_a_loaded_state_does_not_reach_is_found():
    verdict = fresh(mirrored(True), mirrored(False), BATCHES, Exact())
    assert verdict.outcome is Outcome.FAIL
    assert "update 3, slot 'forward': 'output' differs" in str(verdict)


def test_verify_says_everything_and_names_the_reasons():
    verdict = verify(Loop(), Loop(options={"lr": 1e-2, "fused": True}), BATCHES, Close())
    assert verdict, verdict
    assert "the same algebra" in str(verdict)
    assert "gradients reach all" in str(verdict)
    assert "take effect" in str(verdict)

    wrong = verify(Loop(named=True), Loop(net=Detached, named=True), BATCHES, Exact())
    assert wrong.outcome is Outcome.FAIL
    assert "slot 'backward': 'model.hidden.weight.grad' is missing" in str(wrong)
    assert "'model.hidden.weight' receives no gradient" in str(wrong)
    assert str(wrong).count("not the same bits") == 1
    verdicts = {name: part["verdict"] for name, part in wrong.evidence.items() if "verdict" in part}
    assert verdicts == {"contract": "FAIL", "gradients": "FAIL"}
    json.dumps(wrong.evidence, allow_nan=False)


@pytest.mark.parametrize("contract", [Exact(), Close()])
@pytest.mark.parametrize(
    ("right", "wrong", "update"), [(Loop(forward=guided, named=True), cached, 5), (mirrored(True), mirrored(False), 6)]
)
def test_verify_finds_what_is_stale_although_every_batch_was_new(contract, right, wrong, update):
    judge = exact if contract == Exact() else close
    assert judge(right, wrong, BATCHES)
    verdict = verify(right, wrong, BATCHES, contract)
    assert verdict.outcome is Outcome.FAIL
    assert "with the same batch again and other parameters, not the same" in str(verdict)
    assert f"update {update}, slot 'forward': 'output' differs" in str(verdict)
    assert verify(right, right, BATCHES, contract)


def test_doubt_is_no_pass():
    def noisy(model, x):
        return model(x) + torch.randn_like(x)[:, :1]

    verdict = verify(Loop(forward=noisy), Loop(forward=noisy), BATCHES, Close())
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert not verdict


@pytest.mark.parametrize("judge", [lambda: health(Loop(), []), lambda: fresh(Loop(), Loop(), [], Exact())])
def test_no_batch_is_nothing_to_look_at(judge):
    with pytest.raises(ValueError, match="nothing to compare: no batch"):
        judge()
