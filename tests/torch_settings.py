"""Torch's settings that belong to the whole process, which a test must leave as they were."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """How a setting is read and set."""

    read: Callable[[], Any]
    restore: Callable[[Any], Any]


SETTINGS = {
    "default_dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "float32_matmul_precision": Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": Setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "grad": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": Setting(partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "anomaly": Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
}


def read() -> dict[str, Any]:
    """The value of every setting."""
    return {name: setting.read() for name, setting in SETTINGS.items()}


def restore(values: dict[str, Any]) -> dict[str, Any]:
    """Sets them again; returns those that were different."""
    changed = {name: value for name, value in read().items() if value != values[name]}
    for name in changed:
        SETTINGS[name].restore(values[name])
    return changed
