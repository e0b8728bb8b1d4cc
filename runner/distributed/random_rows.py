"""Random numbers of an update that belong to samples, whatever process has them."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.system.errors import RunnerError

INTERVALS = frozenset(
    {
        "aten::bernoulli",
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::exponential_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::multinomial",
        "aten::native_dropout",
        "aten::normal",
        "aten::normal_",
        "aten::rand",
        "aten::rand_like",
        "aten::randint",
        "aten::randint_like",
        "aten::randn",
        "aten::randn_like",
        "aten::random_",
        "aten::uniform_",
    }
)
"""Operators that draw equally many numbers for every row, whatever the values of their inputs."""
RATES = ("dropout", "dropout_p")
"""Arguments of kernels that draw numbers inside, unless these are 0."""
_FILLER = 0.5
"""Parameter of the rows of other processes: a probability, a mean or a deviation."""


class RandomRows(TorchDispatchMode):
    """Gives each process the random numbers that a single process would draw for its samples.

    Inside ``of``, an operator that draws numbers for the samples of this process draws them for
    the entire batch, and returns the rows of this process. All processes draw the same numbers, so
    their generators have the same state. A mask thus belongs to a sample, not to a process.
    Numbers without dimensions are the same for all samples.

    Below autograd, operators of composite functions (attention, ``nn.TransformerEncoderLayer``)
    and those of a recomputed forward pass in a backward pass are visible, too.

    Args:
        modules: The modules of the learner, by name, for messages.
        kind: The kind of the model, for messages.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: Mapping[str, nn.Module], kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.modules = modules
        self.kind = kind
        self.size = 0
        self.rows = slice(0, 0)
        # Digest of the shapes of the last update's numbers.
        self.digest = 0
        self._are_random: dict[Any, bool] = {}

    @contextmanager
    def of(self, size: int, rows: slice) -> Iterator[None]:
        """Draws for the entire batch inside the ``with``.

        Args:
            size: Number of samples of the batch.
            rows: Those of this process.
        """
        self.size = size
        self.rows = rows
        self.digest = 0
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls an operator; for the entire batch if it draws random numbers."""
        options = kwargs or {}
        # Every operator of an update comes here, and reading its tags takes a microsecond.
        is_random = self._are_random.get(func)
        if is_random is None:
            is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
            self._are_random[func] = is_random
        if not is_random or _draws_nothing(func, args, options):
            return func(*args, **options)
        shapes = [*_shapes(args)]
        shape = max(shapes, key=len, default=())
        is_known = func._schema.name in INTERVALS and func._schema.is_mutable is _is_in_place(func)
        if not shapes or not is_known:
            self._refuse_kernel(func, shape)
        self.digest = zlib.crc32(f"{func} {shape[1:]} {_order(args)}".encode(), self.digest)
        if not shape:
            return func(*args, **options)
        samples = self.rows.stop - self.rows.start
        if any(len(other) and other[0] != samples for other in shapes):
            self._refuse_rows(func, shape)
        return self.draw(func, args, options)

    def draw(self, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Returns this process's rows of what an operator draws for the entire batch."""
        if _is_in_place(func):
            # Its values do not matter.
            entire_args = [self._empty(args[0]), *map(self._entire, args[1:])]
        else:
            entire_args = [*map(self._entire, args)]
        output = func(*entire_args, **options)
        if _is_in_place(func):
            return args[0].copy_(entire_args[0][self.rows])
        if isinstance(output, Tensor):
            return self._own(output)
        return tuple(self._own(value) for value in output)

    def fingerprint(self, generator: torch.Generator) -> float:
        """Returns a number that is the same in all processes if they have drawn the same numbers."""
        state = generator.get_state().numpy().tobytes()
        # Sums of squares of 16 bits are exact in float64, also of a thousand processes.
        return float(zlib.crc32(state, self.digest) & 0xFFFF)

    def _entire(self, argument: Any) -> Any:
        """Returns a tensor or a shape for the entire batch."""
        if isinstance(argument, list | tuple):
            return [self.size, *argument[1:]]
        if not isinstance(argument, Tensor) or not argument.dim():
            return argument
        entire = self._empty(argument).fill_(_FILLER)
        entire[self.rows] = argument
        return entire

    def _empty(self, tensor: Tensor) -> Tensor:
        """Returns a tensor for the entire batch, in the same order of memory."""
        shape = (self.size, *tensor.shape[1:])
        order = physical_order(tensor)
        return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)

    def _own(self, entire: Tensor) -> Tensor:
        # A view would hold the numbers of the entire batch in memory.
        return entire[self.rows].clone()

    def _refuse_kernel(self, func: Any, shape: Sequence[int]) -> NoReturn:
        raise RunnerError(
            f"{self._problem(func, shape)}, a kernel that draws by itself or as many numbers as its "
            f"inputs need, which cannot be divided among samples; {self._hint()}"
        )

    def _refuse_rows(self, func: Any, shape: Sequence[int]) -> NoReturn:
        samples = self.rows.stop - self.rows.start
        raise RunnerError(
            f"{self._problem(func, shape)}, whose dimension 0 is not the {samples} samples of this "
            f"process, so that they would be others than in a single process; {self._hint()}"
        )

    def _problem(self, func: Any, shape: Sequence[int]) -> str:
        name = func._schema.name.replace("aten::", "torch.ops.aten.")
        return f"model: {self._caller()} draws random numbers of shape {list(shape)} by {name}"

    def _hint(self) -> str:
        return f"draw them in noise(), set the dropout of '{self.kind}' to 0, or use one process"

    def _caller(self) -> str:
        """Returns a description of the innermost module of the learner that is running."""
        names = {
            id(layer): (name, path) for name, module in self.modules.items() for path, layer in module.named_modules()
        }
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            layer = frame.f_locals.get("self")
            if id(layer) in names:
                name, path = names[id(layer)]
                dotted = f"{name}.{path}" if path else name
                return f"module '{dotted}' ({type(layer).__name__})"
            frame = frame.f_back
        return f"an update of '{self.kind}'"


