"""The network as a separate program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from runner.api import (
    Anchor,
    Close,
    Pipeline,
    Setting,
    Stage,
    StageConfig,
    UsageError,
    nbytes,
)

if TYPE_CHECKING:
    from runner.api import GradientLearner

    from .network import ForwardCall
    from .program import Program

EXTRA = "pip install 'proven-runner[inference]'"
"""Command that installs ONNX Runtime and torchao."""


class ExportConfig(StageConfig):
    """Answers by a program that was made of the network: one of ``torch.export``, or an ONNX file
    and ONNX Runtime.

    The exported network is that of the slot ``forward``, with the inputs of one real
    prediction as its example; the code around it (the loop of a sampling, the encoder
    of a condition) stays in Python. The sizes of a batch, of a set or of a sequence may
    differ later, as far as the network allows. Weights are in the file, or in a
    ``.onnx.data`` file next to it if they are large. A program of ``torch.export`` is
    created from the run's weights each time, because reading a ``.pt2`` would execute
    its content. Inputs of another form are computed by the network itself, and counted.

    When it helps: ONNX Runtime fuses small operations, most of all for small batches on a CPU;
    and a program can be run without this project. When it hurts: exporting takes seconds;
    products of large batches cost the same in both.
    """

    kind: ClassVar[str] = "export"
    implementation = "Export"
    phase: ClassVar[int] = 3
    wraps: ClassVar[frozenset[str]] = frozenset({"forward"})

    format: Literal["torch", "onnx"] = "onnx"
    """A ``.pt2`` of ``torch.export``, or ONNX with opset 20."""
    path: Annotated[str | None, Anchor()] = None
    """Where the program is written; without it, ONNX is kept with the run, and a ``.pt2`` is not
    written.
    """

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra, by other kernels."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns None, or raises a UsageError without ONNX Runtime or with conflicting stages."""
        refuse_stages(setting, "format", ("amp", "compile", "merged_conv_bn"))
        if self.path is not None and Path(self.path).suffix != SUFFIXES[self.format]:
            raise UsageError(
                f"path: should end in {SUFFIXES[self.format]}, as format: {self.format} does"
            )
        if self.format == "onnx":
            needs_onnxruntime(setting, "format")
        return None


SUFFIXES = {"torch": ".pt2", "onnx": ".onnx"}


def refuse_stages(setting: Setting, key: str, kinds: Sequence[str]) -> None:
    """Raises a UsageError for stages that change how the network computes, because the program
    would ignore them.
    """
    if conflicts := [kind for kind in kinds if kind in setting.stages]:
        raise UsageError(
            f"{key}: what is exported is the network alone: switch {' and '.join(conflicts)} off"
        )


def needs_onnxruntime(setting: Setting, key: str) -> None:
    """Raises a UsageError if a setting requires ONNX Runtime and it is not available."""
    from importlib.util import find_spec

    if setting.device.type != "cpu":
        raise UsageError(
            f"{key}: ONNX Runtime computes on a CPU here, not on '{setting.device.type}'; "
            f"device: cpu"
        )
    missing = [
        name
        for name in ("onnx", "onnxruntime", "onnxscript")
        if find_spec(name) is None
    ]
    if missing:
        raise UsageError(f"{key}: {' and '.join(missing)} not installed: {EXTRA}")


class Export(Stage):
    """Replaces the network by the program."""

    def attach(self, pipeline: Pipeline) -> None:
        """Exports the network, or loads an earlier export, and replaces the network by it.

        Raises:
            UsageError: the network cannot be exported.
        """
        import torch

        from .network import first_call, fixed_batch, settled

        learner = settled(pipeline, self.config.kind)
        with torch.no_grad():
            example = first_call(pipeline, learner, self.config.kind)
            make = (
                self._by_torch
                if self.config.format == "torch"
                else self._by_onnxruntime
            )
            self.program, deviation = make(pipeline, learner, example)
            reason = fixed_batch(pipeline, learner, self.config.kind, self.program.fits)
        if reason is not None:
            pipeline.deactivate(reason)
            return
        pipeline.slots.wrap("forward", self.program.in_place_of(lambda: learner.module))
        self.bytes = self.program_bytes + self.program.outside
        pipeline.note(
            f"the program has {self.program_bytes:,} bytes; an answer is off by {deviation:.0e} of "
            f"its size"
        )

    @property
    def program_calls(self) -> int:
        """Returns the calls that the program answered."""
        return self.program.answers

    @property
    def network_calls(self) -> int:
        """Returns the calls that the network answered, because the program did not fit."""
        return self.program.others + self.program.failures

    def closing_notes(self) -> Sequence[str]:
        """Returns how many inputs did not fit the program."""
        return self.program.notes()

    def _by_torch(
        self, pipeline: Pipeline, learner: GradientLearner, example: ForwardCall
    ) -> tuple[Program, float]:
        """Exports the network each time: a ``.pt2`` contains pickles, which must not be read."""
        from .program import difference, exported, of_torch, write_torch

        export = exported(learner.module, example, self.config.kind)
        program = export.program
        self.program_bytes = nbytes(dict(program.state_dict))
        if self.config.path is not None:
            with self._writing():
                write_torch(program, Path(self.config.path))
        answers = of_torch(export)
        return answers, difference(answers, example)

    def _by_onnxruntime(
        self, pipeline: Pipeline, learner: GradientLearner, example: ForwardCall
    ) -> tuple[Program, float]:
        """Uses the file that was written before, or exports the network."""
        from .network import digest, stored_file
        from .program import LAYOUT, bytes_of, difference, exported, of_onnx, write_onnx

        def write(path: Path) -> None:
            write_onnx(
                exported(learner.module, example, self.config.kind),
                path,
                self.config.kind,
            )

        def use(path: Path) -> tuple[Program, float]:
            self.program_bytes = bytes_of(path)
            program = of_onnx(path, example)
            return program, difference(program, example)

        try:
            if self.config.path is not None:
                with self._writing():
                    write(Path(self.config.path))
                return use(Path(self.config.path))
            key = digest(learner.module, LAYOUT, learner.config.model_dump())
            return stored_file(
                pipeline,
                self,
                f"{self.config.kind}-{key}{SUFFIXES['onnx']}",
                write,
                use,
            )
        except RuntimeError as error:
            raise UsageError(
                f"export: format: ONNX Runtime cannot run the network: {error}"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Returns a context manager for writing to the configured path."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"export: path: {self.config.path} cannot be written: {reason}"
            ) from error
