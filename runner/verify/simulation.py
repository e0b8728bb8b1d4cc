"""Subjects that sample from a source that acts with its learner, and their comparison."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.plugin.contract import Contract, Exact, Statistical
from runner.plugin.progress import Progress
from runner.plugin.registry import Registry
from runner.plugin.ring import Ring
from runner.plugin.source import Batch, Source, State
from runner.proof.isolation import Frame, Isolation, Location
from runner.proof.rounding_error import MOST_ULPS
from runner.proof.subject import Build, Subject
from runner.proof.trees import clones, leaves
from runner.recipe.loader import from_values
from runner.recipe.recipe import Recipe
from runner.system.errors import RunnerError
from runner.system.tensor_trees import map_leaves
from runner.training.pipeline import Assembly, assemble
from runner.training.step import Step
from runner.verify.learner_recorder import LearnerRecorder
from runner.verify.likeness import describe, is_output, unlike
from runner.verify.subjects import generator_states, recipe_with

SLOT = "draw"
FEWEST_DRAWS = 60
MOST_DRAWS = 1000
"""Limits of the number of draws."""
ENOUGH = 3
"""Occurrences of an event after which it counts as exercised."""
OVERWRITTEN = "a ring buffer that is full and written again"
_EVALUATED_AT = 30
"""Number of the draw after which an evaluation is compared; after the next one, with
random answers.
"""
# An update takes longer than a draw.
_UPDATED_EVERY = 8
"""Batches for which the source receives the results of one update."""
_STATISTICS_EVERY = 10
"""Draws between two calls of ``statistics``."""
# A buffer may have gigabytes, and older rows do not change.
_NEWEST_ROWS = 512
"""Rows of a ring buffer that are compared."""
_ROUNDING = MOST_ULPS * torch.finfo(torch.float32).eps
"""Largest relative difference of an element after one draw from the same state."""
_ANSWERS = "output"
"""Key of the learner's answers in the values of a draw."""
_UNSETTLED = ("state", "generators")
"""Values that differ while one of two sources has sampled ahead."""
_CROSSINGS = 2
"""Draws in which rounding may have changed a decision, such as whether a limit is
reached.
"""


class Reply(NamedTuple):
    """Results of the baseline's learner in one draw, which the candidate's source
    receives, too.
    """

    answers: tuple[Any, ...] = ()
    """Results of its methods, in the order of the calls."""
    output: dict[str, Any] | None = None
    """Result of an update on the batch; None if there was no batch."""


class Request(NamedTuple):
    """The input of a draw."""

    reply: Reply | None = None
    """The baseline's results; None to compute them."""
    evaluates: bool = False
    is_random: bool = False
    """Whether an evaluation gets random answers, with which it ends early and more than
    once.
    """
    reports: bool = False
    """Whether the source reports its statistics afterwards."""


class Draw(NamedTuple):
    """The result of a draw."""

    values: dict[str, Any]
    """All values that are compared."""
    reply: Reply
    events: dict[str, int]
    """Number of times that rare events occurred in this draw."""
    is_settled: bool
    """Whether no batch may be sampled ahead, so that the states of two sources are
    comparable.
    """


