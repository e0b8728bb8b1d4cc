"""Compares sources that act with their learner: ends, resets, full buffers, and other sizes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from runner.plugin.check import Check
from runner.plugin.contract import Statistical
from runner.proof.isolation import StepError
from runner.proof.verdict import Outcome, Verdict
from runner.system.errors import RunnerError
from runner.verify.simulation import (
    FEWEST_DRAWS,
    MOST_DRAWS,
    SimulationComparison,
    simulations,
)
from runner.verify.unexercised import NOT_EXERCISED
from runner.verify.variants import beyond_updates

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair

SHARE_OF_LONG_RUN = 0.4
"""Seconds of this check, as a share of a long run's."""
Sizes = Mapping[str, Any]


class SimulatorsCheck(Check):
    """Draws from the source of the baseline and from that of the candidate, with the same
    actions.

    Both receive the answers of the baseline's learner, so that batches and states
    remain comparable. The candidate's learner answers the same questions, and its
    answers are compared. Draws are repeated with the small sizes that the settings of
    the source name (``SourceConfig.other_sizes``), until each rare event
    (``Source.events``) has occurred.
    """

    name = "simulators"
    question = (
        "Does a simulator behave the same at ends, after resets and in other sizes?"
    )
    catches = (
        "a stale observation after a reset; a timeout that counts as an end, or the "
        "reverse; samples lost where a full buffer starts again; a mask that is ignored; "
        "a number of copies that is assumed"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a long run, if the source does not act with its learner,
        and for ``Statistical`` stages that change which batches are sampled.
        """
        if not pair.has_long_run or pair.chooses_batches:
            return False
        is_statistical = isinstance(pair.contract, Statistical)
        if is_statistical and beyond_updates(pair.recipe, pair.stages):
            return False
        return pair.baseline.has_simulator

    def cost(self, pair: StagePair) -> str:
        """Returns the number of sizes, and the most draws and seconds."""
        count = len(_sizes_of(pair))
        seconds = SHARE_OF_LONG_RUN * pair.options.horizon_seconds
        draws = f"{FEWEST_DRAWS} to {MOST_DRAWS} draws"
        return f"{draws} in each of {count} sizes, or {seconds:g} s"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares bits, or numbers up to rounding; of a ``Statistical`` learner's
        answers only the form.
        """
        sizes = _sizes_of(pair)
        name = type(pair.contract).__name__
        long_run = budget.at_most(pair.options.horizon_seconds)
        deadline = time.monotonic() + SHARE_OF_LONG_RUN * long_run
        events = Counter[str]()
        missed = []
        draws = 0
        for number, settings in enumerate(sizes):
            # Sizes whose events occur early leave their time to later ones.
            seconds = (deadline - time.monotonic()) / (len(sizes) - number)
            try:
                baseline, candidate = pair.builds(partial(simulations, sizes=settings))
                comparison = SimulationComparison(baseline, candidate, pair.contract)
                difference = comparison.run(seconds, events, evaluates=bool(settings))
            except RunnerError as error:
                # A learner or a stage may refuse a size with its reason.
                missed.append(f"a simulator {_words(settings)} ({error})")
                continue
            except StepError as error:
                return error.verdict(name, baseline)
            if difference is not None:
                words = _words(settings)
                summary = f"the simulator is another one {words}: {difference}"
                return Verdict(Outcome.FAIL, name, summary)
            draws += comparison.draws
            events.update(comparison.events)
        missed += [event for event, count in events.items() if not count]
        evidence = {"draws": draws, "events": dict(events), NOT_EXERCISED: missed}
        summary = f"{draws:,} draws of a simulator are the same, in {len(sizes)} sizes"
        return Verdict(Outcome.PASS, name, summary, evidence)


def _sizes_of(pair: StagePair) -> list[Sizes]:
    """Returns the settings of all sizes; without any, an empty one for the recipe's."""
    recipe = pair.recipe
    return [*recipe.data.other_sizes(recipe.train.batch_size)] or [{}]


def _words(sizes: Sizes) -> str:
    """Returns the settings of ``data`` as words of a message."""
    if not sizes:
        return "with the recipe's sizes"
    settings = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in sizes.items()
    ]
    return f"with {', '.join(settings)}"
