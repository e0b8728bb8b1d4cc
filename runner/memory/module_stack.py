"""Running modules as torch's tracker of modules reports them, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed._tools.mod_tracker import ModTracker
from torch.utils._pytree import tree_map_only

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
        # No hook may wait for the gradient of a leaf while torch.autograd.grad computes one.
        inputs = tree_map_only(Tensor, _without_leaf, input)
        super()._fw_pre_hook(mod, inputs)  # type: ignore[no-untyped-call]


def _without_leaf(tensor: Tensor) -> Tensor | None:
    return None if tensor.is_leaf else tensor
