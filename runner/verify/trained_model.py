"""The model that a training leaves: restored without stages, and as an exported program."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.plugin.learner import Learner
from runner.plugin.registry import Registry
from runner.plugin.source import State
from runner.proof.isolation import STEP, Frame, Isolation, Location
from runner.proof.subject import Build, Subject
from runner.proof.trajectory import Update
from runner.proof.trees import clones, leaves
from runner.recipe.recipe import Recipe
from runner.training.checkpoint import kept
from runner.training.pipeline import Assembly, assemble
from runner.verify.subjects import Recorded, Training, recipe_with, widen_learner

MOST_MODULES = 2
"""Modules that are exported, at most."""
_LOGGERS = ("torch.export", "torch._export", "torch.fx", "torch._dynamo")
"""Loggers with advice for authors of modules."""


class Restoration(NamedTuple):
    """Input of a subject of ``trained_models`` that restores its model and predicts with it."""

    inputs: Any


class ModuleCall(NamedTuple):
    """A call of a module in a prediction.

    Attributes:
        role: Name in the learner's ``modules``.
        path: Dotted path in that module; empty for the module itself.
        inputs: Its positional arguments.
    """

    role: str
    path: str
    inputs: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """Returns the path from the learner."""
        return f"{self.role}.{self.path}" if self.path else self.role


class Exports(NamedTuple):
    """Input of a subject of ``trained_models`` that exports modules and runs the programs.

    Attributes:
        calls: The modules, with the inputs of their export.
        inputs: Further inputs of each module, by its name.
    """

    calls: tuple[ModuleCall, ...]
    inputs: Mapping[str, Sequence[tuple[Tensor, ...]]]

    @property
    def results(self) -> list[str]:
        """Returns the names of all results."""
        counts = {call.name: 1 + len(self.inputs[call.name]) for call in self.calls}
        return [
            f"program.{name}.{number}"
            for name, count in counts.items()
            for number in range(count)
        ]


def trained_models(
    recipe: Recipe, registry: Registry, stages: Collection[str]
) -> Build:
    """Makes subjects that train, and then use the trained model.

    For an update that was ``Recorded``, the step performs it. For a ``Restoration``, it
    returns the prediction of the trained model, and of a model without stages that was
    restored from a stored state. For ``Exports``, it returns results of exported
    programs; None for a module that cannot be exported.
    """
    staged = recipe_with(recipe, registry, stages)
    plain = recipe_with(recipe, registry, ())

    def build() -> Subject:
        pipeline = assemble(staged, registry.files)
        training = Training(pipeline)

        def act(request: Recorded | Restoration | Exports) -> dict[str, Any]:
            if isinstance(request, Recorded):
                return training.step(request)
            if isinstance(request, Exports):
                return {"program": run_programs(pipeline.learner, request)}
            restored = restore(plain, registry, pipeline)
            return {
                "trained": predict(pipeline.learner, request.inputs),
                "restored": predict(restored.learner, request.inputs),
            }

        return training.subject(act)

    return build


def restore(recipe: Recipe, registry: Registry, pipeline: Assembly) -> Assembly:
    """Returns a pipeline without stages that has the trained model, as after a run.

    Raises:
        CheckpointError: The model does not fit the recipe without stages.
        UnpackableError: A checkpoint cannot hold it.
    """
    # A trained model is used without its optimizers.
    learner = {
        name: entry
        for name, entry in pipeline.learner.complete_state().items()
        if name != "optimizers"
    }
    model: State = {
        "learner": learner,
        "stages": {},
        "prepared": {},
        "batch_size": pipeline.batch_size,
        "classes": list(pipeline.source.classes),
        "progress": pipeline.progress.state_dict(),
    }
    state = kept(model)
    restored = assemble(recipe, registry.files, resumed=state)
    widen_learner(restored.learner)
    restored.load_learnt(state)
    return restored


def updates_before(
    batches: Sequence[Recorded],
    states: Mapping[str, Any] | None,
    request: Restoration | Exports,
) -> list[Update]:
    """Returns updates with these batches from a state, and then the request."""
    first, *later = (batch._replace(inputs=None) for batch in batches)
    return [Update(first, states, 0), *map(Update, later), Update(request)]


def run_exports(build: Build, updates: Sequence[Update]) -> Frame:
    """Returns results of exported programs of a subject after updates.

    Args:
        build: Made by ``trained_models``.
        updates: Updates, and at the end the ``Exports``.
    """
    isolation = Isolation(build, 0)
    for update in updates[:-1]:
        if update.states is not None:
            isolation.load(update.states, update.seed)
        isolation.advance([update.batch], lambda _: None)
    (output,) = isolation.advance(
        [updates[-1].batch], lambda result: dict(leaves(result))
    )
    return {
        Location(STEP, "output", path): value
        for path, value in output.items()
        if value is not None
    }


def choose_exports(learner: Learner, inputs: Sequence[Any]) -> Exports:
    """Returns the modules that a prediction calls, with their inputs.

    Args:
        learner: The baseline.
        inputs: Inputs of predictions, with different numbers of samples; the first one
            is that of the export.
    """
    first, *repetitions = (record_calls(learner, value) for value in inputs)
    further = [
        {call.name: call.inputs for call in repetition} for repetition in repetitions
    ]
    repeated = [
        call for call in first if all(call.name in arguments for arguments in further)
    ]
    calls = tuple(repeated[:MOST_MODULES])
    further_inputs = {
        call.name: [arguments[call.name] for arguments in further] for call in calls
    }
    return Exports(calls, further_inputs)


@torch.no_grad()
def predict(learner: Learner, inputs: Any) -> Any:
    """Returns a prediction in evaluation mode."""
    with learner.evaluating():
        return learner.predict(inputs)


def record_calls(learner: Learner, inputs: Any) -> list[ModuleCall]:
    """Returns the first call of each outermost module that a prediction calls with
    tensors alone.
    """
    calls: dict[str, ModuleCall] = {}
    depth = 0

    def enter(
        role: str,
        path: str,
        _: nn.Module,
        inputs: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        nonlocal depth
        # A module may change its inputs in place.
        call = ModuleCall(role, path, clones(inputs))
        has_tensors_alone = not options and all(
            isinstance(value, Tensor) for value in inputs
        )
        if depth == 0 and inputs and has_tensors_alone:
            calls.setdefault(call.name, call)
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    handles = []
    for role, root in learner.modules().items():
        for path, module in root.named_modules():
            hook = partial(enter, role, path)
            handles += [
                module.register_forward_pre_hook(hook, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            ]
    try:
        predict(learner, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return list(calls.values())


def run_programs(learner: Learner, exports: Exports) -> dict[str, Any]:
    """Returns the results of exported modules, by the modules' names and the numbers of
    the inputs.

    A result is None if a module cannot be exported, or the program refuses the sizes of
    the inputs.
    """
    results: dict[str, Any] = {}
    with learner.evaluating(), torch.no_grad():
        for call in exports.calls:
            module = learner.modules()[call.role].get_submodule(call.path)
            program = export_module(module, call.inputs)
            if program is None:
                results[call.name] = None
                continue
            inputs = (call.inputs, *exports.inputs[call.name])
            results[call.name] = [_run(program, arguments) for arguments in inputs]
    return results


def _run(program: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    """Returns the result of a program; None if it refuses inputs of these sizes."""
    try:
        return program(*clones(inputs))
    except Exception:
        # A program for fixed sizes may raise anything.
        return None


def export_module(
    module: nn.Module, inputs: tuple[Tensor, ...]
) -> Callable[..., Any] | None:
    """Returns a module as a program of ``torch.export``, for inputs of as many sizes as
    it allows.

    Returns:
        The program; None if the module cannot be exported.
    """
    automatic = torch.export.Dim.AUTO
    shapes = tuple(dict.fromkeys(range(tensor.dim()), automatic) for tensor in inputs)
    try:
        with _without_advice():
            program = torch.export.export(module, clones(inputs), dynamic_shapes=shapes)
            # The comparison shows whether results for other sizes are right.
            exported: Callable[..., Any] = program.module(check_guards=False)
    except Exception:
        # A module that cannot be traced, or has a reserved name, may raise anything.
        return None
    return exported


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silences warnings of exporters inside of the ``with``."""
    # Advice for the authors of modules does not help users.
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
