"""Blocks of a model that are computed together, although the model calls them one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from runner.api import RunnerError

if TYPE_CHECKING:
    from torch import nn

Forward = Callable[..., Any]
HINT = "set activation_checkpointing.segments to null"
OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg",
    "getitem", "iter", "len", "bool", "float", "lt", "le", "gt", "ge",
)  # fmt: skip
"""Operators that Python looks up in the class of a value."""


def divide(blocks: Sequence[nn.Module], segments: int) -> list[Sequence[nn.Module]]:
    """Returns consecutive groups of about equal length, at most that many and none of them empty."""
    count = len(blocks)
    bounds = [count * number // segments for number in range(segments + 1)]
    return [blocks[bounds[number] : bounds[number + 1]] for number in range(segments)]


def postpone(blocks: Sequence[nn.Module], wrap: Callable[[Forward], Forward]) -> None:
    """Makes consecutive blocks compute their results in one call, when the last one is called.

    Args:
        blocks: Blocks that the model calls one after another.
        wrap: Returns the function that is called in place of the one that computes all of them.
    """
    forwards = [block.forward for block in blocks]
    together = wrap(partial(_compute, forwards))
    last = len(blocks) - 1
    for position, block in enumerate(blocks):
        block.forward = partial(_call, forwards[position], together, position, last)


class Call(NamedTuple):
    """The inputs of a block other than the first one."""

    inputs: tuple[Any, ...]
    """Positional inputs."""
    named: dict[str, Any]
    """Named inputs."""


class Postponed:
    """Stands for the result of a block until the last block of its segment is called.

    Only the next block may use it: the result itself does not exist yet, so any other use raises a
    RunnerError.

    Args:
        start: The first input of the segment.
        calls: The calls of its blocks so far.
    """

    def __init__(self, start: Any, calls: Sequence[Call]) -> None:
        self.start = start
        self.calls = calls

    @classmethod
    def __torch_function__(cls, *arguments: Any, **named: Any) -> NoReturn:
        """Raises a RunnerError: a function of torch uses the result."""
        _refuse("its model uses the result of a block within a segment")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"its model reads '{name}' of the result of a block within a segment")


def _refuse_operator(*values: Any) -> NoReturn:  # noqa: ARG001 (Python passes the operands)
    _refuse("its model computes with the result of a block within a segment")


for _name in OPERATORS:
    setattr(Postponed, f"__{_name}__", _refuse_operator)


def _call(forward: Forward, together: Forward, position: int, last: int, x: Any, *inputs: Any, **named: Any) -> Any:
    """Computes a block, or postpones it to the end of its segment."""
    import torch

    # Without a backward pass nothing is kept, so there is nothing to save.
    if not torch.is_grad_enabled():
        return forward(x, *inputs, **named)
    call = Call(inputs, named)
    if position == 0:
        if isinstance(x, Postponed):
            _refuse("its model leaves a segment before the last block of it")
        postponed = Postponed(x, [call])
    else:
        if not isinstance(x, Postponed) or len(x.calls) != position:
            _refuse("the result of a block is not the first input of the next one")
        postponed = Postponed(x.start, [*x.calls, call])
    if position < last:
        return postponed
    return together(postponed.start, postponed.calls)


def _compute(forwards: Sequence[Forward], x: Any, calls: Sequence[Call]) -> Any:
    """Computes consecutive blocks."""
    for forward, call in zip(forwards, calls, strict=True):
        x = forward(x, *call.inputs, **call.named)
    return x


def _refuse(problem: str) -> NoReturn:
    raise RunnerError(f"activation_checkpointing.segments: {problem}; {HINT}")
