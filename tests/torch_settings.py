"""Torch's settings that belong to the whole process, which a test must leave as they were."""

from typing import Any

from runner.system.torch_settings import SETTINGS

WATCHED = (
    "torch.get_default_dtype",
    "torch.get_default_device",
    "torch.get_num_threads",
    "torch.is_grad_enabled",
    "torch.get_deterministic_debug_mode",
    "torch.is_anomaly_enabled",
    "autocast enabled on cpu",
    "autocast dtype on cpu",
    "torch.get_float32_matmul_precision",
)
"""Those that change results on a CPU."""


def read() -> dict[str, Any]:
    """The value of every watched setting."""
    return {name: SETTINGS[name].read() for name in WATCHED}


def restore(values: dict[str, Any]) -> dict[str, Any]:
    """Sets them again; returns those that were different."""
    changed = {name: value for name, value in read().items() if value != values[name]}
    for name in changed:
        SETTINGS[name].write(values[name])
    return changed
