"""Use of the machine by a training, under the names of MLflow's system metrics."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

# MLflow counts megabytes of a million bytes.
_MEGABYTE = 1e6


class SystemMonitor:
    """Samples this process and the machine it runs on: processor, memory, disk and, where there is one, NVIDIA GPUs."""

    def __init__(self, disk: Path) -> None:
        self._disk = str(disk)
        self._process = psutil.Process()
        self._gpus: list[Any] = []
        self._has_sampled = False
        with suppress(ImportError):
            import pynvml

            self._nvml = pynvml
            # The driver may be missing.
            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                count = pynvml.nvmlDeviceGetCount()
                self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]

    def sample(self) -> dict[str, float]:
        """Metrics by name; the units are in the names, a megabyte has a million bytes.

        Names with ``process`` are about this process alone. The processor's load
        is the mean since the last sample, so the first one has none; a process
        that keeps two cores busy has 200 percent.
        """
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage(self._disk)
        metrics = {
            "system/system_memory_usage_megabytes": memory.used / _MEGABYTE,
            "system/system_memory_usage_percentage": 100 * memory.used / memory.total,
            "system/process_memory_usage_megabytes": self._process.memory_info().rss / _MEGABYTE,
            "system/disk_usage_percentage": disk.percent,
            "system/disk_available_megabytes": disk.free / _MEGABYTE,
        }
        load = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/process_cpu_utilization_percentage": self._process.cpu_percent(),
        }
        if self._has_sampled:
            metrics |= load
        self._has_sampled = True
        for index, gpu in enumerate(self._gpus):
            # A slice of a partitioned GPU has no separate load.
            with suppress(self._nvml.NVMLError):
                prefix = f"system/gpu_{index}"
                gpu_memory = self._nvml.nvmlDeviceGetMemoryInfo(gpu)
                metrics[f"{prefix}_memory_usage_megabytes"] = gpu_memory.used / _MEGABYTE
                metrics[f"{prefix}_memory_usage_percentage"] = 100 * gpu_memory.used / gpu_memory.total
                utilization = self._nvml.nvmlDeviceGetUtilizationRates(gpu)
                metrics[f"{prefix}_utilization_percentage"] = float(utilization.gpu)
        return metrics
