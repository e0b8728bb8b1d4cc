"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from runner.api import UsageError

from .backend import Backend
from .fft import Fft
from .im2col import Im2Col
from .key import ConvKey
from .native import (
    ChannelsLastKernels,
    CudnnBenchmark,
    CudnnHeuristic,
    Native,
    WithoutOneDnn,
)
from .winograd import Winograd

_ALL: tuple[Backend, ...] = (
    Native(),
    ChannelsLastKernels(),
    Im2Col(),
    Fft(),
    Winograd(),
    WithoutOneDnn(),
    CudnnHeuristic(),
    CudnnBenchmark(),
)
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {backend.name: backend for backend in _ALL}
)
"""Every backend by name; ``native`` is the first."""
NATIVE = BACKENDS["native"]


def backend_named(name: str) -> Backend:
    """Returns a backend.

    Raises:
        UsageError: There is none of that name.
    """
    if name not in BACKENDS:
        raise UsageError(
            f"unknown convolution backend '{name}': use one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]


def legal_backends(key: ConvKey) -> list[Backend]:
    """Returns the backends that can compute a convolution; ``native`` is the first."""
    return [backend for backend in BACKENDS.values() if backend.refusal(key) is None]


def refusals(key: ConvKey) -> dict[str, str]:
    """Returns why the other backends cannot compute it, by name."""
    reasons = {name: backend.refusal(key) for name, backend in BACKENDS.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}
