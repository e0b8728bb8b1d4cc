"""Records the operators of an update: their names, modules, and the values that they return."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.proof.subject import Subject
from runner.proof.subject_states import named_parameters
from runner.proof.values import LARGEST, Match, Value, ValueTable

# Memory for values, after which no further operator is recorded.
_MOST_BYTES = 2**30
_UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Operators that return memory with any content."""
READ = "aten._local_scalar_dense"
"""The operator by which a number gets from a tensor into Python."""
TRUSTED = Match(-1)
"""Match of values that are not compared: uninitialized memory, and constants that the
baseline does not have.
"""


class CallSite(NamedTuple):
    """The place where an operator was called.

    Attributes:
        module: Dotted path of the innermost module; empty outside of modules.
        phase: ``forward``, ``backward`` or ``optimizer step``.
    """

    module: str
    phase: str

    def __str__(self) -> str:
        return f"{self.phase} of '{self.module}'" if self.module else self.phase


@dataclass
class Operator:
    """A call of an operator.

    Attributes:
        name: Such as ``aten.addmm``.
        site: The place where it was called.
        producers: Positions of the operators that returned or wrote its inputs last; None for
            tensors that existed before the update.
        inputs: The matches of its inputs in the table.
        outputs: The matches of the tensors that it returned or wrote.
        shapes: The shapes of these tensors.
        unmatched: The values of outputs that are not completely in the table, by the number of the
            output.
        changed_input: The producer of an input that was changed afterwards by no operator.
        foreign_shape: The shape of an input that existed before the update and is not in the table.
        is_view: Whether it returned a view of an input.
        is_selection: Whether it returned a view of a part of an input.
        reads_content: Whether its floating-point result depends on the content of its inputs, and
            not on their shape alone.
    """

    name: str
    site: CallSite
    producers: list[int | None] = field(default_factory=list)
    inputs: list[Match | None] = field(default_factory=list)
    outputs: list[Match | None] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    unmatched: dict[int, Value] = field(default_factory=dict)
    changed_input: int | None = None
    foreign_shape: tuple[int, ...] | None = None
    reads_content: bool = False
    is_view: bool = False
    is_selection: bool = False

    @property
    def is_matched(self) -> bool:
        """Returns whether everything that it returned is in the table."""
        return all(match is not None for match in self.outputs)


