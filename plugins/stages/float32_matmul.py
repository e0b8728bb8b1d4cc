"""Selects the precision of products of float32 matrices."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from runner.api import Pipeline, Setting, Stage, StageConfig, Statistical

if TYPE_CHECKING:
    import torch

FLOAT32_ERROR = 1e-5
"""True float32 is off by some 1e-7 of a product's size, TF32 by 3e-4, bf16 by 3e-3."""


class Float32MatmulConfig(StageConfig):
    """Lets matrix products of float32 tensors use faster arithmetic, inside the update only.

    ``high`` allows TF32 (10 bits of mantissa), ``medium`` also bf16 (7 bits), as in
    ``torch.set_float32_matmul_precision``. The effect depends on the hardware: on a CPU
    ``medium`` selects oneDNN, which without fast bf16 multiplies in true float32, by
    kernels that can be much faster than torch's default ones. The stage multiplies two
    matrices and reports which of the two it measured.

    When it helps: GPUs with tensor cores; CPUs on which oneDNN is faster than the default (an AMD
    EPYC with AVX-512, for example).
    When it hurts: where it rounds, Q values of some hundreds lose their last digits; and it has
    little effect together with ``amp``, which covers most products already.
    """

    kind: ClassVar[str] = "float32_matmul"
    implementation = "Float32Matmul"
    phase: ClassVar[int] = 3
    unplanned: ClassVar[str] = "it changes no memory"
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})

    precision: Literal["high", "medium"] = "medium"
    """Precision of the factors: at least TF32's, or at least bf16's."""

    def contract(self, setting: Setting) -> Statistical:
        """Returns ``Statistical``: it may round, and only trainings can determine
        whether that harms.
        """
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason on a CPU, which has no TF32."""
        if setting.device.type == "cpu" and self.precision == "high":
            return "a CPU has no TF32; use precision: medium"
        return None


class Float32Matmul(Stage):
    """Sets torch's precision of float32 products during updates."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the update, and reports the precision of the hardware."""
        pipeline.slots.wrap("update", self._relaxed)
        error = self._error(pipeline.device)
        kind = "true float32" if error < FLOAT32_ERROR else "rounded factors"
        pipeline.note(f"{kind}: a product is off by {error:.0e} of its size")

    def _relaxed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def update(*arguments: Any) -> Any:
            previous = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(self.config.precision)
            try:
                return step(*arguments)
            finally:
                torch.set_float32_matmul_precision(previous)

        return update

    def _error(self, device: "torch.device") -> float:
        """Returns the relative error of a product of the kind that an update computes."""
        import torch

        generator = torch.Generator(device).manual_seed(0)
        first, second = torch.randn(2, 8, 128, 128, generator=generator, device=device, dtype=torch.float32)
        product = self._relaxed(torch.matmul)(first, second)
        exact = first.double() @ second.double()
        return float((product - exact).norm() / exact.norm())
