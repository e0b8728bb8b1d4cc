"""Weights as integers of eight bits."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from runner.api import (
    Pipeline,
    RunnerError,
    Setting,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
    nbytes,
)

from .calibration import Calibration, calibration_batches
from .export import EXTRA, needs_onnxruntime, refuse_stages

if TYPE_CHECKING:
    from pathlib import Path

    from runner.api import GradientLearner

    from .network import ForwardCall
    from .program import Program


class QuantiseConfig(StageConfig):
    """Rounds the weights of the network to eight bits, with one scale per output.

    ``torchao`` rounds matrices in place, and with ``activations`` also their inputs, with one scale
    per row; convolutions and embeddings are unchanged. ``onnxruntime`` exports the network first.
    With ``calibration``, the inputs of all layers are rounded with fixed ranges, which batches of
    the run's data show (static). Without it, matrices have inputs that are rounded by the
    range of each call (dynamic), except in a network with convolutions, which is always static.
    Modules that the learner declares as sensitive (for example its first and last layers), norms
    and biases stay in float32.

    When it helps: memory and files, a quarter as large; and time with ``onnxruntime`` on a
    processor with VNNI. When it hurts: small networks, whose products are too small to be worth
    the rounding; ``torchao`` on a CPU without a compiler is slower than float32.
    """

    kind: ClassVar[str] = "quantise"
    implementation = "Quantise"
    phase: ClassVar[int] = 2
    wraps: ClassVar[frozenset[str]] = frozenset({"forward"})
    omitted: ClassVar[frozenset[str]] = frozenset({"calibration"})

    backend: Literal["torchao", "onnxruntime"] = "onnxruntime"
    """The library that rounds and multiplies."""
    activations: bool = True
    """Whether what is multiplied with weights is rounded, too; ``onnxruntime`` always does."""
    calibration: Calibration | None = None
    """Data for fixed ranges, for example ``{data: train, share: 0.1}``; null leaves them to
    ``onnxruntime``, or to eight batches in a network with convolutions.
    """
    keep: list[str] = Field(default_factory=list)
    """Modules that are unchanged, in addition to those that the learner declares as sensitive:
    names, or patterns (``*.time``).
    """

    def contract(self, setting: Setting) -> Statistical:
        """Returns ``Statistical``: it rounds."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns None, or raises a UsageError without the backend or with conflicting stages."""
        from importlib.util import find_spec

        if self.backend == "torchao":
            if find_spec("torchao") is None:
                raise UsageError(f"backend: torchao is not installed: {EXTRA}")
            if self.calibration is not None:
                raise UsageError(
                    "calibration: torchao computes ranges in every call; use backend: "
                    "onnxruntime, or remove it"
                )
            return None
        needs_onnxruntime(setting, "backend")
        refuse_stages(setting, "backend", ("amp", "compile", "export"))
        return None


