"""Tensors without numbers, in which learners can be built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# FakeTensorMode imports it when it is made, which takes as long as torch itself.
import torch._dynamo.config  # noqa: F401
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily


class _CopyMode(TorchFunctionMode):
    """Copies fake tensors where ``copy.deepcopy`` would copy their storage, which they have not."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__deepcopy__ or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copy = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, tensor.requires_grad)
            memo[id(tensor)] = copy
        return memo[id(tensor)]


def _forget(*arguments: Any) -> None:
    """Replaces a function that would keep a reference to a tensor."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Makes tensors fake inside the ``with``: they have shapes and a device, and no numbers.

    Modules can be moved and copied inside, on a device that need not be there.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    converter: Any = mode.fake_tensor_converter
    # Weak references to a tensor would keep Module.to from replacing it.
    converter.set_tensor_memo = _forget
    converter.add_constant_storage_mapping = _forget
    converter.meta_converter.tensor_memo = {}
    with mode, _CopyMode():
        yield


@contextmanager
def without_copies() -> Iterator[None]:
    """Makes modules impossible to copy inside the ``with``, within ``fake_tensors``.

    The mode that copies would break compiled graphs.
    """
    with _pop_mode_temporarily():
        yield
