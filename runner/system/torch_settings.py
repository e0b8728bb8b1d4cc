"""Global settings of torch, with functions that read and write each."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import _C
from torch.backends import cuda, mha

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable of the environment that gives cuBLAS a separate workspace for each stream."""


class TorchSetting(NamedTuple):
    """Reads and writes one setting."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def read(with_compiler: bool = True) -> dict[str, Any]:
    """Returns all settings by name; one that cannot be read is None.

    Args:
        with_compiler: Whether those of the compiler, which takes a second to import, are among them.
    """
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if name == _FALLBACK_RANDOM and not with_compiler:
            continue
        # As ``_value_or_none``; this is read several times in each update that is compared.
        try:
            values[name] = setting.read()
        except (RuntimeError, AttributeError):
            values[name] = None
    return values


def write(values: Mapping[str, Any]) -> None:
    """Restores the result of ``read``, in its order: settings that combine several
    others precede those.
    """
    for name, value in values.items():
        setting = SETTINGS[name]
        if value is not None and _value_or_none(setting.read) != value:
            setting.write(value)


@contextmanager
def default_contexts() -> Iterator[None]:
    """Ends the effect of every context of torch that is around the ``with``, inside of it.

    A context that has no effect is not entered: some delay every call of torch.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def unusual() -> dict[str, tuple[Any, Any]]:
    """Returns the settings that change results and are not torch's own: present and usual value by name."""
    present = {name: _value_or_none(SETTINGS[name].read) for name in _USUAL}
    return {name: (present[name], usual) for name, usual in _USUAL.items() if present[name] not in (None, usual)}


def inductor() -> Any:
    """The settings of ``torch.compile``'s backend, which the first optimizer imports anyway."""
    from torch._inductor import config

    return config


def prefer_deterministic_kernels() -> None:
    """Makes torch select deterministic kernels; an operator without one stays as it is.

    cuBLAS reads its setting when a process first uses it, so a later call does not change it.
    """
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    # Such an operator is reported when two of its results differ, and needs no warning.
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
    torch.set_deterministic_debug_mode("warn")
    # In this mode, their backward passes still add in any order.
    cuda.enable_flash_sdp(False)
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_cudnn_sdp(False)


def require_deterministic_kernels() -> None:
    """Makes torch select deterministic kernels; an operator without one raises an error."""
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.set_deterministic_debug_mode("error")


def _value_or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    # An older setting cannot represent different values of several backends, and an older torch has
    # fewer settings.
    except (RuntimeError, AttributeError):
        return None


def _attributes(path: str, *names: str) -> Iterator[tuple[str, TorchSetting]]:
    owner = attrgetter(path)(torch)
    for name in names:
        yield (
            f"torch.{path}.{name}",
            TorchSetting(partial(getattr, owner, name), partial(setattr, owner, name)),
        )


def _float32(backend: str, operation: str) -> tuple[str, TorchSetting]:
    """Returns the float32 precision of an operation; a backend or all backends provide the
    default.
    """

    def write(value: str) -> None:
        # The inherited value may be the required one.
        _C._set_fp32_precision_setter(backend, operation, "none")
        if _C._get_fp32_precision_getter(backend, operation) != value:
            _C._set_fp32_precision_setter(backend, operation, value)

    return f"fp32_precision of {backend}, {operation}", TorchSetting(
        partial(_C._get_fp32_precision_getter, backend, operation), write
    )


def _reduction(dtype: str) -> tuple[str, TorchSetting]:
    name = f"allow_{dtype}_reduced_precision_reduction"
    read = attrgetter(name, f"{name}_split_k")
    return f"torch.backends.cuda.matmul.{name}", TorchSetting(
        partial(read, cuda.matmul), partial(setattr, cuda.matmul, name)
    )


def _autocast(device: str) -> Iterator[tuple[str, TorchSetting]]:
    for name, getter, setter in (
        ("enabled", torch.is_autocast_enabled, torch.set_autocast_enabled),
        ("dtype", torch.get_autocast_dtype, torch.set_autocast_dtype),
    ):
        yield (
            f"autocast {name} on {device}",
            TorchSetting(partial(getter, device), partial(setter, device)),
        )


def _flushes_denormals() -> bool:
    # The setting belongs to the processor, which computes Python's numbers as well as torch's.
    return _SMALLEST * _ONE == 0.0


_FALLBACK_RANDOM = "torch._inductor.config.fallback_random"
_SMALLEST, _ONE = (float(number) for number in ("5e-324", "1"))