class Quantise(Stage):
    """Rounds the network's weights."""

    program: Program | None = None

    def attach(self, pipeline: Pipeline) -> None:
        """Rounds in place, or replaces the network by a program with rounded weights.

        Raises:
            UsageError: The backend supports no layer of the network.
        """
        from .network import settled

        learner = settled(pipeline, self.config.kind)
        learner.module.eval()
        unchanged = (*learner.sensitive, *self.config.keep)
        rounds = (
            self._by_torchao
            if self.config.backend == "torchao"
            else self._by_onnxruntime
        )
        rounds(pipeline, learner, unchanged)

    @property
    def program_calls(self) -> int:
        """Returns the calls that the program answered."""
        return 0 if self.program is None else self.program.answers

    @property
    def network_calls(self) -> int:
        """Returns the calls that the network answered, because the program did not fit."""
        program = self.program
        return 0 if program is None else program.others + program.failures

    def closing_notes(self) -> Sequence[str]:
        """Returns how many inputs did not fit the program."""
        return [] if self.program is None else self.program.notes()

    def _by_torchao(
        self, pipeline: Pipeline, learner: GradientLearner, unchanged: Sequence[str]
    ) -> None:
        from torch import nn

        from .network import matches
        from .program import quietly

        with quietly():
            from torchao.quantization import (  # type: ignore[import-untyped]
                Int8DynamicActivationInt8WeightConfig,
                Int8WeightOnlyConfig,
                quantize_,
            )

        module = learner.module
        candidates = {
            name: layer
            for name, layer in module.named_modules()
            if not matches(name, unchanged)
        }
        # A matrix of a single column would have a scale for every weight, which torchao refuses.
        selected = {
            name
            for name, layer in candidates.items()
            if isinstance(layer, nn.Linear) and layer.in_features > 1
        }
        if not selected:
            raise UsageError(
                "quantise: backend: torchao rounds matrices alone, and here are none that are "
                "not kept"
            )
        rounding = (
            Int8DynamicActivationInt8WeightConfig
            if self.config.activations
            else Int8WeightOnlyConfig
        )
        size_before = nbytes(dict(module.state_dict()))
        with quietly():
            quantize_(
                module,
                rounding(set_inductor_config=False, version=2),
                lambda _, name: name in selected,
            )
        # Rounded weights have no gradients, and an update would fail without a clear message.
        pipeline.slots.wrap("forward", self._untrained(learner))
        float_layers = sum(
            isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Embedding)
            for layer in candidates.values()
        )
        remark = (
            f"; {float_layers} convolutions or embeddings stay in float32"
            if float_layers
            else ""
        )
        pipeline.note(
            f"{len(selected)} matrices in int8: "
            f"{_bytes(size_before, nbytes(dict(module.state_dict())))}{remark}"
        )

    @staticmethod
    def _untrained(
        learner: GradientLearner,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Returns a wrapper for the slot ``forward`` that raises in training."""

        def wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*inputs: Any) -> Any:
                if learner.module.training:
                    raise RunnerError(
                        "quantise: weights of eight bits cannot be trained"
                    )
                return step(*inputs)

            return forward

        return wrapped

    def _by_onnxruntime(
        self, pipeline: Pipeline, learner: GradientLearner, unchanged: Sequence[str]
    ) -> None:
        import torch

        from .network import (
            digest,
            first_call,
            fixed_batch,
            forward_calls,
            stored_file,
        )
        from .program import LAYOUT, bytes_of, difference, exported, of_onnx, write_onnx

        kind = self.config.kind
        calibration = self.config.calibration
        settings = learner.config.model_dump()
        with torch.no_grad():
            example = first_call(pipeline, learner, kind)
        module = learner.module

        def export(path: Path) -> None:
            write_onnx(exported(module, example, kind), path, kind)

        name = f"export-{digest(module, LAYOUT, settings)}.onnx"
        exported_path = stored_file(pipeline, self, name, export, lambda path: path)

        def use(path: Path) -> tuple[Program, float]:
            self.program_bytes = bytes_of(path)
            program = of_onnx(path, example)
            return program, difference(program, example)

        key = [LAYOUT, unchanged, settings]
        if calibration is not None:
            key.append(calibration.model_dump())
        name = f"{kind}-{digest(module, *key)}.onnx"
        # The number of batches is checked even if the file exists.
        batches = calibration_batches(pipeline, calibration)
        calls = forward_calls(learner, kind, batches)
        make = partial(
            _round,
            exported_path,
            unchanged=unchanged,
            calls=calls,
            is_static=calibration is not None,
        )
        self.program, deviation = stored_file(pipeline, self, name, make, use)
        with torch.no_grad():
            reason = fixed_batch(pipeline, learner, kind, self.program.fits)
        if reason is not None:
            pipeline.deactivate(reason)
            return
        pipeline.slots.wrap("forward", self.program.in_place_of(lambda: learner.module))
        outside_bytes = self.program.outside
        self.bytes = self.program_bytes + outside_bytes
        sizes = _bytes(bytes_of(exported_path) + outside_bytes, self.bytes)
        pipeline.note(f"{sizes}; one answer is off by {deviation:.1%} of its size")


def _bytes(before: int, after: int) -> str:
    return f"{before:,} bytes are {after:,} ({after / before:.2f}x)"


def _round(
    source: Path,
    rounded: Path,
    unchanged: Sequence[str],
    calls: Iterator[ForwardCall],
    is_static: bool,
) -> None:
    """Writes an ONNX file with rounded weights, or raises a UsageError if nothing is rounded.

    Args:
        source: The exported network.
        rounded: The new file.
        unchanged: Patterns of modules that stay in float32.
        calls: Calls of the network that show the ranges of inputs.
        is_static: Whether inputs have fixed ranges also in a network without convolutions.
    """
    import onnx
    from onnxruntime.quantization import (  # type: ignore[import-untyped]
        QuantType,
        quant_pre_process,
        quantize_dynamic,
        quantize_static,
    )

    from .network import matches
    from .program import quietly

    with quietly(), TemporaryDirectory() as folder:
        shaped = f"{folder}/shaped.onnx"
        quant_pre_process(
            source, shaped, skip_optimization=True, skip_symbolic_shape=True
        )
        graph = onnx.load(shaped, load_external_data=False).graph
        # Biases have one dimension, and stay in float32.
        weights = {value.name for value in graph.initializer if len(value.dims) > 1}
        layers = [
            n
            for n in graph.node
            if n.op_type in ("Conv", "MatMul", "Gemm") and weights & {*n.input}
        ]
        selected = [node for node in layers if not matches(_owner(node), unchanged)]
        if not selected:
            raise UsageError("quantise: keep: nothing is left to round")
        # ``quant_pre_process`` converts a Gemm to a MatMul of this name.
        names = [
            name for node in selected for name in (node.name, f"{node.name}_MatMul")
        ]
        common = {
            "per_channel": True,
            "nodes_to_quantize": names,
            # Without VNNI, sums of products of eight bits saturate.
            "reduce_range": not _has_vnni(),
        }
        if is_static or any(node.op_type == "Conv" for node in selected):
            reader = _reader([value.name for value in graph.input], calls)
            types = {
                "activation_type": QuantType.QUInt8,
                "weight_type": QuantType.QInt8,
            }
            quantize_static(shaped, rounded, reader, **types, **common)
        else:
            quantize_dynamic(shaped, rounded, weight_type=QuantType.QInt8, **common)


def _owner(node: Any) -> str:
    """Returns the module of an operation: by the name of a weight, or by the exporter's
    metadata.
    """
    for name in node.input:
        if name.endswith(".weight"):
            return str(name).removesuffix(".weight")
    from .program import SCOPES

    scopes = next(
        (prop.value for prop in node.metadata_props if prop.key == SCOPES), "['', '']"
    )
    return str(literal_eval(scopes)[-2])


def _reader(names: Sequence[str], calls: Iterator[ForwardCall]) -> Any:
    """Returns a reader of the inputs of calls, as calibration needs it."""
    import torch
    from onnxruntime.quantization import CalibrationDataReader

    class Inputs(CalibrationDataReader):  # type: ignore[misc]  # untyped
        """Inputs of the network."""

        @torch.no_grad()
        def get_next(self) -> dict[str, Any] | None:
            """Returns the inputs of the next batch; None after the last."""
            call = next(calls, None)
            if call is None:
                return None
            pairs = zip(names, call.inputs, strict=True)
            return {name: tensor.numpy() for name, tensor in pairs}

    return Inputs()


def _has_vnni() -> bool:
    """Returns whether the processor adds up products of eight bits without saturation
    (else weights have seven).
    """
    import torch

    asks = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(asks and asks())
