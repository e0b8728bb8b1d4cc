"""What the machine does while a run trains: processor, memory, disk and, where there is one, NVIDIA GPUs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


class SystemMonitor:
    """Samples this process and the machine it runs on."""

    def __init__(self, disk: Path) -> None:
        """``disk`` is a path on the disk whose free space is of interest."""
        self._disk = str(disk)
        self._process = psutil.Process()
        self._nvml, self._gpus = _open_gpus()
        self._used_before = False

    def sample(self) -> dict[str, float]:
        """Metrics by name; the units are in the names.

        The processor's load is the mean since the last sample, so the first one has none. A process that keeps two
        cores busy has 200 percent.
        """
        memory = psutil.virtual_memory()
        metrics = {
            "system/memory_percent": memory.percent,
            "system/process_memory_mib": self._process.memory_info().rss / 2**20,
            "system/disk_free_gib": psutil.disk_usage(self._disk).free / 2**30,
        }
        load = {"system/cpu_percent": psutil.cpu_percent(), "system/process_cpu_percent": self._process.cpu_percent()}
        if self._used_before:
            metrics |= load
        self._used_before = True
        for index, gpu in enumerate(self._gpus):
            with suppress(self._nvml.NVMLError):  # a slice of a partitioned GPU tells no load of its own
                metrics[f"system/gpu_{index}_memory_mib"] = self._nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**20
                metrics[f"system/gpu_{index}_percent"] = float(self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        return metrics


def _open_gpus() -> tuple[Any, list[Any]]:
    """NVML and its device handles; none where its binding or the driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except ImportError:
        return None, []
    except pynvml.NVMLError:
        return None, []