SETTINGS: dict[str, TorchSetting] = {
    "torch.get_default_dtype": TorchSetting(torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device": TorchSetting(
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "torch.get_num_threads": TorchSetting(torch.get_num_threads, torch.set_num_threads),
    "torch.is_grad_enabled": TorchSetting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_deterministic_debug_mode": TorchSetting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "torch.utils.deterministic.fill_uninitialized_memory": TorchSetting(
        _C._get_deterministic_fill_uninitialized_memory,
        _C._set_deterministic_fill_uninitialized_memory,
    ),
    "torch.set_flush_denormal": TorchSetting(_flushes_denormals, torch.set_flush_denormal),
    "torch.is_anomaly_enabled": TorchSetting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "torch.is_autocast_cache_enabled": TorchSetting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    **dict(_autocast("cpu")),
    **dict(_autocast("cuda")),
    # The older settings of precision write the newer ones below, so they come first.
    "torch.get_float32_matmul_precision": TorchSetting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    **dict(
        _attributes(
            "backends.cudnn",
            "enabled",
            "deterministic",
            "benchmark",
            "benchmark_limit",
            "allow_tf32",
        )
    ),
    **dict(_attributes("backends.cudnn", "depthwise_kernel")),
    **dict(_attributes("backends.mkldnn", "enabled", "deterministic", "allow_tf32")),
    **dict(_attributes("backends.cuda.matmul", "allow_tf32", "allow_fp16_accumulation")),
    **dict(_attributes("backends.miopen", "immediate")),
    **dict(_attributes("backends.opt_einsum", "enabled", "strategy")),
    **dict(_attributes("backends.quantized", "engine")),
    **dict(map(_reduction, ("fp16", "bf16"))),
    **dict(
        _float32(backend, operation)
        for backend, operations in (
            ("generic", ("all",)),
            ("cuda", ("all", "matmul", "conv", "rnn")),
            ("mkldnn", ("all", "matmul", "conv", "rnn")),
        )
        for operation in operations
    ),
    "torch.backends.cpu: reduced precision in fp16": TorchSetting(
        _C._get_cpu_allow_fp16_reduced_precision_reduction,  # type: ignore[attr-defined]
        _C._set_cpu_allow_fp16_reduced_precision_reduction,  # type: ignore[attr-defined]
    ),
    "torch.backends.cuda.flash_sdp_enabled": TorchSetting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "torch.backends.cuda.mem_efficient_sdp_enabled": TorchSetting(
        cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp
    ),
    "torch.backends.cuda.math_sdp_enabled": TorchSetting(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "torch.backends.cuda.cudnn_sdp_enabled": TorchSetting(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed": TorchSetting(
        cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp
    ),
    "attention kernel of other backends": TorchSetting(_C._get_overrideable_sdp_enabled, _C._set_sdp_use_overrideable),
    "attention kernel fa3": TorchSetting(_C._get_fa3_sdp_enabled, _C._set_sdp_use_fa3),
    "priority of attention kernels": TorchSetting(_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    "torch.backends.cuda.preferred_linalg_library": TorchSetting(
        cuda.preferred_linalg_library, cuda.preferred_linalg_library
    ),
    "torch.backends.cuda.preferred_blas_library": TorchSetting(
        cuda.preferred_blas_library, cuda.preferred_blas_library
    ),
    "torch.backends.cuda.preferred_rocm_fa_library": TorchSetting(
        cuda.preferred_rocm_fa_library, cuda.preferred_rocm_fa_library
    ),
    "torch.backends.mha.get_fastpath_enabled": TorchSetting(mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    "torch.backends.nnpack": TorchSetting(_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    _FALLBACK_RANDOM: TorchSetting(
        lambda: inductor().fallback_random,
        lambda value: setattr(inductor(), "fallback_random", value),
    ),
}
"""By the name that evidence calls them by."""

_USUAL: dict[str, Any] = {
    "torch.get_default_dtype": torch.float32,
    "torch.get_deterministic_debug_mode": 0,
    "torch.get_float32_matmul_precision": "highest",
    "torch.set_flush_denormal": False,
    "torch.backends.mkldnn.enabled": True,
    "torch.backends.cudnn.enabled": True,
    "torch.backends.cudnn.benchmark": False,
    "torch.backends.cudnn.allow_tf32": True,
}
"""Torch's own values of settings that change results."""
