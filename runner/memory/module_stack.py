"""Running modules as torch's tracker of modules reports them, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._tools.mod_tracker import ModTracker
from torch.utils._pytree import tree_leaves

from runner.memory.kinds import Holder

OUTSIDE = "update"
"""Module of memory that is allocated while none is running."""


class ModuleStack(ModTracker):
    """Names of the modules that compute, also in backward passes."""

    def name_modules(self, modules: Mapping[str, nn.Module]) -> None:
        """Sets the names of modules, from which those of their parts follow."""
        for name, module in modules.items():
            self._known_modules[module] = name
            self._get_mod_name(module)  # type: ignore[no-untyped-call]

    @property
    def holder(self) -> Holder:
        """The innermost module that computes."""
        names = self.parents - {"Global"}
        innermost = max(names, key=lambda name: name.count("."), default=OUTSIDE)
        return Holder(OUTSIDE, innermost)

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:  # noqa: A002 (torch's name)
        # The backward pass of a module ends with the first gradient of an input. torch's hook for
        # all of them would hold this one until the others are complete: that of a tensor that all
        # modules share is complete last. Without inputs, torch enqueues what ends the module.
        enqueued = self._post_bw_callbacks_to_enqueue
        count = len(enqueued)
        super()._fw_pre_hook(mod, ())  # type: ignore[no-untyped-call]
        inputs = [*filter(_is_differentiated, tree_leaves(input))]
        if inputs and len(enqueued) > count:
            register_multi_grad_hook(inputs, enqueued.pop(), mode="any")


def _is_differentiated(value: Any) -> bool:
    # No hook may wait for the gradient of a leaf while torch.autograd.grad computes one.
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf
