"""The machine that a tuning choice is valid for: what a measured time depends on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Machine = dict[str, str | int]
_LIBRARIES = ("torch", "numpy", "triton")
"""Distributions whose code is timed."""


def tuning_machine(device: torch.device) -> Machine:
    """Returns the processor, threads, device and versions that tuning choices depend on.

    Two machines with equal values are identical as far as tuning is concerned.
    """
    import torch

    from runner.system.hardware import cpu_model

    machine: Machine = {
        "cpu": cpu_model(),
        # The same processor has fewer instructions in some virtual machines.
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "python": platform.python_version(),
    }
    machine |= _library_versions()
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
        machine["cuda"] = str(torch.version.cuda)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        machine["cudnn"] = "none" if cudnn is None else int(cudnn)
    return machine


@cache
def _library_versions() -> dict[str, str]:
    """Returns versions of the installed libraries; searching for them takes milliseconds."""
    versions: dict[str, str] = {}
    for library in _LIBRARIES:
        try:
            versions[library] = distribution(library).version
        except PackageNotFoundError:
            continue
    return versions


def machine_differences(recorded: Mapping[str, object], present: Mapping[str, object]) -> list[str]:
    """Returns a text for every value of two machines that differs."""
    names = dict.fromkeys([*recorded, *present])
    return [
        f"{name} {recorded.get(name, 'none')}, here {present.get(name, 'none')}"
        for name in names
        if recorded.get(name) != present.get(name)
    ]
