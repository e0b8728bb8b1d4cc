"""Checks that every role of a learner is made and has an optimizer of torch, and that
checkpoints contain its module.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.plugin.learner import Learner
from runner.plugin.role import Role
from runner.system.errors import RunnerError
from runner.system.suggestions import method_named
from runner.system.tensor_trees import tensors

_ATTRIBUTES = ("param_groups", "state", "defaults")
"""Attributes of every optimizer of torch."""


def complete_optimizers(learner: Learner) -> None:
    """Gives every optimizer the hooks that ``Optimizer.__init__`` makes.

    Some optimizers around others, such as Lookahead, do not call it; guards and schedules need the
    hooks.

    Raises:
        RunnerError: A role has no optimizer, or another object as its optimizer.
    """
    method = method_named(learner, "configure_optimizers")
    # A learner with an ``optimizers`` of its own may keep them elsewhere.
    has_roles = type(learner).optimizers is Learner.optimizers
    for name, role in learner.roles.items() if has_roles else ():
        if isinstance(role, Role) and not hasattr(role, "optimizer"):
            raise RunnerError(f"{method} should set the optimizer of role '{name}'")
    for name, optimizer in learner.optimizers():
        cls = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise RunnerError(
                f"{method} should make a torch.optim.Optimizer for role '{name}', got {cls}: "
                f"derive {cls} from torch.optim.Optimizer"
            )
        missing = [key for key in _ATTRIBUTES if not hasattr(optimizer, key)]
        if missing:
            raise RunnerError(
                f"{method} should make an optimizer with '{missing[0]}' for role '{name}', "
                f"got {cls}: {cls}.__init__ should call super().__init__(params, defaults)"
            )
        has_hooks = "_optimizer_step_post_hooks" in vars(optimizer)
        if not has_hooks or not getattr(type(optimizer).step, "hooked", False):
            # Torch completes an optimizer that was unpickled in the same way.
            Optimizer.__setstate__(optimizer, {})


def check_roles(learner: Learner) -> None:
    """Raises a RunnerError for a role that is never made, or that no checkpoint would contain.

    Args:
        learner: A learner whose optimizers are made.
    """
    _refuse_unmade(learner)
    _refuse_unsaved(learner)


def _refuse_unmade(learner: Learner) -> None:
    """Raises a RunnerError if a role has settings that no optimizer reads.

    The role's module would not be trained.
    """
    roles = {name for name, _ in learner.optimizers()}
    unmade = learner.context.optimizers.keys() - roles
    if unmade:
        role = min(unmade)
        method = method_named(learner, "__init__")
        raise RunnerError(
            f"{type(learner.config).__name__}.roles names '{role}', which "
            f"{type(learner).__name__} never makes: make it with "
            f"self.role('{role}', module) in {method}, or remove the name"
        )


def _refuse_unsaved(learner: Learner) -> None:
    """Raises a RunnerError if a role has a module that no checkpoint would contain."""
    modules = list(learner.modules().values())
    saved = {id(layer) for module in modules for layer in module.modules()}
    for module in modules:
        saved.update(map(id, _state_of(module)))
    for name, role in learner.roles.items():
        network = getattr(role, "module", None)
        if not isinstance(network, nn.Module) or id(network) in saved:
            continue
        missing = [tensor for tensor in _state_of(network) if id(tensor) not in saved]
        if missing and not _has_copies(learner, missing):
            raise RunnerError(
                f"{method_named(learner, 'modules')} should return the module of role '{name}', "
                "too: no checkpoint would contain it, and neither train.ema nor evaluation mode "
                "would reach it"
            )


def _state_of(module: nn.Module) -> list[Tensor]:
    """Returns the parameters and persistent buffers of a module."""
    values = module.state_dict(keep_vars=True).values()
    return [value for value in values if isinstance(value, Tensor)]


def _has_copies(learner: Learner, missing: Iterable[Tensor]) -> bool:
    """Returns whether a plugin's ``state_dict`` has tensors equal to all of these."""
    if type(learner).state_dict is Learner.state_dict:
        return False
    saved = list(tensors(learner.state_dict()))
    return all(
        any(tensor.dtype == copy.dtype and torch.equal(tensor, copy) for copy in saved)
        for tensor in missing
    )
