"""Calls of the slots of a learner, with inputs of the baseline or of other shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.plugin.registry import Registry
from runner.proof.subject import Build, Subject
from runner.proof.trees import clones
from runner.recipe.recipe import Recipe
from runner.system.tensor_trees import leaves, map_tensors, tensors
from runner.training.pipeline import assemble
from runner.verify.subjects import Training, baseline_step, recipe_with


class SlotCall(NamedTuple):
    """A call of a slot.

    Attributes:
        slot: Name of the slot.
        inputs: Its positional arguments.
        predicts: Whether it is called as in a prediction: in evaluation mode, without
            gradients.
    """

    slot: str
    inputs: tuple[Any, ...]
    predicts: bool = False


def slot_calls(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Makes subjects whose step performs a ``SlotCall`` and returns its result."""
    staged = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = assemble(staged, registry.files)
        training = Training(pipeline)

        def call(request: SlotCall) -> dict[str, Any]:
            step = getattr(pipeline.slots, request.slot)
            with ExitStack() as modes:
                if request.predicts:
                    modes.enter_context(pipeline.learner.evaluating())
                    modes.enter_context(torch.no_grad())
                output = step(*pipeline.transfer(request.inputs))
            # A result with gradients would keep the graph of its call.
            return {request.slot: map_tensors(Tensor.detach, output)}

        return training.subject(call)

    return build


def record_slot_calls(
    recipe: Recipe, registry: Registry, slots: Collection[str]
) -> list[SlotCall]:
    """Returns the first call of each slot in an update of the baseline.

    Calls with other arguments or results than tensors and numbers are left out: objects
    of one pipeline have no counterpart in another one.
    """
    calls: dict[str, SlotCall] = {}

    def record(
        name: str, step: Callable[..., Any], *inputs: Any, **options: Any
    ) -> Any:
        # A slot may change its inputs in place.
        copies = clones(inputs)
        output = step(*inputs, **options)
        if not options and _has_tensors(inputs) and _has_tensors(output):
            calls.setdefault(name, SlotCall(name, map_tensors(Tensor.detach, copies)))
        return output

    with baseline_step(recipe, registry) as step:
        names = sorted({*slots} & {*step.learner.config.slots})
        for name in names:
            step.pipeline.slots.wrap(name, partial(partial, record, name))
        step(step.next())
    return list(calls.values())


def _has_tensors(value: Any) -> bool:
    """Returns whether a tree consists of tensors, with numbers and texts among them."""
    plain = Tensor | bool | int | float | str | None
    has_tensor = next(tensors(value), None) is not None
    return has_tensor and all(isinstance(leaf, plain) for _, leaf in leaves(value))
