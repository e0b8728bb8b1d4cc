"""Activations that are forgotten and computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from runner.api import Exact, MemoryChoice, Pipeline, Setting, Stage, StageConfig, UsageError

from .block_segments import divide, postpone

if TYPE_CHECKING:
    from torch import nn


class ActivationCheckpointingConfig(StageConfig):
    """Keeps only the inputs of the model's blocks for the backward pass, which computes the rest a second time.

    ``Learner.blocks`` determines the blocks. Random numbers of a block (dropout) are repeated, and
    buffers that it writes (running statistics) are written once.

    With ``segments``, consecutive blocks form groups of about equal length, and only the input of
    a group is kept. The last group is not computed again, because its backward pass comes first.
    Blocks of a group must follow each other: the result of one is the first input of the next.
    Where activations of a block are larger than its input, single blocks keep less: an update of a
    graph transformer with four blocks held 42 % less in two segments, and 62 % less without them.

    When it helps: activations fill the memory, as with deep models, long sequences and large images. An update of two
    graph transformers held 59 and 62 % less, their processes of 445 MiB 8 % less.
    When it hurts: always in time, by about one forward pass in three of an update.
    """

    kind: ClassVar[str] = "activation_checkpointing"
    implementation = "ActivationCheckpointing"
    phase: ClassVar[int] = 2

    segments: Annotated[int, Field(ge=2)] | None = None
    """Number of groups of consecutive blocks; by default, each block is computed again by itself."""

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
            UsageError: the learner names none, or fewer than ``segments``.
        """
        owner = type(pipeline.learner).__name__
        blocks = pipeline.learner.blocks()
        if not blocks:
            raise UsageError(
                f"activation_checkpointing: learner '{owner}' names no blocks (Learner.blocks); switch the stage off"
            )
        segments = self.config.segments
        if segments is None:
            for block in blocks:
                block.forward = _checkpointed(block)
            pipeline.note(f"{len(blocks)} blocks")
            return
        if segments > len(blocks):
            limit = f"exceeds the number of blocks of '{owner}' ({len(blocks)})"
            raise UsageError(f"activation_checkpointing.segments: {segments} {limit}")
        groups = divide(blocks, segments)
        for group in groups[:-1]:
            postpone(group, partial(_recomputed, group))
        pipeline.note(f"{len(blocks)} blocks in {len(groups)} segments")


def _checkpointed(block: nn.Module) -> Callable[..., Any]:
    return _recomputed([block], block.forward)


def _recomputed(blocks: Sequence[nn.Module], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that keeps its inputs only; ``blocks`` are those that it computes."""
    import torch
    from torch.utils.checkpoint import checkpoint

    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    # Without buffers there is nothing to discard, and entering the contexts takes time.
    if any(True for block in blocks for _ in block.buffers()):
        settings["context_fn"] = partial(_first_and_again, blocks)

    def checkpointed(*inputs: Any, **named: Any) -> Any:
        # Without a backward pass, nothing is held that could be computed again.
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return checkpoint(forward, *inputs, **settings, **named)

    return checkpointed


def _first_and_again(
    blocks: Sequence[nn.Module],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _discarding_writes(blocks)


@contextmanager
def _discarding_writes(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Discards writes to the buffers of blocks inside the ``with``."""
    modules = [module for block in blocks for module in block.modules()]
    saved = [(module, dict(module._buffers)) for module in modules if module._buffers]
    # Blocks write to copies; the buffers themselves must keep the same memory.
    for module, buffers in saved:
        for name, tensor in buffers.items():
            module._buffers[name] = None if tensor is None else tensor.clone()
    try:
        yield
    finally:
        for module, buffers in saved:
            module._buffers.update(buffers)