class SimulatedPipeline:
    """A pipeline that draws batches and feeds results back, while its learner stays
    untrained.

    Args:
        pipeline: The pipeline.
        trains: Whether it trains another learner, whose results the source receives.
            Otherwise each request contains the results.
    """

    def __init__(self, pipeline: Assembly, *, trains: bool) -> None:
        self.pipeline = pipeline
        self.source = pipeline.source
        self.step = Step(pipeline)
        self.trained = pipeline.build_another_learner() if trains else None
        self.recorder = LearnerRecorder(pipeline.learner)
        self._output: dict[str, Any] | None = None
        self._trained_output: dict[str, Any] = {}
        self._trained_samples = 0
        self._rounds: list[int] = []
        self.source.bind(self.recorder.learner)
        # Wrappers of stages around the update have other checks.
        pipeline.slots.wrap("update", lambda _: lambda *inputs: self._update(*inputs))

    def draw(self, request: Request) -> Draw:
        """Draws once, and returns all that depends on the source."""
        reply = request.reply or Reply()
        self.recorder.begin(reply.answers)
        self._output = clones(reply.output)
        sample = self.step.draw()
        has_output = self.trained is not None or self._output is not None
        if sample is not None and has_output:
            self.step(sample)
        events: dict[str, int] = {}
        if self.trained is not None:
            # Only the baseline's source is certain to record its events.
            occurred = self.source.events().items()
            events = {name: int(has_occurred) for name, has_occurred in occurred}

        metrics: dict[str, Any] = {}
        if request.evaluates:
            metrics = self._evaluate(is_random=request.is_random)
        state = self.source.state_dict()
        statistics = self.source.statistics() if request.reports else {}
        values = {
            "progress": dict(vars(self.step.progress)),
            "batch": None if sample is None else sample.batch,
            "noise": None if sample is None else sample.noise,
            "calls": self.recorder.calls,
            _ANSWERS: self.recorder.answers,
            "evaluation": metrics,
            "statistics": _as_tensors(statistics),
            "generators": generator_states(self.pipeline),
            "state": map_leaves(_newest_rows, state, (Ring,)),
        }
        reply = Reply(tuple(self.recorder.answers), clones(self._output))
        is_settled = self.source.ahead() == 0
        return Draw(values, reply, events | self._count_refills(state), is_settled)

    def _update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        if self.trained is None:
            assert self._output is not None
            return self._output
        # Results of another batch are feedback, too, if it has as many samples.
        samples = self.source.size(batch)
        if samples != self._trained_samples or progress.updates % _UPDATED_EVERY == 0:
            self._trained_output = self.trained.update(batch, noise, progress)
            self._trained_samples = samples
        self._output = clones(self._trained_output)
        return self._output

    def _evaluate(self, *, is_random: bool) -> dict[str, Any]:
        if is_random:
            self.recorder.generator = torch.Generator().manual_seed(0)
        try:
            with self.pipeline.learner.evaluating():
                return _as_tensors(self.source.evaluate(self.recorder.learner))
        finally:
            self.recorder.generator = None

    def _count_refills(self, state: State) -> dict[str, int]:
        """Returns how many ring buffers were written over their end in this draw."""
        rings: list[Ring] = []
        map_leaves(rings.append, state, (Ring,))
        if not rings:
            return {}
        rounds = [ring.written // ring.capacity for ring in rings]
        earlier = self._rounds or [0] * len(rings)
        self._rounds = rounds
        pairs = zip(rounds, earlier, strict=True)
        return {OVERWRITTEN: sum(count > previous for count, previous in pairs)}


def _newest_rows(ring: Ring) -> dict[str, Any]:
    first = max(ring.first, ring.written - _NEWEST_ROWS)
    rows = ring.read(first, ring.written)
    return {"capacity": ring.capacity, "written": ring.written, "rows": rows}


def _as_tensors(metrics: Mapping[str, float]) -> dict[str, Tensor]:
    return {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in metrics.items()
    }


class SourceState:
    """The state of a source as a part of a subject.

    Args:
        source: The source.
    """

    def __init__(self, source: Source) -> None:
        self.state_dict = source.state_dict
        self.load_state_dict = source.load_state_dict


def simulations(
    recipe: Recipe,
    registry: Registry,
    stages: Collection[str],
    sizes: Mapping[str, Any],
) -> Build:
    """Makes subjects whose step draws once for a ``Request`` and returns a ``Draw``.

    Args:
        recipe: The recipe.
        registry: The plugins.
        stages: Kinds of the active stages; without any, the results of updates are
            computed.
        sizes: Settings of ``data`` that replace the recipe's, by dotted path.
    """
    resized = resize(recipe, registry, sizes) if sizes else recipe
    staged = recipe_with(resized, registry, stages)

    def build() -> Subject:
        pipeline = assemble(staged, registry.files)
        simulation = SimulatedPipeline(pipeline, trains=not stages)
        state = {"source": SourceState(simulation.source)}
        seed = simulation.step.seed
        return Subject(simulation.draw, state, seed=seed, parameters=lambda: ())

    return build


def resize(recipe: Recipe, registry: Registry, sizes: Mapping[str, Any]) -> Recipe:
    """Returns the recipe with other settings of ``data``.

    Raises:
        RecipeError: The settings contradict each other or the recipe.
    """
    values = recipe.values(masked=False)
    for path, value in sizes.items():
        *sections, key = path.split(".")
        section = values["data"]
        for name in sections:
            section = section[name]
        section[key] = value
    return from_values(values, str(recipe.path), recipe.origins, registry)


class SimulationComparison:
    """Draws from two sources in turn and compares the results.

    Attributes:
        draws: Number of draws that were the same.
        events: Number of times that each rare event occurred.

    Args:
        baseline: Made by ``simulations`` without stages.
        candidate: The same with stages.
        contract: The promise of the stages.

    Raises:
        StepError: The baseline or the candidate cannot be built.
    """

    def __init__(self, baseline: Build, candidate: Build, contract: Contract) -> None:
        self.draws = 0
        self.events = Counter[str]()
        self._reference = Isolation(baseline, 0)
        self._candidate = Isolation(candidate, 0)
        self._is_exact = isinstance(contract, Exact)
        self._is_statistical = isinstance(contract, Statistical)
        self._has_rounded = False
        self._crossings = 0

    def run(
        self, seconds: float, earlier: Mapping[str, int], *, evaluates: bool
    ) -> str | None:
        """Returns a description of the first difference; None if there is none.

        Args:
            seconds: Time after which no further draw starts; a few are compared in any
                case.
            earlier: Number of times that events occurred in comparisons with other
                sizes.
            evaluates: Whether two evaluations are compared between draws.

        Raises:
            StepError: The baseline or the candidate fails.
        """
        deadline = time.monotonic() + seconds
        while self._continues(deadline, earlier):
            number = self.draws + 1
            request = Request(
                evaluates=evaluates and number in (_EVALUATED_AT, _EVALUATED_AT + 1),
                is_random=number == _EVALUATED_AT + 1,
                reports=number % _STATISTICS_EVERY == 0,
            )
            (expected,) = self._reference.advance([request], lambda draw: draw)
            request = request._replace(reply=expected.reply)
            try:
                (actual,) = self._candidate.advance([request], lambda draw: draw)
            except RunnerError as error:
                return (
                    f"draw {number} raises an error, "
                    f"which the baseline's does not: {error}"
                )
            difference = self._find_difference(expected, actual)
            if difference is not None:
                return difference
            self.draws = number
            self.events.update(expected.events)
        return None

    def _continues(self, deadline: float, earlier: Mapping[str, int]) -> bool:
        if self.draws < FEWEST_DRAWS:
            return True
        counts = self.events + Counter(earlier)
        # Every size has a separate buffer.
        if OVERWRITTEN in self.events:
            counts[OVERWRITTEN] = self.events[OVERWRITTEN]
        has_all_events = bool(self.events) and all(
            counts[name] >= ENOUGH for name in self.events
        )
        return (
            self.draws < MOST_DRAWS
            and not has_all_events
            and time.monotonic() < deadline
        )

    def _find_difference(self, expected: Draw, actual: Draw) -> str | None:
        excluded: tuple[str, ...] = () if expected.is_settled else _UNSETTLED
        if self._is_statistical:
            # The learner may answer with other numbers; the source receives the
            # baseline's.
            answers = _frame({_ANSWERS: expected.values[_ANSWERS]})
            candidate_answers = _frame({_ANSWERS: actual.values[_ANSWERS]})
            location = unlike(answers, candidate_answers, form=True)
            if location is not None:
                return self._describe(location, answers, candidate_answers)
            excluded = (*excluded, _ANSWERS)
        baseline = _frame(expected.values, excluded)
        candidate = _frame(actual.values, excluded)
        location = unlike(baseline, candidate, form=False, content=0.0)
        if location is None:
            return None
        if not self._is_exact:
            location = unlike(
                baseline, candidate, form=False, content=_ROUNDING, rounded=True
            )
            if location is None or self._is_excused(location):
                self._synchronize(expected, actual)
                return None
        return self._describe(location, baseline, candidate)

    def _describe(self, location: Location, baseline: Frame, candidate: Frame) -> str:
        return str(describe(self.draws + 1, location, baseline, candidate))

    def _is_excused(self, location: Location) -> bool:
        """Returns whether rounding may have changed a decision of the source, and counts
        it.
        """
        if not self._has_rounded or is_output(location.name):
            return False
        self._crossings += 1
        return self._crossings <= _CROSSINGS

    def _synchronize(self, expected: Draw, actual: Draw) -> None:
        """Gives a candidate that rounds the baseline's state, so that its errors do not
        add up.
        """
        if not expected.is_settled:
            return
        baseline = _frame({"state": expected.values["state"]})
        candidate = _frame({"state": actual.values["state"]})
        if unlike(baseline, candidate, form=False, content=0.0) is not None:
            self._has_rounded = True
            state = self._reference.subject.state["source"].state_dict()
            self._candidate.load({"source": state})


def _frame(values: Mapping[str, Any], excluded: Collection[str] = ()) -> Frame:
    """Returns values by location, without excluded ones."""
    compared = {name: value for name, value in values.items() if name not in excluded}
    return {Location(SLOT, "output", path): value for path, value in leaves(compared)}
