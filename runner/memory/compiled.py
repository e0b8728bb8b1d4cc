"""Compiled updates with tensors that have no numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import clear_caches

from runner.memory.fake import without_copies
from runner.memory.module_stack import ModuleStack
from runner.memory.tracker import UpdateTracker

_GUARDS: Any = torch._C._dynamo.guards
"""Module from which generated code takes its functions for memory."""


class CompiledTracker(UpdateTracker):  # type: ignore[no-untyped-call]
    """Tracks what compiled code allocates, and nothing of its compilation."""

    # Generated code draws random numbers with an operator of higher order.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: torch compiles functions although this mode is on."""
        return True


class CompiledStack(ModuleStack):
    """Stack that follows no modules: hooks of modules would change compiled graphs."""

    def __enter__(self) -> CompiledStack:
        """Registers no hooks."""
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing."""


@contextmanager
def generated_code() -> Iterator[None]:
    """Makes ``torch.compile`` generate code for fake tensors inside the ``with``.

    The generated code allocates and frees memory as it does in a training. Its kernels are not
    compiled, and do nothing. What torch caches of it is forgotten afterwards.
    """
    memory: dict[str, Any] = {
        "_empty_strided_cpu": _empty_strided,
        "_reinterpret_tensor": _reinterpret,
    }
    settings: dict[str, Any] = {
        "fx_graph_cache": False,
        # Otherwise torch starts processes that test the vector instructions.
        "cpp.vec_isa_ok": True,
    }
    # Modules of generated code are kept by their text, in memory and in this folder.
    clear_caches()
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
        config.patch(settings),
        functorch_config.patch(enable_autograd_cache=False),
        patch.multiple(_GUARDS, **memory),
        patch.object(AsyncCompile, "cpp_pybinding", _skipped_kernel),
        without_copies(),
    ):
        try:
            yield
        finally:
            torch.compiler.reset()
            clear_caches()


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """Allocates as torch's function for generated code does, in sight of dispatch modes."""
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    """Returns a view as torch's function for generated code does.

    Args:
        tensor: Tensor whose storage is viewed.
        size: Shape of the view.
        stride: Strides of the view.
        offset: Elements after the first one of the tensor.
    """
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _skipped_kernel(*_source: Any) -> Callable[..., None]:
    """Returns a kernel that computes nothing."""

    def kernel(*_arguments: Any) -> None:
        pass

    return kernel