class _View(NamedTuple):
    """A part of a storage."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Content(NamedTuple):
    """The last recorded content of a view of a storage.

    Attributes:
        position: Of the operator that returned or wrote it; None if it existed before.
        match: Its match in the table.
    """

    position: int | None
    match: Match | None


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the operators that run inside of its context.

    Args:
        table: The values of the baseline.
        is_reference: Whether values are added to the table; they are searched in it otherwise.
        deadline: By ``time.monotonic``, after which no further operator is recorded.
    """

    def __init__(
        self,
        table: ValueTable,
        *,
        is_reference: bool = True,
        deadline: float = math.inf,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.is_complete = True
        """Whether no operator was left out because of memory or time."""
        self._table = table
        self._is_reference = is_reference
        self._deadline = deadline
        # By address of the memory: the contents of its views, the operator that wrote it
        # last, and the storage that has this address.
        self._contents: dict[int, dict[_View, _Content]] = {}
        self._writers: dict[int, int] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._call_stack = _CallStack()

    def name_modules(self, subject: Subject) -> None:
        """Reads the names of a subject's parameters, which give its modules their paths."""
        names = {id(value): name for name, value in named_parameters(subject).items()}
        self._call_stack.parameters = names

    def __enter__(self) -> Self:
        self._call_stack.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._call_stack.__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._can_record(func):
            return func(*args, **kwargs)
        operator = Operator(str(func.overloadpacket), self._call_stack.current())
        inputs = _plain_tensors((args, kwargs))
        for tensor in inputs:
            self._note_input(operator, tensor)
        output = func(*args, **kwargs)
        written = _plain_tensors(list(_written(func, args, kwargs)))
        written_ids = {id(tensor) for tensor in written}
        returned = [
            tensor for tensor in _plain_tensors(output) if id(tensor) not in written_ids
        ]
        position = len(self.operators)
        self.operators.append(operator)
        sizes = {_address(tensor): tensor.numel() for tensor in inputs}
        _classify(operator, sizes, written, returned)
        self._trust_destinations(written)
        operator.reads_content = _reads_content(operator.name, returned)
        has_content = func.overloadpacket.__name__ not in _UNINITIALIZED
        is_constant = not inputs and torch.Tag.nondeterministic_seeded not in func.tags
        for tensor in (*written, *returned):
            address = self._current_address(tensor)
            value = Value.of(tensor)
            match = self._match(value) if has_content else TRUSTED
            if match is None and is_constant:
                match = TRUSTED
            self._note_output(operator, tensor, value, match)
            if id(tensor) in written_ids or address not in sizes:
                # The former content of this memory is overwritten.
                self._contents[address] = {}
                self._writers[address] = position
            content = _Content(position, None if match is TRUSTED else match)
            self._contents.setdefault(address, {})[_view(tensor)] = content
        return output

    def _can_record(self, func: Any) -> bool:
        if not isinstance(func, torch._ops.OpOverload) or func.namespace == "profiler":
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        has_memory = self._table.bytes < _MOST_BYTES
        has_time = has_memory and time.monotonic() < self._deadline
        self.is_complete = self.is_complete and has_time
        return self.is_complete

    def _note_input(self, operator: Operator, tensor: Tensor) -> None:
        address = self._current_address(tensor)
        contents = self._contents.setdefault(address, {})
        content = contents.get(_view(tensor))
        if content is not None and tensor.numel() > LARGEST:
            operator.inputs.append(content.match)
            operator.producers.append(content.position)
            return
        value = Value.of(tensor)
        producer = self._writers.get(address)
        match = None
        if content is not None:
            producer = content.position
            match = content.match
        if match is None or not self._is_still(match, value):
            if match is not None and producer is not None:
                # A view of the memory may have been recorded after the operator that wrote it.
                operator.changed_input = self._writers.get(address, producer)
            # A content without a match is not searched again, because the table has not grown.
            is_new = content is None or match is not None
            match = self._match(value) if is_new else None
        operator.inputs.append(match)
        operator.producers.append(producer)
        if producer is None and match is None:
            operator.foreign_shape = tuple(tensor.shape)
        contents[_view(tensor)] = _Content(producer, match)

    def _current_address(self, tensor: Tensor) -> int:
        """Returns the address of a tensor's memory; forgets a tensor that was freed and had
        the same address.
        """
        address = _address(tensor)
        storage = self._storages.get(address)
        if storage is None or storage.expired():  # type: ignore[no-untyped-call]
            self._contents.pop(address, None)
            self._writers.pop(address, None)
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._storages[address] = storage
        return address

    def _is_still(self, match: Match, value: Value) -> bool:
        """Returns whether the content of a view is unchanged; parts and pieces are not
        compared again.
        """
        if match.rows is not None or match.pieces:
            return True
        if self._table.values[match.number].shape != value.shape:
            return True
        if match.is_permuted:
            return self._table.find(value) == match
        return self._table.equals(match.number, value)

    def _trust_destinations(self, written: Sequence[Tensor]) -> None:
        """Trusts the selections that an operator writes into: they compute nothing."""
        for tensor in written:
            position = self.producer_of(tensor)
            if position is not None and self.operators[position].is_selection:
                operator = self.operators[position]
                operator.outputs = [match or TRUSTED for match in operator.outputs]

    def _note_output(
        self, operator: Operator, tensor: Tensor, value: Value, match: Match | None
    ) -> None:
        # The other rows of a value may never be computed, so that these do not count.
        if match is None or match.rows is not None:
            operator.unmatched[len(operator.outputs)] = value
        operator.outputs.append(match)
        operator.shapes.append(tuple(tensor.shape))

    def _match(self, value: Value) -> Match | None:
        if self._is_reference:
            return Match(self._table.add(value))
        return self._table.find(value)

    def producer_of(self, tensor: Tensor) -> int | None:
        """Returns the position of the operator that returned or wrote a tensor last."""
        if not _is_plain(tensor):
            return None
        address = self._current_address(tensor)
        content = self._contents.get(address, {}).get(_view(tensor))
        return content.position if content is not None else self._writers.get(address)

    def drop_incomplete_rows(self) -> None:
        """Removes matches with rows of a value whose other rows were never computed, as of
        half a batch.
        """
        covered: dict[int, set[tuple[int, int]]] = {}
        for operator in self.operators:
            for match in operator.outputs:
                if match is not None and match.rows is not None:
                    covered.setdefault(match.number, set()).add(match.rows)
        rows = {
            number: sum(end - start for start, end in ranges)
            for number, ranges in covered.items()
        }
        for operator in self.operators:
            operator.outputs = [
                None if self._is_incomplete(match, rows) else match
                for match in operator.outputs
            ]

    def _is_incomplete(self, match: Match | None, rows: Mapping[int, int]) -> bool:
        if match is None or not match.rows:
            return False
        return rows[match.number] < self._table.values[match.number].shape[0]


class _CallStack(ExitStack):
    """Follows the modules, the backward pass and the optimizer steps of an update."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[int, str] = {}
        self._names: dict[int, str] = {}
        # Another module may get the number of one that is deleted.
        self._roots: list[nn.Module] = []
        self._calls: list[tuple[str, int]] = []
        self._ranges: list[tuple[int, int, str]] = []
        self._optimizers: list[str] = []

    def __enter__(self) -> Self:
        super().__enter__()
        for handle in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ):
            self.callback(handle.remove)
        return self

    def current(self) -> CallSite:
        """Returns the place where the operator that runs now was called."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            module = self._module_of(node._sequence_nr())
            return CallSite(module or node.name().rpartition("::")[2], "backward")
        if self._optimizers:
            return CallSite(self._optimizers[-1], "optimizer step")
        return CallSite(self._calls[-1][0] if self._calls else "", "forward")

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if id(module) not in self._names:
            # No other module that was called contains it.
            self._name_all(module)
        self._calls.append((self._names[id(module)], _sequence_number()))

    def _name_all(self, root: nn.Module) -> None:
        """Gives a module and those inside of it the paths that their parameters have in the
        subject.
        """
        self._roots.append(root)
        class_name = type(root).__name__
        prefix = class_name
        for path, parameter in root.named_parameters():
            name = self.parameters.get(id(parameter))
            if name and name.endswith(path):
                prefix = name.removesuffix(path).rstrip(".")
                break
        for path, child in root.named_modules():
            full_path = ".".join(filter(None, (prefix, path)))
            self._names.setdefault(id(child), full_path or class_name)

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._calls:
            name, first = self._calls.pop()
            self._ranges.append((first, _sequence_number(), name))

    def _enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizers.append(type(optimizer).__name__)

    def _leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizers:
            self._optimizers.pop()

    def _module_of(self, number: int) -> str:
        """Returns the innermost module whose forward pass made a node of the backward pass."""
        lengths = [
            (last - first, name)
            for first, last, name in self._ranges
            if first <= number < last
        ]
        return min(lengths)[1] if lengths else ""


def _sequence_number() -> int:
    """Returns the number that the next node of the backward pass gets."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _is_plain(value: Any) -> bool:
    """Returns whether a value is a tensor with memory; fake and wrapped ones have none."""
    if type(value) not in (Tensor, nn.Parameter):
        return False
    has_memory: bool = value.layout == torch.strided and value.device.type != "meta"
    return has_memory


def _plain_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if _is_plain(leaf)]


def _classify(
    operator: Operator,
    sizes: Mapping[int, int],
    written: Sequence[Tensor],
    returned: Sequence[Tensor],
) -> None:
    """Notes whether an operator returns views of its inputs, whose sizes are given by address."""
    addresses = [_address(tensor) for tensor in returned]
    operator.is_view = not written and any(address in sizes for address in addresses)
    operator.is_selection = any(
        tensor.numel() < sizes.get(address, 0)
        for tensor, address in zip(returned, addresses, strict=True)
    )


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the arguments that an operator writes into."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from tree_leaves(value)


def _reads_content(name: str, returned: Sequence[Tensor]) -> bool:
    if name.endswith("_like") or ".new_" in name:
        return False
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in returned)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(tensor: Tensor) -> _View:
    offset = int(tensor.storage_offset())
    return _View(offset, tuple(tensor.shape), tuple(tensor.stride()))
