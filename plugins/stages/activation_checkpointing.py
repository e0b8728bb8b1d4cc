"""Activations that are forgotten and computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from runner.api import Exact, MemoryChoice, Pipeline, Setting, Stage, StageConfig, UsageError

from .block_segments import divide, postpone

if TYPE_CHECKING:
    from torch import Tensor, nn

    _Buffers = dict[nn.Module, dict[str, Tensor | None]]


class ActivationCheckpointingConfig(StageConfig):
    """Keeps only the inputs of the model's blocks for the backward pass, which computes the rest a second time.

    ``Learner.blocks`` determines the blocks. Random numbers of a block (dropout) are repeated, and
    buffers that it writes (running statistics) are written once. The second computation starts from
    copies of all buffers of the block, which are kept until the backward pass.

    With ``segments``, consecutive blocks form groups of about equal length, and only the input of
    a group is kept. The last group is not computed again, because its backward pass comes first.
    Blocks of a group must follow each other: the result of one is the first input of the next.
    Where activations of a block are larger than its input, single blocks keep less: an update of a
    graph transformer with four blocks held 42 % less in two segments, and 62 % less without them.

    When it helps: activations fill the memory, as with deep models, long sequences and large images. An update of two
    graph transformers held 59 and 62 % less, their processes of 445 MiB 8 % less.
    When it hurts: always in time, by about one forward pass in three of an update. Blocks with large
    buffers, such as masks, need memory for their copies.
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
    # Without buffers there is nothing to copy, and entering the contexts takes time.
    if any(module._buffers for block in blocks for module in block.modules()):
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
    return nullcontext(), _StartBuffers(blocks)


class _StartBuffers(AbstractContextManager[None]):
    """The buffers of blocks at the start of a forward.

    Inside the ``with``, the blocks have these numbers again, as a power iteration or a cumulative
    average needs them, and the buffers that they write or register are discarded. A graph that
    is kept for several backward passes enters it several times.

    Args:
        blocks: The blocks that the forward computes.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for block in blocks for module in block.modules())
        self._start = _copies({module: module._buffers for module in modules})
        self._current: _Buffers = {}

    def __enter__(self) -> None:
        self._current = {module: dict(module._buffers) for module in self._start}
        # Blocks write to copies, because the graph may be computed once more.
        _assign(_copies(self._start))

    def __exit__(self, *_: object) -> None:
        # The current buffers themselves are assigned, which must keep the same memory.
        _assign(self._current)
        self._current = {}


def _copies(buffers: _Buffers) -> _Buffers:
    """Returns copies of buffers; one that several modules share stays shared."""
    tensors = {id(tensor): tensor for named in buffers.values() for tensor in named.values()}
    copies = {key: None if tensor is None else tensor.clone() for key, tensor in tensors.items()}
    return {module: {name: copies[id(tensor)] for name, tensor in named.items()} for module, named in buffers.items()}


def _assign(buffers: _Buffers) -> None:
    for module, named in buffers.items():
        module._buffers.clear()
        module._buffers.update(named)
