"""The fastest algorithm for each convolution, found by measuring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from runner.api import Close, Pipeline, Setting, Stage, StageConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ..convolution.geometry import Pair


class AlgorithmSearchConfig(StageConfig):
    """Selects a backend for each convolution, and for each of its directions, by measuring.

    The first call of a convolution is an experiment: backends whose rounding error
    exceeds the contract are rejected, the others are screened one direction at a time,
    and the best plan is timed again with new inputs as a complete training step,
    together with ``native`` and a second ``native`` (A/A). ``native`` stays unless the
    interval of the gain is above 1. The plans are a part of the run: its lock records
    them, and a run of the lock computes the same bits without a search.

    When it helps: trainings with the same few shapes of images in every update, for minutes.
    When it hurts: shapes that change all the time, each of which costs a search; many
    shapes stay with ``native``.
    """

    kind: ClassVar[str] = "algorithm_search"
    implementation = "AlgorithmSearch"
    phase: ClassVar[int] = 3
    claims: ClassVar[frozenset[str]] = frozenset({"conv"})
    unplanned: ClassVar[str] = "it selects algorithms by timing them"

    workspace: Annotated[int, Field(ge=0)] = 2**28
    """Bytes of intermediate results that a backend may need."""
    seconds: Annotated[float, Field(ge=0)] = 60.0
    """Time of all searches together, after which further shapes stay with ``native``."""
    deterministic: bool = False
    """Whether backends are left out that may return other bits the next time."""
    search_every_call: bool = False
    """Whether each call searches again, for comparison with a cache; nothing is recorded then."""

    def contract(self, setting: Setting) -> Close:
        """Returns that the algebra is the same, and rounding differs."""
        return Close()

    def tunes(self, setting: Setting) -> bool:
        """Returns True: which backend is the fastest depends on the machine."""
        return True


class AlgorithmSearch(Stage):
    """Replaces the convolution."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the slot."""
        import torch

        from ..convolution.planner import Planner, on_device
        from ..convolution.search import SearchLimits

        config = self.config
        self.slots = slots = pipeline.slots
        self.planner = Planner(
            pipeline.choices,
            lambda: slots.conv_plans(),
            on_device(pipeline.device, lambda: slots.conv_workspace),
            SearchLimits(
                workspace=config.workspace,
                deterministic=config.deterministic,
                seconds=config.seconds,
            ),
            every_call=config.search_every_call,
        )
        # Torch cannot trace a function that is selected by a table; it runs between graphs.
        slots.replace("conv", torch.compiler.disable(self.convolve))  # type: ignore[no-untyped-call]

    def convolve(
        self,
        x: Tensor,
        w: Tensor,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        transposed: bool,
        output_padding: Pair,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Computes a convolution by the backends of its plan."""
        from ..convolution.geometry import ConvGeometry

        geometry = ConvGeometry(
            stride, padding, dilation, groups, transposed, output_padding
        )
        return self.planner.convolve(x, w, geometry, bias, self.slots.conv_workspace)

    def closing_notes(self) -> Sequence[str]:
        """Reports what was selected."""
        return self.planner.notes()
