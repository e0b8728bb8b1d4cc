"""Compares one training on several processes with the training of a single process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from runner.plugin.contract import Statistical
from runner.proof.close_check import close
from runner.proof.subject import Build, Subject
from runner.proof.trees import clones
from runner.proof.verdict import Outcome, Verdict, excluded
from runner.system import generators
from runner.training.pipeline import Assembly, assemble, resolve_device
from runner.verify.subjects import (
    LearnerState,
    Recorded,
    Training,
    recipe_with,
    recorded,
)
from runner.verify.variants import contract_of, inactive_stages
from runner.verify.verification import StageVerdict, Verification

if TYPE_CHECKING:
    from torch import Tensor

    from runner.distributed.process_group import ProcessGroup
    from runner.plugin.learner import Learner
    from runner.plugin.registry import Registry
    from runner.plugin.source import State
    from runner.recipe.recipe import Recipe

LATE = (0.5, 1.0)
"""Shares of the training at which the last batch comes again."""


def verify_processes(
    recipe: Recipe, registry: Registry, group: ProcessGroup, updates: int
) -> Verification:
    """Verifies that several processes train the model that one process trains.

    Stages with the contract ``Statistical`` are left out on both sides. The last of the batches
    comes again with one sample less, so that processes have different numbers of samples.

    Args:
        recipe: The recipe.
        registry: The plugins.
        group: The processes, of which this is the first; the others call ``mirror``.
        updates: Number of compared updates.
    """
    started = time.perf_counter()
    stages = close_stages(recipe, group.count)
    verdict = compare_processes(recipe, registry, stages, group, updates)
    row = StageVerdict(
        f"{group.count} processes",
        stages,
        verdict.contract,
        verdict.outcome,
        verdict.summary,
        verdict.evidence,
    )
    seconds = time.perf_counter() - started
    return Verification(recipe.name, (row,), {}, seconds)


def active_stages(recipe: Recipe, count: int) -> tuple[str, ...]:
    """Returns the kinds of the stages that are active with this number of processes."""
    device = resolve_device(recipe.device)
    inactive = inactive_stages(recipe, recipe.stages, device, count)
    return tuple(kind for kind in recipe.stages if kind not in inactive)


def close_stages(recipe: Recipe, count: int) -> tuple[str, ...]:
    """Returns the kinds of the stages that are active with this number of processes, and promise at
    least the same algebra.
    """
    return tuple(
        kind
        for kind in active_stages(recipe, count)
        if not isinstance(contract_of(recipe, kind, count), Statistical)
    )


def compare_processes(
    recipe: Recipe,
    registry: Registry,
    stages: Sequence[str],
    group: ProcessGroup,
    updates: int,
) -> Verdict:
    """Returns whether updates on several processes are ``Close`` to those of one process.

    All are given the batches of a single process, also if they would draw parts themselves.
    """
    staged = recipe_with(recipe, registry, stages)
    batches = recorded(staged, registry, updates, LATE)
    leader = _Leader(staged, registry, group)
    with _cutting_batches(group):
        try:
            batches.append(leader.shortened(batches[0]))
            verdict = close(_single(staged, registry), leader.build, batches)
        finally:
            group.broadcast(None)
    if verdict.outcome is not Outcome.PASS:
        return verdict
    return replace(verdict, summary=f"{verdict.summary}; {excluded(len(batches))}")


def mirror(
    recipe: Recipe, registry: Registry, stages: Sequence[str], group: ProcessGroup
) -> None:
    """Does what the candidate does in the first process, until that ends the comparison."""
    staged = recipe_with(recipe, registry, stages)
    with _cutting_batches(group):
        _mirror_commands(staged, registry, group)


def _mirror_commands(staged: Recipe, registry: Registry, group: ProcessGroup) -> None:
    trainings: dict[int, Training] = {}
    while (command := group.broadcast()) is not None:
        name, number, dtype, value = command
        # An error here is one in the first process, too, which reports it.
        with _default_type(dtype), suppress(Exception):
            if name == "build":
                # Initial parameters may follow from the global generators.
                generators.load_state_dict(value)
                pipeline = assemble(staged, registry.files, processes=group)
                trainings[number] = Training(pipeline)
            elif name == "load":
                LearnerState(trainings[number].complete_step).load_state_dict(value)
            elif name == "state":
                trainings[number].pipeline.learner.complete_state()
            elif name == "gradients":
                _whole_gradients(trainings[number].pipeline.learner)
            else:
                # An update draws the random numbers of the entire batch in every process.
                states, record = value
                generators.load_state_dict(states)
                trainings[number].step(record)


class _Leader:
    """The candidate in the first process, which the others mirror."""

    def __init__(self, recipe: Recipe, registry: Registry, group: ProcessGroup) -> None:
        self.recipe = recipe
        self.registry = registry
        self.group = group
        self.builds = 0
        self.pipeline: Assembly | None = None

    def build(self) -> Subject:
        """Builds the training in all processes, and returns that of the first."""
        self.builds += 1
        number = self.builds
        self._send("build", number, generators.state_dict())
        pipeline = assemble(self.recipe, self.registry.files, processes=self.group)
        training = Training(pipeline)
        state = _MirroredState(training, self, number)
        learner = pipeline.learner

        def step(record: Any) -> dict[str, Any]:
            # A prediction after the update is made by the first process alone, unless each has only
            # a part of the parameters.
            mirrored = (
                record._replace(inputs=None) if learner.sharding is None else record
            )
            self._send("step", number, (generators.state_dict(), mirrored))
            return training.step(record)

        def gradients() -> dict[str, Tensor | None]:
            if learner.sharding is None:
                return learner.gradients()
            self._send("gradients", number)
            return _whole_gradients(learner)

        return Subject(
            step,
            {"learner": state},
            seed=training.complete_step.seed,
            parameters=learner.named_parameters,
            gradients=gradients,
        )

    def load(self, number: int, state: State) -> None:
        """Loads a state in the other processes."""
        self._send("load", number, state)

    def collect(self, number: int) -> None:
        """Lets the other processes send their parts of a state."""
        self._send("state", number)

    def shortened(self, record: Recorded) -> Recorded:
        """Returns the input of an update without its last sample, if a batch can miss one."""
        pipeline = assemble(self.recipe, self.registry.files)
        size = pipeline.source.size(record.batch)
        if size <= self.group.count:
            return record
        rows = slice(0, size - 1)
        batch = pipeline.source.take(record.batch, rows)
        noise = pipeline.learner.noise_layout.take(record.noise, rows, size)
        return clones(record._replace(batch=batch, noise=noise, inputs=None))  # type: ignore[no-any-return]

    def _send(self, name: str, number: int, value: Any = None) -> None:
        self.group.broadcast((name, number, torch.get_default_dtype(), value))


class _MirroredState(LearnerState):
    """The state of the candidate, which is loaded in all processes."""

    def __init__(self, training: Training, leader: _Leader, number: int) -> None:
        super().__init__(training.complete_step)
        self._leader = leader
        self._number = number
        if training.pipeline.learner.sharding is not None:
            self.state_dict = self._collected

    def _collected(self) -> State:
        self._leader.collect(self._number)
        return self.step.learner.complete_state()

    def load_state_dict(self, state: State) -> None:
        """Restores a result of ``state_dict``."""
        self._leader.load(self._number, state)
        super().load_state_dict(state)


def _single(recipe: Recipe, registry: Registry) -> Build:
    """Returns a maker of the training in a single process."""

    def build() -> Subject:
        pipeline = assemble(recipe, registry.files)
        training = Training(pipeline)
        # Slots of the processes see parts of a batch, so none is compared.
        return Subject(
            training.step,
            {"learner": LearnerState(training.complete_step)},
            seed=training.complete_step.seed,
            parameters=pipeline.learner.named_parameters,
            gradients=pipeline.learner.gradients,
        )

    return build


def _whole_gradients(learner: Learner) -> dict[str, Tensor | None]:
    """Returns the gradients of divided parameters; all processes have to call it."""
    sharding = learner.sharding
    assert sharding is not None
    return {
        name: None if gradient is None else sharding.whole(gradient)
        for name, gradient in learner.gradients().items()
    }


@contextmanager
def _cutting_batches(group: ProcessGroup) -> Iterator[None]:
    """Lets every process take its rows of the batches that it is given, inside the ``with``."""
    group.cuts_batches = True
    try:
        yield
    finally:
        group.cuts_batches = False


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
