"""Compiled loss functions."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from runner.api import Close, Config, Pipeline, Setting, Stage


class Compile(Stage):
    """Compiles the learner's pure functions (targets and losses, forward and backward) with ``torch.compile``.

    Shapes are fixed, so each function is compiled once, at its first call. Optimizers, clipping and everything with an
    effect stay as they are.

    When it helps: long trainings of networks that are small enough for calls to cost more than arithmetic.
    When it hurts: short trainings (compiling takes tens of seconds), and on a CPU for networks that are already one
    large matmul. Measure it; the closing table says how long the first update took.
    """

    kind: ClassVar[str] = "compile"
    phase: ClassVar[int] = 3
    contract = Close()

    class Config(Config):
        """How to compile."""

        mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
        """Mode of ``torch.compile``; CUDA graphs are a stage of their own."""

    config: Config

    def inactive(self, setting: Setting) -> str | None:
        """Nothing to do without a working compiler."""
        if setting.device.type != "cpu":
            return None
        import shutil

        from torch._inductor import config as inductor

        if not any(shutil.which(c) for c in (inductor.cpp.cxx if isinstance(inductor.cpp.cxx, tuple) else (inductor.cpp.cxx,)) if c):
            return "no C++ compiler here: install g++ or clang++"
        return None

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces every compilable slot by its compiled form."""
        import torch

        for name in pipeline.learner.compilable:
            step = getattr(pipeline.slots, name)
            pipeline.slots.replace(name, torch.compile(step, mode=self.config.mode, dynamic=False, fullgraph=True))
