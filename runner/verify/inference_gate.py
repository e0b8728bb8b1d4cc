"""Judges whether the stages of a recipe's ``inference`` are harmless for the model of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, cached_property
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any

import torch

from runner.plugin.contract import Close, Exact, Objective
from runner.plugin.source import Batch
from runner.proof.close_check import close
from runner.proof.exact_check import exact
from runner.proof.first_operator import name_operator
from runner.proof.isolation import StepError
from runner.proof.noninferiority import NonInferiority
from runner.proof.subject import Build, Subject
from runner.proof.subject_states import widen_inputs
from runner.proof.trajectory import Update
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.system.errors import IndivisibleBatchError, UsageError
from runner.system.tensor_trees import tensors
from runner.training.evaluation import evaluated
from runner.training.inference_model import build
from runner.training.pipeline import Assembly, assemble, resolve_device
from runner.training.stage_watch import StageReport
from runner.training.trained_run import Trained
from runner.verify.evaluation_checks import alike, resized
from runner.verify.other_data import with_setting
from runner.verify.variants import variants_of, weakest
from runner.verify.verification import Phase, Verification, judged

TOLERANCE = 1e-5
"""Allowed deviation in float32, relative to the largest number of an answer."""
SIZES = (1, 3, 16)
"""Sizes of the batches whose predictions are compared; a server decides its sizes."""
BATCHES = 3
"""Number of inputs, which are evaluated one after the other in the same memory."""
LOOKS = (8, 16, 24)
"""Numbers of evaluations after which the test may decide, where a seed determines the
data.
"""
FEWEST_PARTS = 8
PARTS = 64
"""Smallest and largest number of parts of other held-out data, compared in pairs."""
_CONTRACT = "Statistical"


def verify_inference(
    trained: Trained,
    kinds: Sequence[str],
    say: Callable[[str], None],
    phase: Phase = nullcontext,
) -> Verification:
    """Compares every stage of the section alone, and all of them, with the run's model
    without any.

    Exact and Close stages are judged by predictions, in batches of several sizes and
    with other content in the same memory. Statistical stages are judged by the
    objective, without and with the stage on the same held-out data.

    Raises:
        UsageError: the recipe has no such section, or none of these stages.
    """
    recipe = answering(trained)
    possible = variants_of(recipe, resolve_device(recipe.device), ("alone", "all"))
    gate = InferenceGate(trained, say)
    return judged(recipe, possible, kinds, gate, say, phase=phase)


def answering(trained: Trained) -> Recipe:
    """Returns the recipe with the stages of its ``inference`` as its only stages.

    Raises:
        UsageError: it has none.
    """
    recipe = trained.recipe
    if not recipe.inference:
        raise UsageError(
            f"recipe '{recipe.name}' has no section 'inference' with a stage that is on"
        )
    return replace(recipe, stages=recipe.inference)


def questions(pipeline: Assembly) -> Iterator[Any]:
    """Yields inputs of the model: batches of the training data, one of them also in
    several sizes.
    """
    samples = pipeline.batches()
    batches = [next(samples)[0] for _ in range(BATCHES)]
    for batch in (*batches, *resized(pipeline.source, batches[0], SIZES)):
        yield pipeline.learner.inputs(batch)


class InferenceGate:
    """Judges sets of stages of one section on one model."""

    def __init__(self, trained: Trained, say: Callable[[str], None]) -> None:
        self.trained = trained
        self.say = say
        self._recipe = answering(trained)
        self._reports: dict[tuple[str, ...], list[StageReport]] = {}
        self.values: dict[tuple[str, ...], list[float]] = {}
        """Values of the objective, by the evaluated stages."""
        self._program_calls: dict[tuple[str, ...], dict[str, int]] = {}
        """Calls that programs answered, by the stages of the model and the program's."""
        self._verdict = cache(self._judged)

    def __call__(self, stages: Sequence[str]) -> Verdict:
        """Returns the verdict on a set of stages, by the weakest of their contracts."""
        return self._verdict(tuple(stages))

    def _judged(self, stages: tuple[str, ...]) -> Verdict:
        verdict = self._compared(stages)
        unused = [
            kind
            for kind, calls in self._program_calls.get(stages, {}).items()
            if not calls
        ]
        if verdict and unused:
            summary = (
                f"the network answered all questions in place of {', '.join(unused)}"
            )
            return Verdict(Outcome.INCONCLUSIVE, verdict.contract, summary)
        return name_operator(verdict)

    def _compared(self, stages: tuple[str, ...]) -> Verdict:
        contract = weakest(self._recipe, stages)
        baseline = self.subject(())
        changed = self.subject(stages)
        try:
            if isinstance(contract, Exact):
                return exact(baseline, changed, self._queries)
            if isinstance(contract, Close):
                verdict = self._same_algebra(baseline, changed)
                return self._within_tolerance(stages) if verdict is None else verdict
            verdict = alike(baseline, changed, self._queries)
            return self._compare_objectives(stages) if verdict else verdict
        except (StepError, torch.OutOfMemoryError, MemoryError) as error:
            summary = f"it cannot be compared: {str(error) or type(error).__name__}"
            return Verdict(Outcome.INCONCLUSIVE, type(contract).__name__, summary)

    def idle(self, stages: tuple[str, ...]) -> dict[str, str]:
        """Returns the stages without effect, with the reason."""
        return {
            report.kind: str(report.reason)
            for report in self._reports.get(stages, ())
            if not report.active
        }

    def subject(self, stages: tuple[str, ...]) -> Build:
        """Returns a function that makes models with these stages, whose step predicts."""

        def build_subject() -> Subject:
            model = build(self.trained, stages)
            self._reports[stages] = list(model.pipeline.reports.values())
            # The comparison casts batches to float64, but not other inputs of a network.
            if torch.get_default_dtype() == torch.float64:
                widen_inputs(model.learner.modules().values())

            def answer(inputs: Any) -> dict[str, Any]:
                outputs = model.answer(model.pipeline.transfer(inputs))
                self._count_calls(stages, model.pipeline)
                return {"predict": outputs}

            return Subject(answer, dict(model.learner.modules()), parameters=lambda: ())

        return build_subject

    def _count_calls(self, stages: tuple[str, ...], pipeline: Assembly) -> None:
        """Stores how often each program answered, of stages whose program was used or refused."""
        counts = self._program_calls.setdefault(stages, {})
        for kind, stage in pipeline.stages.items():
            if stage.program_calls or stage.network_calls:
                counts[kind] = max(counts.get(kind, 0), stage.program_calls)

    @cached_property
    def _queries(self) -> list[Update]:
        inputs = list(questions(build(self.trained, ()).pipeline))
        first = inputs[0]
        in_memory_of_first = [
            Update(batch, place=first)
            for batch in inputs[1:BATCHES]
            if _shapes(batch) == _shapes(first)
        ]
        resized_inputs = map(Update, inputs[BATCHES:])
        return [Update(first), *in_memory_of_first, *resized_inputs]

    def _same_algebra(self, baseline: Build, changed: Build) -> Verdict | None:
        """Returns the verdict of a comparison in float64; None if there is none."""
        try:
            verdict = close(baseline, changed, self._queries)
        except UsageError:
            # Some stages cannot be attached in float64.
            return None
        return None if verdict.outcome is Outcome.INCONCLUSIVE else verdict

    def _within_tolerance(self, stages: tuple[str, ...]) -> Verdict:
        """Returns whether predictions deviate by no more than ``TOLERANCE``: for
        stages without float64.
        """
        baseline = build(self.trained, ())
        candidate = build(self.trained, stages)
        largest = 0.0
        count = 0
        for update in self._queries:
            inputs = baseline.pipeline.transfer(update.batch)
            expected_outputs = tensors(baseline.answer(inputs))
            outputs = tensors(candidate.answer(inputs))
            self._count_calls(stages, candidate.pipeline)
            for expected, output in zip(expected_outputs, outputs, strict=True):
                # An answer of zeros has no size to divide by.
                size = float(expected.abs().max()) or 1.0
                largest = max(largest, float((expected - output).abs().max()) / size)
                count += 1
        outcome = Outcome.PASS if largest <= TOLERANCE else Outcome.FAIL
        sizes = ", ".join(map(str, SIZES))
        summary = (
            f"{count} answers, some in batches of {sizes}, are off by {largest:.1e} "
            f"of their size at most; {TOLERANCE:.0e} is allowed"
        )
        return Verdict(outcome, "Close", summary, {"largest": largest})

    def _compare_objectives(self, stages: tuple[str, ...]) -> Verdict:
        """Returns whether the stages worsen the objective by at most its margin."""
        objective = self.trained.recipe.objective
        if objective is None:
            summary = "the recipe has no objective to judge by"
            return Verdict(Outcome.INCONCLUSIVE, _CONTRACT, summary)
        if not all(map(math.isfinite, self.evaluations(()))):
            summary = (
                f"eval/{objective.name} is not measured, or no finite number: "
                "declare the objective"
            )
            return Verdict(Outcome.INCONCLUSIVE, _CONTRACT, summary)
        # Without a seed, the data are fixed, so all parts are evaluated together.
        looks: tuple[int, ...] = LOOKS
        if self.trained.recipe.data.evaluation_seed is None:
            looks = (len(self.evaluations(())),)
        if looks == (1,):
            values = *self.evaluations(()), *self.evaluations(stages)
            return self._compare_once(objective, *values)
        relative = objective.unit is None
        test = NonInferiority(
            margin=objective.margin, most=looks[-1], relative=relative, looks=looks
        )
        for first, look in pairwise((0, *looks)):
            baselines = self.evaluations((), look)[first:look]
            candidates = self.evaluations(stages, look)[first:look]
            # Without a unit, the margin is a share of the improvement by the training.
            untrained = [0.0] * (look - first)
            if relative:
                untrained = self.evaluations(None, look)[first:look]
            triples = zip(baselines, candidates, untrained, strict=True)
            for baseline, candidate, start in triples:
                baseline_gain = objective.sign * (baseline - start)
                test.add(baseline_gain, objective.sign * (candidate - start))
            if test.decision() is not None:
                break
        parts = f"{len(test)} parts of the held-out data"
        summary = f"{objective.name}, on {parts}: {test.summary()}"
        evidence = {"metric": objective.name, **test.evidence()}
        return Verdict(test.conclude(), _CONTRACT, summary, evidence)

    def _compare_once(
        self, objective: Objective, baseline: float, candidate: float
    ) -> Verdict:
        learned = 1.0 if objective.unit else abs(baseline - self.evaluations(None)[0])
        lost = objective.sign * (baseline - candidate)
        allowed = objective.margin * learned
        direction = "loses" if lost > 0 else "gains"
        summary = (
            f"{objective.name}: {baseline:.4g} without, {candidate:.4g} with it, "
            f"on all held-out data: {direction} {abs(lost):.2g}, "
            f"where {allowed:.2g} may be lost; one pair is too few for a verdict"
        )
        evidence = {"metric": objective.name, "lost": lost, "allowed": allowed}
        return Verdict(Outcome.INCONCLUSIVE, _CONTRACT, summary, evidence)

    def evaluations(
        self, stages: tuple[str, ...] | None, count: int = 1
    ) -> list[float]:
        """Returns the objective with these stages, or before training, on data that all
        sets share.

        Args:
            stages: None for the model before the training.
            count: The least number of evaluations, each on other data, if a seed
                determines the data; otherwise there is one for every part of the
                held-out data, or for all of it.
        """
        data = self.trained.recipe.data
        key = ("before the training",) if stages is None else stages
        values = self.values.setdefault(key, [])
        if data.evaluation_seed is None:
            values += [] if values else self._of_parts(stages)
            return values
        # The recipe's seed is that of evaluations during the training.
        first = int(attrgetter(data.evaluation_seed)(data)) + 1
        for number in range(len(values), count):
            self.say(f"evaluation {number + 1} of {count}")
            seeded = with_setting(data, data.evaluation_seed, first + number)
            recipe = replace(self.trained.recipe, data=seeded)
            values.append(self._evaluate(self._pipeline(stages, recipe)))
        return values

    def _of_parts(self, stages: tuple[str, ...] | None) -> list[float]:
        pipeline = self._pipeline(stages, self.trained.recipe)
        means = list(_means(pipeline, self._objective_name, _parts(pipeline)))
        return means or [self._evaluate(pipeline)]

    def _evaluate(self, pipeline: Assembly) -> float:
        return evaluated(pipeline).get(self._objective_name, math.nan)

    @property
    def _objective_name(self) -> str:
        objective = self.trained.recipe.objective
        # ``_compare_objectives`` returns before if the recipe has no objective.
        assert objective is not None
        return objective.name

    def _pipeline(self, stages: tuple[str, ...] | None, recipe: Recipe) -> Assembly:
        trained = replace(self.trained, recipe=recipe)
        if stages is None:
            return assemble(replace(recipe, stages={}), trained.registry.files)
        return build(trained, stages).pipeline


