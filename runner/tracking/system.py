"""What the machine does while a run trains: processor, memory, disk and, where there is one, NVIDIA GPUs."""

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
        self._nvml: Any = None
        self._gpus: list[Any] = []
        self._used_before = False
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):  # the driver is missing
                pynvml.nvmlInit()
                self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml

    def sample(self) -> dict[str, float]:
        """Metrics by name; the units are in the names.

        The processor's load is the mean since the last sample, so the first one has none. A process that keeps two
        cores busy has 200 percent.
        """
        metrics = {
            "system/memory_percent": psutil.virtual_memory().percent,
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
