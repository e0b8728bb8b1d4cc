"""Automatic mixed precision."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from runner.api import MemoryChoice, Pipeline, Setting, Stage, StageConfig, State, Statistical, UsageError, slow_bf16


class AmpConfig(StageConfig):
    """Runs the networks' hidden layers in 16-bit floating point under ``torch.autocast``.

    Heads, log-probabilities, TD targets, temperatures, Polyak averages and optimizers stay in full precision. bf16
    needs no loss scaling; fp16 scales the loss, unscales before clipping and updates the scale once per step.

    When it helps: matmuls that are large, on hardware with 16-bit matrix units (AVX512-BF16, AMX, tensor cores).
    When it hurts: small networks, where converting costs more than it saves; fp16 on a CPU is refused, being about 90
    times slower. Inactive on a CPU without bf16 arithmetic, and on a Xeon whose AMX a virtual machine hides: what is
    left multiplied half as fast as float32 (one core, matrices 128 to 2,048 wide).
    """

    kind: ClassVar[str] = "amp"
    implementation = "Amp"
    phase: ClassVar[int] = 2
    usual: ClassVar[bool] = True
    claims: ClassVar[frozenset[str]] = frozenset({"precision", "unscale", "optimizer_step"})
    wraps: ClassVar[frozenset[str]] = frozenset({"backward", "update"})

    works_through: ClassVar[frozenset[str] | None] = frozenset({"precision"})

    dtype: Literal["bf16", "fp16"] = "bf16"
    """bf16 keeps float32's range; fp16 has more digits and needs loss scaling."""

    def contract(self, setting: Setting) -> Statistical:
        """Returns ``Statistical``: it rounds, and only trainings can determine whether that
        harms.
        """
        return Statistical()

    @classmethod
    def memory_choices(cls, batch_size: int) -> Sequence[MemoryChoice]:  # noqa: ARG003 (some depend on it)
        """Returns the type that needs no loss scaling."""
        return (MemoryChoice({"dtype": "bf16"}, 1.0, "activations are rounded to bf16"),)

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if the hardware has no bf16; raises for fp16 on a CPU."""
        import torch

        cpu = setting.device.type == "cpu"
        if cpu and self.dtype == "fp16":
            raise UsageError("fp16 on a CPU is about 90 times slower than float32; use dtype: bf16 or switch amp off")
        if self.dtype == "fp16":
            return None
        if cpu:
            return slow_bf16()
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return "this GPU has no bf16 arithmetic; use dtype: fp16"
        return None


class Amp(Stage):
    """Sets the precision of forwards, and scales losses for fp16."""

    def attach(self, pipeline: Pipeline) -> None:
        """Sets the precision, and for fp16 the loss scaling."""
        import torch

        device = pipeline.device.type
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.config.dtype]
        pipeline.slots.replace("precision", lambda: torch.autocast(device, dtype))
        self.scaler: torch.amp.GradScaler | None = None
        if self.config.dtype == "fp16":
            self.scaler = torch.amp.GradScaler(device)
            self.checks_gradients = True
            pipeline.slots.wrap("backward", self._scaled_backward)
            pipeline.slots.replace("unscale", self.scaler.unscale_)
            pipeline.slots.replace("optimizer_step", self.scaler.step)
            pipeline.slots.wrap("update", self._updated_scale)

    def state_dict(self) -> State:
        """Returns the loss scale."""
        return {} if self.scaler is None else {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restores the loss scale."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def _scaled_backward(self, step: Callable[..., None]) -> Callable[..., None]:
        def backward(loss: Any) -> None:
            assert self.scaler is not None
            step(self.scaler.scale(loss))

        return backward

    def _updated_scale(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def update(*arguments: Any) -> Any:
            assert self.scaler is not None
            output = step(*arguments)
            # Once per update, although several optimizers are stepped with the same scale.
            self.scaler.update()
            return output

        return update
