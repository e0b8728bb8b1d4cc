"""Sizes of inputs for which an exported program computes what its network does."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from runner.api import tensors

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Trace = Callable[[tuple[Tensor, ...]], "ExportedProgram"]
DEVIATION = 1e-5
"""Largest deviation of a program from its network, relative to the output, with sizes of one."""
SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")
"""A size in the conditions of ``torch.export``: name of the argument, and dimension."""
FUNCTIONS = {"min", "max", "torch.sym_float"}
"""Functions that a condition may call."""
SYNTAX = (
    ast.Expression,
    ast.Compare,
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.boolop,
    ast.cmpop,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Not,
    ast.USub,
    ast.Constant,
    ast.Name,
    ast.Load,
)
"""Elements of a condition. None of them executes code: conditions are read from files."""
NAMESPACE = {
    "__builtins__": {},
    "min": min,
    "max": max,
    "torch": SimpleNamespace(sym_float=float),
}


@dataclass(frozen=True)
class SizeConditions:
    """Conditions on the sizes of a program's inputs.

    ``torch.export`` traces one path through a network. The path holds for sizes that
    satisfy conditions, and it assumes that no open size is zero or one. For each of
    them that is one, the network is traced again, and compared with the program.
    """

    by_ones: Mapping[frozenset[str], tuple[str, ...]]
    """Conditions by the open sizes that are one. They are Python expressions, in which
    ``size_0_1`` is the size of dimension 1 of the first input.
    """

    @classmethod
    def from_json(cls, text: str) -> SizeConditions:
        """Reads what ``to_json`` returned; raises a ValueError for anything else."""
        pairs = json.loads(text)
        result = cls({frozenset(ones): tuple(conditions) for ones, conditions in pairs})
        # Conditions that cannot be evaluated raise here.
        _ = result._code
        return result

    def to_json(self) -> str:
        """Returns the conditions as JSON."""
        return json.dumps(
            [[sorted(ones), conditions] for ones, conditions in self.by_ones.items()]
        )

    @cached_property
    def _code(self) -> dict[frozenset[str], list[CodeType]]:
        return {
            ones: [compiled(condition) for condition in conditions]
            for ones, conditions in self.by_ones.items()
        }

    def hold(self, inputs: Sequence[Tensor], open_sizes: Iterable[str]) -> bool:
        """Returns whether the program is right for the sizes of these inputs.

        Args:
            inputs: Of the network.
            open_sizes: The sizes that may differ from those of the export.
        """
        sizes = sizes_of(inputs)
        if any(sizes[name] == 0 for name in open_sizes):
            return False
        code = self._code.get(
            frozenset(name for name in open_sizes if sizes[name] == 1)
        )
        if code is None:
            return False
        try:
            # ``compiled`` admits arithmetic and comparisons only.
            return all(eval(condition, dict(NAMESPACE), sizes) for condition in code)  # noqa: S307
        except (NameError, ArithmeticError):
            return False


def compiled(condition: str) -> CodeType:
    """Compiles a condition; raises a ValueError unless it consists of arithmetic and
    comparisons of sizes.
    """
    try:
        tree = ast.parse(condition, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"no condition on sizes: {condition:.80}") from None
    _refuse_code(tree, condition)
    return compile(tree, "condition", "eval")


def _refuse_code(node: ast.AST, condition: str) -> None:
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in FUNCTIONS:
        children.remove(node.func)
    elif not isinstance(node, SYNTAX) or _is_text(node):
        raise ValueError(f"no condition on sizes: {condition:.80}")
    for child in children:
        _refuse_code(child, condition)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, int | float)


def sizes_of(inputs: Sequence[Tensor]) -> dict[str, int]:
    """Returns the sizes of all dimensions of all inputs, by their names in conditions."""
    return {
        size_name(number, dimension): size
        for number, tensor in enumerate(inputs)
        for dimension, size in enumerate(tensor.shape)
    }


def size_name(number: int, dimension: int) -> str:
    """Returns the name of the size of a dimension of an input."""
    return f"size_{number}_{dimension}"


def conditions_of(
    trace: Trace, module: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[ExportedProgram, SizeConditions]:
    """Returns a network as a program, and the conditions under which both compute the same.

    Args:
        trace: Traces the network with inputs of as many open sizes as it allows.
        module: The network in evaluation mode.
        inputs: An example of its inputs.
    """
    program = trace(inputs)
    conditions = _guards(program, module)
    if conditions is None:
        # The program is known to be right for the sizes of the example only.
        exact = tuple(f"{name} == {size}" for name, size in sizes_of(inputs).items())
        return program, SizeConditions({frozenset(): exact})
    by_ones = {frozenset[str](): conditions}
    call = program.module(check_guards=False)
    for names in _sizes_by_symbol(program).values():
        cut = tuple(
            _cut_to_one(tensor, number, names) for number, tensor in enumerate(inputs)
        )
        conditions = _guards_where_equal(call, trace, module, cut)
        if conditions is not None:
            by_ones[names] = conditions
    return program, SizeConditions(by_ones)


def _guards(program: ExportedProgram, module: nn.Module) -> tuple[str, ...] | None:
    """Returns the conditions of a traced path; None if one of them cannot be evaluated."""
    arguments = list(inspect.signature(module.forward).parameters)
    # They are a part of the format of ``.pt2`` files.
    guards = tuple(
        SIZE.sub(lambda match: _renamed(match, arguments), guard)
        for guard in program._guards_code
    )
    try:
        for guard in guards:
            compiled(guard)
    except ValueError:
        return None
    return guards


def _renamed(match: re.Match[str], arguments: Sequence[str]) -> str:
    argument, dimension = match.groups()
    # Another name stays, and is then refused.
    if argument not in arguments:
        return match.group()
    return size_name(arguments.index(argument), int(dimension))


def input_shapes(program: ExportedProgram) -> list[Tensor]:
    """Returns the inputs of a program as it was traced: types, and sizes that may be symbols."""
    names = set(program.graph_signature.user_inputs)
    return [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names
    ]


def _sizes_by_symbol(program: ExportedProgram) -> dict[str, frozenset[str]]:
    """Returns the sizes that are equal to each symbol."""
    result: dict[str, frozenset[str]] = {}
    for number, tensor in enumerate(input_shapes(program)):
        for dimension, side in enumerate(tensor.shape):
            # A symbol may also be part of an expression, as in 2*s27.
            if str(side).isidentifier():
                name = size_name(number, dimension)
                result[str(side)] = result.get(str(side), frozenset()) | {name}
    return result


def _guards_where_equal(
    call: Callable[..., Any],
    trace: Trace,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
) -> tuple[str, ...] | None:
    """Returns the conditions of the path for these inputs; None if program and network differ."""
    try:
        outputs = list(tensors(call(*inputs)))
        expected = list(tensors(module(*inputs)))
        shapes = [output.shape for output in expected]
        if [output.shape for output in outputs] != shapes:
            return None
        if deviation(outputs, expected) > DEVIATION:
            return None
        # The conditions of the program itself were simplified for sizes above one.
        return _guards(trace(inputs), module)
    except Exception:
        # A network may refuse such sizes by any exception.
        return None


def _cut_to_one(tensor: Tensor, number: int, names: frozenset[str]) -> Tensor:
    for dimension in range(tensor.dim()):
        if size_name(number, dimension) in names:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def deviation(outputs: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Returns the L2 norm of the deviation of outputs, relative to the expected ones."""
    squared_error = 0.0
    size = 0.0
    for output, reference in zip(outputs, expected, strict=True):
        squared_error += float((output.double() - reference.double()).square().sum())
        size += float(reference.double().square().sum())
    if not size:
        return math.inf if squared_error else 0.0
    return math.sqrt(squared_error / size)
