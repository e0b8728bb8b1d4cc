"""Tuning choices of a recipe that was loaded from a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.plugin.tuning import Setup, Tuning, machine_refusal
from runner.recipe.recipe import Recipe
from runner.system.errors import UsageError
from runner.system.tuning_machine import tuning_machine

if TYPE_CHECKING:
    import torch

    from runner.distributed.process_group import ProcessGroup
    from runner.plugin.stage import Plan, Stage


def tuning_of(recipe: Recipe, device: torch.device) -> Tuning:
    """Returns the initial tuning choices of a training: those of its lock, if it has one.

    Raises:
        UsageError: The choices are of another machine.
    """
    tuning = Tuning(tuning_machine(device))
    setup = _setup_of_stages(recipe)
    if setup is None:
        return tuning
    refusal = machine_refusal(setup, tuning.machine, f"{recipe.path}: tuning")
    if refusal is not None:
        raise UsageError(refusal)
    tuning.lock(setup.choices)
    return tuning


def fresh_tuning(device: torch.device) -> Tuning:
    """Returns tuning without choices: stages search, and reuse nothing of earlier processes."""
    return Tuning(tuning_machine(device), is_fresh=True)


def answering_tuning(recipe: Recipe, device: torch.device) -> Tuning:
    """Returns the tuning choices for a trained model; nothing is searched."""
    tuning = Tuning(tuning_machine(device), searches=False)
    setup = _setup_of_stages(recipe)
    # A model may be evaluated on any machine; invalid choices are replaced by defaults.
    if setup is not None and machine_refusal(setup, tuning.machine, "") is None:
        tuning.lock(setup.choices)
    return tuning


def prepare_once(
    stage: Stage, plan: Plan, notes: list[str], processes: ProcessGroup
) -> None:
    """Lets a stage select by measuring in the first process, for all of them.

    Args:
        stage: The stage.
        plan: What it changes.
        notes: Its notes, in this process.
        processes: The processes.
    """

    def prepare() -> dict[str, Any]:
        stage.prepare(plan)
        choices = plan.choices.items()
        return {"size": plan.batch_size, "notes": notes, "choices": choices}

    prepared = processes.decide(prepare)
    if processes.rank:
        plan.batch_size = prepared["size"]
        notes += prepared["notes"]
        for key, value in prepared["choices"].items():
            plan.choices.record(key, value)


def _setup_of_stages(recipe: Recipe) -> Setup | None:
    """Returns the choices of the stages that the recipe switches on; None if there are none."""
    if recipe.tuning is None:
        return None
    # A stage that was switched off has no use for its choices.
    choices = {
        kind: stage_choices
        for kind, stage_choices in recipe.tuning.choices.items()
        if kind in recipe.stages
    }
    return recipe.tuning._replace(choices=choices) if choices else None
