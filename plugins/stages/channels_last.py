"""Stores images pixel by pixel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import (
    Batch,
    Close,
    Contract,
    Pipeline,
    Progress,
    Setting,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
    map_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor


class ChannelsLastConfig(StageConfig):
    """Keeps parameters and batches with four dimensions in torch's ``channels_last`` memory format.

    The channels of a pixel are then neighbours, which is what convolution kernels want; shapes stay as they are. Code
    that calls ``view`` on such a tensor has to call ``reshape`` instead.

    When it helps: convolutions, most of all in 16 bit on tensor cores, and on CPUs through oneDNN.
    When it hurts: single layers without a kernel for the format convert back and forth. Dropout draws other masks.
    """

    kind: ClassVar[str] = "channels_last"
    implementation = "ChannelsLast"
    phase: ClassVar[int] = 2
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})

    def contract(self, setting: Setting) -> Contract:
        """Returns ``Close``, or ``Statistical`` if an update uses random numbers: masks are filled
        in the order of memory.
        """
        return Statistical() if setting.model.draws() else Close()


class ChannelsLast(Stage):
    """Converts the parameters once, and every batch."""

    def attach(self, pipeline: Pipeline) -> None:
        """Converts the parameters, in place, and wraps the update.

        Raises:
            UsageError: none has four dimensions.
        """
        import torch

        modules = pipeline.learner.modules().values()
        if not any(parameter.dim() == 4 for module in modules for parameter in module.parameters()):
            raise UsageError(
                f"channels_last: no parameter of learner '{type(pipeline.learner).__name__}' has four dimensions "
                "(convolutions); switch the stage off"
            )
        for module in modules:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        pipeline.slots.wrap("update", self._converted)

    @staticmethod
    def _converted(step: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def convert(tensor: Tensor) -> Tensor:
            if tensor.dim() != 4:
                return tensor
            return tensor.contiguous(memory_format=torch.channels_last)

        def update(batch: Batch, noise: Batch, progress: Progress) -> Any:
            return step(map_tensors(convert, batch), map_tensors(convert, noise), progress)

        return update
