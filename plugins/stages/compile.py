"""Compiled loss functions."""

import os
import shutil
from functools import partial
from typing import ClassVar, Literal

from runner.api import Close, Pipeline, Setting, Stage, StageConfig, UsageError

COMPILERS = tuple(filter(None, (os.environ.get("CXX"), "g++", "clang++")))
RECOMPILE_LIMIT = 64


class CompileConfig(StageConfig):
    """Compiles the functions that the learner names (targets; losses with their backward and clipping).

    Shapes are fixed, so each function is compiled once, at its first call. Optimizers stay as they are.

    When it helps: long trainings of networks that are small enough for calls to cost more than arithmetic.
    When it hurts: short trainings (compiling takes tens of seconds), and on a CPU for networks that are already one
    large matmul. Measure it; the closing table says how long the first update took.
    """

    kind: ClassVar[str] = "compile"
    phase: ClassVar[int] = 3

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of ``torch.compile``; CUDA graphs are a stage of their own."""

    def contract(self, setting: Setting) -> Close:
        """The same algebra."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """On a CPU, nothing to do without a C++ compiler."""
        if setting.device.type == "cpu" and not any(shutil.which(name) for name in COMPILERS):
            return f"no C++ compiler here: install one of {', '.join(COMPILERS)}, or set CXX"
        return None

    def implementation(self) -> type[Stage]:
        """The compiled slots."""
        return Compile


class Compile(Stage):
    """Compiles what the learner says can be compiled."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces every compilable slot by its compiled form."""
        import torch

        if not pipeline.learner.compilable:
            raise UsageError(f"compile: learner '{type(pipeline.learner).__name__}' names no slot that may be compiled")
        # Agents that are not stacked get a compilation each; torch's default limit of 8 is meant for accidents.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        # A backward that is traced with its forward becomes one graph with it; older versions break the graph there.
        if hasattr(torch._dynamo.config, "trace_autograd_ops"):
            torch._dynamo.config.trace_autograd_ops = True
        compiled = partial(torch.compile, mode=self.config.mode, dynamic=False)
        for name in pipeline.learner.compilable:
            pipeline.slots.wrap(name, compiled)
