"""Runs the complete update as one CUDA graph."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from runner.api import (
    Batch,
    Close,
    Pipeline,
    Progress,
    Setting,
    Stage,
    StageConfig,
    State,
    UsageError,
    tensors,
)

from . import captured_call
from .captured_call import CapturedCall, copied, copy_all

if TYPE_CHECKING:
    from torch import Generator, Tensor

WARM_UP = 3
NOT_FROM_ZERO = ("ASGD", "NAdam", "Rprop")
"""Optimizers whose initial state is not zero, which the capture would not restore."""


class CudaGraphConfig(StageConfig):
    """Captures a complete update (losses, backward, clipping, optimizers, targets) and replays it.

    The GPU then receives one launch instead of hundreds. Batch and noise are copied into fixed places before every
    replay; optimizers are made capturable (their state must start at zero, as Adam's does). Warm-up updates run before
    the capture; what they changed in the learner is put back.

    With ``scope: iteration``, steps of the source that it declares as capturable are graphs, too: those of a
    simulator on the GPU, the sampling from its replay buffer, and new priorities.

    When it helps: small networks and batches, where launching costs more than computing.
    When it hurts: large networks gain nothing; all intermediate memory stays reserved.
    """

    kind: ClassVar[str] = "cuda_graph"
    implementation = "CudaGraph"
    phase: ClassVar[int] = 3
    captures: ClassVar[bool] = True
    one_process: ClassVar[str] = "a captured update cannot wait for other processes"
    unplanned: ClassVar[str] = "a graph keeps all memory of an update reserved, and copies of the batch"
    wraps: ClassVar[frozenset[str]] = frozenset({"make_optimizer", "update"})
    works_through: ClassVar[frozenset[str] | None] = frozenset({"update"})

    scope: Literal["update", "iteration"] = "update"
    """What is captured: updates, or the whole iteration with the steps of the source between them."""

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason without CUDA; raises a UsageError if an update cannot be captured."""
        if setting.device.type != "cuda":
            return "CUDA graphs need a CUDA device"
        if setting.model.depends_on_progress:
            raise UsageError(f"cuda_graph replays one update for ever, and those of '{setting.model.kind}' change")
        if setting.data.shapes_vary:
            raise UsageError(f"cuda_graph needs batches of one shape, and those of '{setting.data.kind}' vary")
        # The loss scaler decides on the host whether to step, which a graph cannot.
        amp = setting.stages.get("amp")
        if amp is not None and getattr(amp, "dtype", None) == "fp16":
            raise UsageError("cuda_graph cannot capture fp16 loss scaling; use amp: {dtype: bf16}")
        return None


class CudaGraph(Stage):
    """Captures the first update and replays it."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the creation of optimizers and the update, which is captured when it first runs."""
        self.learner = pipeline.learner
        if self.learner.periods():
            raise UsageError("cuda_graph replays one update for ever, and a part of this model is not stepped in each")
        self.replay: Any = None
        pipeline.slots.wrap("make_optimizer", self._capturable)
        pipeline.slots.wrap("update", self._graphed)
        self.calls: list[CapturedCall] = []
        if self.config.scope == "iteration":
            self._capture_source(pipeline)

    def load_state_dict(self, state: State) -> None:
        """Discards the graph, which contains the previous optimizer state."""
        super().load_state_dict(state)
        self.replay = None
        for call in self.calls:
            call.forget()

    def _capture_source(self, pipeline: Pipeline) -> None:
        """Replays the steps that the source declares as capturable."""
        if not pipeline.source.capturable:
            pipeline.note("scope: iteration: nothing of this source can be captured")
        generators = [
            generator for generator in pipeline.generators.values() if generator.device.type == pipeline.device.type
        ]
        for name in pipeline.source.capturable:
            pipeline.slots.wrap(name, partial(self._replayed, name, generators))

    def _replayed(self, name: str, generators: "list[Generator]", step: Callable[..., Any]) -> Callable[..., Any]:
        call = CapturedCall(name, step, generators)
        self.calls.append(call)
        return call

    @staticmethod
    def _capturable(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_optimizer(optimizer: Any, parameters: Any, **settings: Any) -> Any:
            can_capture = "capturable" in inspect.signature(optimizer).parameters
            if not can_capture or optimizer.__name__ in NOT_FROM_ZERO:
                raise UsageError(f"cuda_graph: {optimizer.__name__} cannot be captured; switch the stage off")
            import torch

            created = make(optimizer, parameters, **settings, capturable=True)
            for group in created.param_groups:
                if group.get("fused") and torch.get_default_dtype() == torch.float64:
                    # These kernels read the rate from a float32 tensor, which rounds it. None, not False: with that,
                    # torch takes its loop instead of foreach kernels, which makes NaN of 0/0 at a rate of zero.
                    group["fused"] = None
                # A schedule changes it in place, where the graph reads it.
                group["lr"] = torch.tensor(float(group["lr"]), device=torch.cuda.current_device())
            return created

        return make_optimizer

    def _graphed(self, step: Callable[..., Batch]) -> Callable[..., Batch]:
        def update(batch: Batch, noise: Batch, progress: Progress) -> Batch:
            if self.replay is None:
                self._capture(step, batch, noise, progress)
            fresh = list(tensors([batch, noise]))
            for captured, tensor in zip(self.inputs, fresh, strict=True):
                if tensor.shape != captured.shape:
                    shapes = f"{tuple(captured.shape)} is now {tuple(tensor.shape)}"
                    raise UsageError(f"cuda_graph needs batches of one shape: {shapes}")
            copy_all(self.inputs, fresh)
            self.replay()
            # The next replay overwrites the output.
            output: Batch = copied(self.output)
            return output

        return update

    def _capture(self, step: Callable[..., Batch], batch: Batch, noise: Batch, progress: Progress) -> None:
        batch, noise = copied([batch, noise])
        self.inputs = list(tensors([batch, noise]))
        initial = {path: tensor.clone() for path, tensor in _tensors(self.learner.complete_state())}
        with captured_call.side_stream():
            for _ in range(WARM_UP):
                step(batch, noise, progress)
        self._restore(initial)
        self.replay, self.output = captured_call.capture(lambda: step(batch, noise, progress), ())

    def _restore(self, initial: "dict[str, Tensor]") -> None:
        """Gives the learner the state from before the warm-up."""
        import torch

        with torch.no_grad():
            for path, tensor in _tensors(self.learner.complete_state()):
                if path in initial:
                    tensor.copy_(initial[path])
                else:
                    # Adam's moments and step count, which the first warm-up update made.
                    tensor.zero_()


def _tensors(state: State | list[Any], path: str = "") -> "Iterator[tuple[str, Tensor]]":
    import torch

    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, torch.Tensor):
            yield f"{path}/{key}", value
        elif isinstance(value, dict | list):
            yield from _tensors(value, f"{path}/{key}")
