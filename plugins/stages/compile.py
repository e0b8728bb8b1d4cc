"""Compiled loss functions."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ClassVar, Literal

from runner.api import Close, Pipeline, Setting, Stage, StageConfig, UsageError, tensors

from .kernel_choices import WITHOUT_CACHES, KernelChoices

COMPILERS = tuple(filter(None, (os.environ.get("CXX"), "g++", "clang++")))
RECOMPILE_LIMIT = 64
WARN_AT = 2
_log = logging.getLogger(__name__)


class CompileConfig(StageConfig):
    """Compiles the functions that the learner names (targets; losses with their backward and clipping).

    Each function is compiled once, at its first call: for the shapes of that call, or
    for any shapes if the source declares that they vary. Recompilations are counted.
    Optimizers are not compiled.

    When it helps: long trainings of networks that are small enough for calls to cost
    more than arithmetic.
    When it hurts: short trainings (compiling takes tens of seconds), and on a CPU for
    networks that are already one large matmul. Measure it; the closing table contains
    the duration of the first update.
    """

    kind: ClassVar[str] = "compile"
    implementation = "Compile"
    phase: ClassVar[int] = 3
    usual: ClassVar[bool] = True
    unplanned: ClassVar[str] = "it fuses operations and computes some again; --compiled includes it"
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})
    traces: ClassVar[bool] = True

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of ``torch.compile``; CUDA graphs are a separate stage."""
    device: Literal["any", "cuda"] = "any"
    """Type of the device on which it compiles; with ``cuda`` the stage is inactive on a CPU."""

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if the device is not selected, or without a C++ compiler on a CPU."""
        if self.device not in ("any", setting.device.type):
            return f"it compiles on {self.device} alone (device), and this is a {setting.device.type}"
        if setting.device.type == "cpu" and not any(shutil.which(name) for name in COMPILERS):
            return f"no C++ compiler here: install one of {', '.join(COMPILERS)}, or set CXX"
        return None

    def tunes(self, setting: Setting) -> bool:
        """Returns whether torch times kernels: on a GPU always, on a CPU only if the mode is not the default."""
        return setting.device.type == "cuda" or self.mode != "default"


class Compile(Stage):
    """Compiles the learner's compilable slots."""

    computes_eagerly = False
    """Whether a slot is called at present for shapes that are not compiled."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces every compilable slot by its compiled form.

        Raises:
            UsageError: the learner names none.
        """
        import torch

        if not pipeline.learner.compilable:
            raise UsageError(f"compile: learner '{type(pipeline.learner).__name__}' names no slot that may be compiled")
        # Agents that are not stacked get a compilation each; torch's default limit of 8 is meant for accidents.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        # A backward that is traced with its forward becomes one graph with it; older versions break the graph there.
        if hasattr(torch._dynamo.config, "trace_autograd_ops"):
            torch._dynamo.config.trace_autograd_ops = True
        # Torch inspects gradients of all arguments of a function, also of results of another one.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        self.recompilations = Recompilations()
        # In the default mode, torch times at most the sizes of blocks of Triton's kernels, and keeps these elsewhere.
        self.kernels = None if self.config.mode == "default" else KernelChoices(pipeline.choices)
        compile_slot = partial(self.compile_slot, dynamic=pipeline.shapes_vary)
        for name in pipeline.learner.compilable:
            if pipeline.shapes_vary:
                pipeline.slots.wrap(name, compile_slot)
            else:
                pipeline.slots.wrap(name, partial(self.compiled_once, compile_slot))
        pipeline.slots.wrap("update", self.recompilations.counted)
        if self.kernels is not None:
            # The backward pass is compiled when it is first needed, after the function has returned.
            pipeline.slots.wrap("update", self.kernels.applied)

    def compile_slot(self, step: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
        """Returns the slot in compiled form, whose kernels are tuning choices in a mode that selects them."""
        import torch

        if self.kernels is None:
            return torch.compile(step, mode=self.config.mode, dynamic=dynamic)
        options = torch._inductor.list_mode_options(self.config.mode, dynamic) | WITHOUT_CACHES
        compiled = torch.compile(step, options=options, dynamic=dynamic)
        applied = self.kernels.applied(compiled)

        @wraps(step)
        def call(*arguments: Any, **options: Any) -> Any:
            # Inside of another compiled function there is nothing to select yet.
            if torch.compiler.is_compiling():
                return compiled(*arguments, **options)
            return applied(*arguments, **options)

        return call

    def compiled_once(self, compile_slot: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the slot in compiled form, which evaluations compile for their first batch only.

        The last batch of an evaluation and the last window of a text are smaller than the others.
        To compile for shapes or strides that come once takes longer than to compute without.
        """
        import torch

        compiled = compile_slot(step)
        evaluated: list[Any] = []

        @wraps(step)
        def call(*arguments: Any, **options: Any) -> Any:
            # A slot inside of another one is part of its graph, or computed as that is.
            if torch.compiler.is_compiling() or self.computes_eagerly:
                return step(*arguments, **options)
            if self.recompilations.is_updating:
                return compiled(*arguments, **options)
            inputs = tensors([arguments, options])
            layout = [(tensor.shape, tensor.stride()) for tensor in inputs]
            if not evaluated:
                evaluated.append(layout)
            if layout == evaluated[0]:
                return compiled(*arguments, **options)
            self.computes_eagerly = True
            try:
                return step(*arguments, **options)
            finally:
                self.computes_eagerly = False

        return call

    def closing_notes(self) -> list[str]:
        """Returns the number of recompilations, and of kernels from the lock."""
        notes = []
        if count := self.recompilations.count:
            notes.append(f"{count} recompilation{'s' * (count > 1)} after the first update")
        if self.kernels is not None and (count := self.kernels.replayed):
            notes.append(f"{count} kernel{'s' * (count > 1)} as recorded")
        return notes


class Recompilations:
    """Counts what is compiled again in later updates, because a shape or another constant of it has changed."""

    def __init__(self) -> None:
        self.count = self.updates = 0
        self.is_updating = False
        self._first: dict[str, int] = {}
        """In which update a function was compiled first, by its number."""

    def counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The update, inside which compilations count; an evaluation compiles for itself."""
        from torch._dynamo.callback import callback_handler

        def update(*arguments: Any) -> Any:
            self.updates += 1
            self.is_updating = True
            callback_handler.register_start_callback(self.begun)
            try:
                return step(*arguments)
            finally:
                self.is_updating = False
                callback_handler.remove_start_callback(self.begun)

        return update

    def begun(self, compilation: Any) -> None:
        """Called by torch for every compilation that starts."""
        function = str(compilation.compile_id).partition("/")[0]
        if compilation.callback_trigger.name != "DYNAMO":  # a backward is compiled when it is first needed
            return
        if self._first.setdefault(function, self.updates) == self.updates:
            return
        self.count += 1
        if self.count == WARN_AT:
            _log.warning(
                "compile: update %d compiles for the second time again, which takes seconds each time: do shapes vary "
                "(SourceConfig.shapes_vary), or numbers that the function reads?",
                self.updates,
            )
