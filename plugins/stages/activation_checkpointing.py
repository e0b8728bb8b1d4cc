"""Activations that are forgotten and computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from runner.api import Exact, MemoryChoice, Pipeline, RunnerError, Setting, Stage, StageConfig, UsageError

from .block_segments import divide, postpone

if TYPE_CHECKING:
    from torch import nn


class ActivationCheckpointingConfig(StageConfig):
    """Keeps only the inputs of the model's blocks for the backward pass, which computes the rest a second time.

    ``Learner.blocks`` determines the blocks. Random numbers of a block (dropout) are repeated, whether
    torch, NumPy or Python generates them. Buffers that it writes (running statistics) and attributes
    that it assigns (a counter, a hidden state) are written once: the second computation starts from
    copies of all buffers of the block and from its attributes, which are kept until the backward pass.
    Inputs of a block and tensors in its attributes that are written in place meanwhile are refused.

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
    wraps: ClassVar[frozenset[str]] = frozenset({"backward"})
    works_through: ClassVar[frozenset[str] | None] = frozenset()

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
        pipeline.slots.wrap("backward", _explained)
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

    from runner.api import find_generators

    generators = find_generators(*blocks)
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    traced = dict(settings)
    if any(module._buffers for block in blocks for module in block.modules()):
        traced["context_fn"] = partial(_first_and_second, blocks, (), generators)

    def checkpointed(*inputs: Any, **named: Any) -> Any:
        # Without a backward pass, nothing is held that could be computed again.
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        # torch.compile repeats attributes and random numbers itself, and refuses buffers.
        if torch.compiler.is_compiling():
            return checkpoint(forward, *inputs, **traced, **named)
        # torch compares the versions of tensors that are inputs themselves.
        nested = [value for value in inputs if not isinstance(value, torch.Tensor)]
        contexts = partial(_first_and_second, blocks, (nested, named), generators)
        return checkpoint(forward, *inputs, context_fn=contexts, **settings, **named)

    return checkpointed


def _first_and_second(
    blocks: Sequence[nn.Module], inputs: Any, generators: Sequence[Any]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of the two computations of blocks."""
    from .block_state import FirstForward, StartState

    start = StartState(blocks, inputs, generators)
    return FirstForward(start), start


def _explained(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a backward pass whose errors name the stage."""
    import torch
    from torch.utils.checkpoint import CheckpointError

    def explained(*inputs: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(*inputs, **options)
        try:
            return backward(*inputs, **options)
        except CheckpointError as error:
            problem = "the second computation of a block has other tensors than the first"
            hint = "it reads something that is neither an input nor an attribute of it, and has changed since"
            raise RunnerError(f"activation_checkpointing: {problem}: {hint}; switch the stage off") from error
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            problem = "a tensor was written in place between the forward and the backward pass"
            hint = "if this trains without the stage, it is an input of a block: pass a copy (tensor.clone())"
            raise RunnerError(f"activation_checkpointing: {problem}; {hint}") from error

    return explained
