"""A network as a program: of ``torch.export``, or in an ONNX file that ONNX Runtime runs."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from runner.api import UsageError, map_tensors, nbytes, replacing, tensors

from .network import ForwardCall
from .size_conditions import (
    SizeConditions,
    conditions_of,
    deviation,
    input_shapes,
    size_name,
)

OPSET = 20
SCOPES = "pkg.torch.onnx.name_scopes"
"""Key of an ONNX node for the module of its operation."""
OUTSIDE = "bytes_outside"
"""Key of an ONNX file for the bytes of weights that the network has and the program does not
use.
"""
CONDITIONS = "conditions"
"""Key of an ONNX file for the conditions on the sizes of inputs."""
LAYOUT = "onnx, with conditions on sizes"
"""Part of the digest of an ONNX file: files without conditions are not used."""
INLINE_BYTES = 2**30
"""Largest size of weights inside of the ONNX file; a file can have twice as many at most."""
LOUD = (
    "torch.onnx",
    "torch.export",
    "torch._export",
    "onnxscript",
    "onnx_ir",
    "torchao",
    "torch.utils",
    "root",
)
"""Loggers and modules with advice for authors of exporters."""

Form = Sequence[tuple[torch.dtype, tuple[int | None, ...]]]
"""Type and sizes of every input; a size is None where it may differ."""


class ExportedNetwork(NamedTuple):
    """A program of ``torch.export``, and the sizes for which it is right."""

    program: ExportedProgram
    conditions: SizeConditions


class Program:
    """A program that replaces a network for inputs of one form."""

    def __init__(
        self,
        call: Callable[..., Any],
        form: Form,
        conditions: SizeConditions,
    ) -> None:
        self.call = call
        self.form = form
        self.conditions = conditions
        self.open_sizes = [
            size_name(number, dimension)
            for number, (_, sizes) in enumerate(form)
            for dimension, size in enumerate(sizes)
            if size is None
        ]
        self.answers = 0
        """Calls that the program answered."""
        self.others = 0
        """Questions of another form."""
        self.failures = 0
        """Questions at which the program raised."""
        self.first_failure = ""
        self.outside = 0
        """Bytes of weights that the network has, and the program does not use."""

    def in_place_of(
        self, module: Callable[[], nn.Module]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Returns a wrapper for the slot ``forward`` of that network.

        A network in training mode is called itself.
        """

        def wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*inputs: Any) -> Any:
                if module().training:
                    return step(*inputs)
                if not self.fits(inputs):
                    self.others += 1
                    return step(*inputs)
                try:
                    output = self.call(*inputs)
                except Exception as error:
                    # The exceptions of ONNX Runtime have no common base class.
                    self.failures += 1
                    self.first_failure = self.first_failure or _first_line(error)
                    return step(*inputs)
                self.answers += 1
                return output

            return forward

        return wrapped

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Returns whether types and sizes are those of the form, and sizes meet the
        conditions.
        """
        if len(inputs) != len(self.form):
            return False
        pairs = zip(inputs, self.form, strict=True)
        if not all(_fits(tensor, dtype, sizes) for tensor, (dtype, sizes) in pairs):
            return False
        return self.conditions.hold(inputs, self.open_sizes)

    def notes(self) -> list[str]:
        """Returns the number of inputs that the network answered."""
        notes = []
        if self.others:
            notes.append(
                f"{self.others:,} questions of another form, answered by the network itself"
            )
        if self.failures:
            notes.append(
                f"{self.failures:,} questions at which the program failed, answered by the "
                f"network itself: {self.first_failure}"
            )
        return notes


def _fits(tensor: Any, dtype: torch.dtype, sizes: tuple[int | None, ...]) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    if tensor.dtype != dtype or tensor.dim() != len(sizes):
        return False
    pairs = zip(sizes, tensor.shape, strict=True)
    return all(expected is None or expected == size for expected, size in pairs)


@contextmanager
def quietly() -> Iterator[None]:
    """Silences the advice of exporters inside the ``with``."""
    # Some exporters log to the root logger.
    loggers = [logging.getLogger(None if name == "root" else name) for name in LOUD]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def exported(module: nn.Module, example: ForwardCall, kind: str) -> ExportedNetwork:
    """Exports the network in evaluation mode, for inputs of as many sizes as it allows.

    Raises:
        UsageError: It cannot be traced, or has an input that is not a tensor.
    """
    if not all(isinstance(tensor, Tensor) for tensor in example.inputs):
        raise UsageError(f"{kind}: every input of the network should be a tensor")
    dynamic = tuple(
        dict.fromkeys(range(tensor.dim()), Dim.AUTO) for tensor in example.inputs
    )
    module.eval()
    # Inference tensors cannot be traced; a copy made here is a normal tensor.
    inputs = tuple(tensor.detach().clone() for tensor in example.inputs)

    def trace(inputs: tuple[Tensor, ...]) -> ExportedProgram:
        return torch.export.export(module, inputs, dynamic_shapes=dynamic)

    try:
        with quietly(), torch.no_grad():
            return ExportedNetwork(*conditions_of(trace, module, inputs))
    except Exception as error:
        # Tracing executes the network, which can raise anything.
        raise UsageError(
            f"{kind}: torch.export cannot trace the network: {_first_line(error)}"
        ) from error


def of_torch(export: ExportedNetwork) -> Program:
    """Returns a program that torch runs."""
    form = [
        (tensor.dtype, tuple(_fixed(side) for side in tensor.shape))
        for tensor in input_shapes(export.program)
    ]
    # The conditions replace the guards, which raise where the network should be called.
    call = export.program.module(check_guards=False)
    return Program(call, form, export.conditions)


def _fixed(side: Any) -> int | None:
    """Returns a size that is a number, or became one while the network was traced (a
    symbol that represents it).
    """
    return int(str(side)) if str(side).isdigit() else None


def write_torch(program: ExportedProgram, path: Path) -> None:
    """Writes a program as a ``.pt2``, without the inputs that it was made with: they would be a
    sample of the data.
    """
    # They would be a sample of the data in a file that may be shared.
    program.example_inputs = None
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with replacing(path) as partial:
        partial.write_bytes(buffer.getvalue())


def write_onnx(export: ExportedNetwork, path: Path, kind: str) -> None:
    """Writes an ONNX file; raises a UsageError if ONNX has no such operation."""
    program = export.program
    try:
        with quietly():
            converted = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, verbose=False
            )
    except Exception as error:
        # For example, ONNX does not have the operation.
        raise UsageError(
            f"{kind}: the network cannot be written as ONNX: {_first_line(error)}"
        ) from error
    # Only the older exporter returns None.
    assert converted is not None
    # The metadata contain stack traces with paths of this machine.
    for node in converted.model.graph.all_nodes():
        for key in node.metadata_props.keys() - {SCOPES}:
            del node.metadata_props[key]
    converted.model.metadata_props[OUTSIDE] = str(_unused(program))
    converted.model.metadata_props[CONDITIONS] = export.conditions.to_json()
    converted.save(path, external_data=nbytes(dict(program.state_dict)) > INLINE_BYTES)


def of_onnx(path: Path, example: ForwardCall) -> Program:
    """Returns a program that ONNX Runtime runs, on the number of threads of torch.

    Raises:
        RuntimeError: ONNX Runtime cannot run the file.
    """
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # The exceptions of ONNX Runtime have no common base class.
    try:
        session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise RuntimeError(f"{path.name}: {_first_line(error)}") from error
    inputs = session.get_inputs()
    names = [value.name for value in inputs]
    form = [
        (tensor.dtype, tuple(_fixed(side) for side in value.shape))
        for tensor, value in zip(example.inputs, inputs, strict=True)
    ]

    def call(*arguments: Tensor) -> Any:
        feed = {
            name: tensor.detach().numpy()
            for name, tensor in zip(names, arguments, strict=True)
        }
        outputs = iter(session.run(None, feed))
        return map_tensors(lambda _: torch.from_numpy(next(outputs)), example.output)

    metadata = session.get_modelmeta().custom_metadata_map
    try:
        conditions = SizeConditions.from_json(metadata[CONDITIONS])
    except (KeyError, TypeError, ValueError):
        raise RuntimeError(
            f"{path.name}: it has no conditions on the sizes of its inputs"
        ) from None
    program = Program(call, form, conditions)
    program.outside = int(metadata.get(OUTSIDE, 0))
    return program


def _unused(program: ExportedProgram) -> int:
    """Returns the bytes of weights that no operation reads: of modules that other slots call."""
    signature = program.graph_signature
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    unused = [
        weights[node.name]
        for node in program.graph.nodes
        if node.name in weights and not node.users
    ]
    return nbytes(
        [program.state_dict[name] for name in unused if name in program.state_dict]
    )


def bytes_of(path: Path) -> int:
    """Returns the bytes of a program's file, with weights in a separate file."""
    data = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)


def difference(program: Program, example: ForwardCall) -> float:
    """Returns the deviation of the program's output from the network's, as a share of its size (of
    all outputs, L2).
    """
    return deviation(tensors(program.call(*example.inputs)), tensors(example.output))


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
