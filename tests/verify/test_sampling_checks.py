"""What is drawn for updates is the same, but for what rounding leads to."""

import pytest
import torch

from runner.api import Close, Exact
from runner.proof import Outcome, Subject
from runner.verify.sampling_checks import CHECKPOINT, REHEARSAL, ComparisonLength, same_draws, same_when_resumed
from runner.verify.unexercised import NOT_EXERCISED

FEW, MANY = 1, 10  # of forty elements


class Own:
    """Something with a state that nobody looks at."""

    def __init__(self):
        self.loaded = 0

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.loaded += 1


def drawing(other=lambda update: 0, *, counts=lambda update: update, knows=True, source=None):
    """Makes subjects in whose updates that many elements of the batch are others."""

    def build():
        updates = 0

        def draw(asked):
            nonlocal updates
            if asked is REHEARSAL:
                return {}
            updates += 1
            batch = torch.arange(1.0, 41.0)
            batch[: other(updates)] += 20
            return {"progress": {"steps": counts(updates)}, "batch": batch, "output": {"loss": batch.mean()}}

        own = source or Own()
        return Subject(draw, {"learner": Own(), "pipeline": own} if knows else {"learner": Own()})

    return build


@pytest.mark.parametrize("knows", [False, True])
def test_the_same_is_drawn(knows):
    verdict = same_draws(drawing(knows=knows), drawing(knows=knows), Close(), ComparisonLength(5, 20, 60.0))
    assert verdict.outcome is Outcome.PASS
    assert verdict.evidence == {"drawn": 20}


def test_a_source_that_depends_on_learner_may_be_led_elsewhere_once_and_less_is_excluded_then():
    source, changed = Own(), (lambda update: FEW if update == 5 else MANY if update == 15 else 0)
    verdict = same_draws(drawing(), drawing(changed, source=source), Close(), ComparisonLength(4, 20, 60.0))
    assert verdict.outcome is Outcome.PASS
    assert verdict.evidence == {"drawn": 9}  # 20 * 3.00 / 6.30: the upper ends of no event and of two (Poisson, 95 %)
    assert source.loaded == 2


@pytest.mark.parametrize(
    ("changed", "update"),
    [
        (lambda update: FEW * (update > 3), 16),  # four times, between which it was given what the baseline has
        (lambda update: MANY * (update == 4), 4),  # early
        (lambda update: MANY * (update in (10, 12)), 12),  # at once again
    ],
)
def test_it_may_not_be_led_elsewhere_often_nor_at_once(changed, update):
    verdict = same_draws(drawing(), drawing(changed), Close(), ComparisonLength(4, 40, 60.0))
    assert verdict.outcome is Outcome.FAIL
    assert f"the sample is not the same: update {update}, slot 'next_batch': 'batch'" in verdict.summary


def test_how_far_the_training_is_may_not_be_led_elsewhere():
    changed = drawing(counts=lambda update: update + (update == 15))
    verdict = same_draws(drawing(), changed, Close(), ComparisonLength(4, 20, 60.0))
    assert verdict.outcome is Outcome.FAIL
    assert "update 15, slot 'next_batch': 'progress.steps' differs" in verdict.summary


@pytest.mark.parametrize(("contract", "knows"), [(Close(), False), (Exact(), True)])
def test_others_may_not_at_all(contract, knows):
    changed = drawing(lambda update: FEW * (update == 3), knows=knows)
    verdict = same_draws(drawing(knows=knows), changed, contract, ComparisonLength(4))
    assert verdict.outcome is Outcome.FAIL
    assert "update 3, slot 'next_batch': 'batch' differs by 20" in verdict.summary


def test_what_an_update_returns_may_have_a_gradient():
    def build():
        kept = torch.ones((), requires_grad=True)
        return Subject(lambda _: {"output": {"loss": 2 * kept}}, {"learner": Own()})

    assert same_draws(build, build, Close(), ComparisonLength(2, 2, 60.0))


def counting(*, saves):
    """Makes subjects, from a checkpoint or without one, that return how many updates they have made."""

    def made(checkpoint):
        def build():
            updates = checkpoint or 0

            def count(asked):
                nonlocal updates
                if asked is CHECKPOINT:
                    return updates if saves else 0
                updates += 1
                return {"output": {"loss": torch.tensor(float(updates))}}

            return Subject(count, {"learner": Own()})

        return build

    return made


@pytest.mark.parametrize("saves", [False, True])
def test_a_resumed_training_is_compared_where_the_baseline_resumes(saves):
    verdict = same_when_resumed(counting(saves=saves), counting(saves=False), Exact(), 3)
    assert verdict.outcome is (Outcome.FAIL if saves else Outcome.PASS)
    if not saves:
        assert "was not compared: without the stage, a resumed training is another one" in verdict.summary
        assert len(verdict.evidence[NOT_EXERCISED]) == 1


def test_a_resumed_training_that_continues_passes_and_is_exercised():
    verdict = same_when_resumed(counting(saves=True), counting(saves=True), Exact(), 3)
    assert "continues as if it had not been interrupted" in verdict.summary
    assert NOT_EXERCISED not in verdict.evidence