def uneven(rows: slice, size: int, rank: int, count: int) -> slice:
    """Returns the rows of a process, of which the first has one more and the second one less.

    With as many samples in all processes, another dimension may have their number by chance.
    """
    if size % count or size <= count:
        return rows
    if rank == 0:
        return slice(rows.start, rows.stop + 1)
    return slice(rows.start + 1, rows.stop) if rank == 1 else rows


def physical_order(tensor: Tensor) -> list[int]:
    """Returns the dimensions of a tensor from the outermost in memory to the innermost."""
    strides = tensor.stride()
    shape = tensor.shape
    # Of two dimensions with one stride, that of size 1 is inside of the other.
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], shape[dim] == 1, dim))


def _order(args: Sequence[Any]) -> list[int]:
    """Returns the order in memory of the first tensor, without dimensions that have none."""
    for argument in args:
        if isinstance(argument, Tensor):
            order = physical_order(argument)
            return [dim for dim in order if not dim or argument.shape[dim] > 1]
    return []


def _shapes(args: Sequence[Any]) -> Iterator[Sequence[int]]:
    """Yields the shapes among the arguments of an operator, and those of its tensors."""
    for argument in args:
        if isinstance(argument, Tensor):
            yield argument.shape
        elif isinstance(argument, list | tuple):
            yield argument


def _is_in_place(func: Any) -> bool:
    return str(func._schema.name).endswith("_")


def _draws_nothing(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Returns whether a kernel with a dropout inside computes without it."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in RATES:
            return not value
    for name in RATES:
        if name in options:
            return not options[name]
    names = [argument.name for argument in func._schema.arguments]
    # The default of the argument is 0.
    return any(name in names for name in RATES)
