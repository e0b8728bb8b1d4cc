"""Stage that selects the algorithm of all convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from runner.api import Close, Pipeline, Setting, Stage, StageConfig, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from ..convolution.backend import Backend
    from ..convolution.geometry import Pair
    from ..convolution.key import ConvKey

BackendName = Literal[
    "native",
    "channels_last",
    "im2col",
    "fft",
    "winograd",
    "onednn_off",
    "cudnn",
    "cudnn_benchmark",
]
"""Names of the backends."""


class ConvBackendConfig(StageConfig):
    """Computes the convolutions of a model by one backend for each direction.

    What a backend cannot compute (a stride with ``fft``, a kernel of 2 x 2 with ``winograd``)
    stays with ``native``, and the closing table has the reason. A backend that can compute no
    layer is refused. ``onednn_off`` switches oneDNN off for the process while it computes: a
    convolution of another thread is then computed without oneDNN, too.

    When it helps: comparing backends inside of a training.
    When it hurts: one backend is rarely the fastest for all layers; ``native`` wins most shapes.
    """

    kind: ClassVar[str] = "conv_backend"
    implementation = "ConvBackend"
    phase: ClassVar[int] = 3
    claims: ClassVar[frozenset[str]] = frozenset({"conv"})

    forward: BackendName = "im2col"
    """Computes outputs."""
    backward_data: BackendName = "im2col"
    """Computes gradients of inputs."""
    backward_weight: BackendName = "im2col"
    """Computes gradients of weights."""

    def contract(self, setting: Setting) -> Close:
        """Returns that the algebra is the same, and rounding differs."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns that nothing changes if all backends are torch's choice."""
        names = {self.forward, self.backward_data, self.backward_weight}
        return "all directions are 'native'" if names == {"native"} else None


class ConvBackend(Stage):
    """Replaces the convolution."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the slot, and calls the network once to see which convolutions it has.

        Raises:
            UsageError: A backend can compute none of them.
        """
        import torch

        self.slots = pipeline.slots
        self.choices: dict[ConvKey, Backend] = {}
        self.refused: dict[str, set[str]] = {}
        # Torch cannot trace a function that is selected by a table; it runs between graphs.
        pipeline.slots.replace("conv", torch.compiler.disable(self.convolve))  # type: ignore[no-untyped-call]
        self._check(pipeline)

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
        """Computes a convolution by the backends of the recipe."""
        from ..convolution.function import convolve
        from ..convolution.geometry import ConvGeometry

        geometry = ConvGeometry(
            stride, padding, dilation, groups, transposed, output_padding
        )
        return convolve(x, w, geometry, self.choose, bias, self.slots.conv_workspace)

    def choose(self, key: ConvKey) -> Backend:
        """Returns the backend of a direction, or ``native`` for what that cannot compute."""
        backend = self.choices.get(key)
        if backend is None:
            backend = self.choices[key] = self._choice(key)
        return backend

    def closing_notes(self) -> Sequence[str]:
        """Reports which layers stayed with ``native``, and why."""
        return [
            f"{name}: {len(reasons)} kinds of layers are computed by 'native': "
            f"{'; '.join(sorted(reasons))}"
            for name, reasons in self.refused.items()
        ]

    def _choice(self, key: ConvKey) -> Backend:
        from ..convolution.registry import NATIVE, backend_named

        backend = backend_named(getattr(self.config, key.direction))
        reason = backend.refusal(key)
        if reason is None:
            return backend
        self.refused.setdefault(backend.name, set()).add(reason)
        return NATIVE

    def _check(self, pipeline: Pipeline) -> None:
        """Raises a UsageError if a backend can compute no layer of the network."""
        import torch

        from ..convolution.key import DIRECTIONS
        from ..convolution.registry import backend_named

        learner = pipeline.learner
        image = torch.zeros(1, *pipeline.source.shapes["image"], device=pipeline.device)
        network, *_ = learner.modules().values()
        # The layers of a network are known only when it is called.
        with learner.evaluating(), torch.no_grad(), pipeline.slots.precision():
            network(image)
        keys = list(self.choices)
        for direction in DIRECTIONS:
            backend = backend_named(getattr(self.config, direction))
            reasons = {backend.refusal(key.towards(direction)) for key in keys}
            if keys and None not in reasons:
                raise UsageError(f"conv_backend: {direction}: {min(map(str, reasons))}")
        # The call was made with one image; the training has other batches.
        self.choices.clear()
        self.refused.clear()