def _parts(pipeline: Assembly) -> list[Batch]:
    """Returns the held-out data in enough parts for pairs; no part if they are not in
    batches.
    """
    held_out = getattr(pipeline.source, "held_out_batches", None)
    if held_out is None:
        return []
    batches: list[Batch] = [
        pipeline.transfer(batch) for batch in islice(held_out(), PARTS)
    ]
    # A few large batches are cut, because a test needs pairs.
    pieces = -(-2 * FEWEST_PARTS // len(batches))
    sizes = [max(1, pipeline.source.size(batch) // pieces) for batch in batches]
    parts = batches
    with suppress(IndivisibleBatchError):
        parts = [
            piece
            for batch, size in zip(batches, sizes, strict=True)
            for piece in pipeline.source.split(batch, size)
        ]
    return parts[:PARTS] if len(parts) >= FEWEST_PARTS else []


@torch.no_grad()
def _means(pipeline: Assembly, name: str, parts: Sequence[Batch]) -> Iterator[float]:
    """Yields the metric on each part; nothing if the learner has no metric of that
    name.
    """
    with pipeline.learner.evaluating(), torch.random.fork_rng(devices=[]):
        for number, piece in enumerate(parts):
            # Both models of a pair need the same random numbers.
            torch.manual_seed(number)
            metrics = pipeline.learner.metrics(piece)
            if name not in metrics:
                return
            if count := float(metrics[name].count):
                yield float(metrics[name].sum) / count


def _shapes(inputs: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors(inputs)]
