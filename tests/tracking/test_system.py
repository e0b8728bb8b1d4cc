import sys
import types

from mlflow.system_metrics.metrics import gpu_monitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

from runner.tracking.system import SystemMonitor


def names_of(*monitors):
    """What MLflow calls what it samples itself."""
    for monitor in monitors:
        monitor.collect_metrics()
    return {f"system/{name}" for monitor in monitors for name in monitor.metrics}


def test_names_are_those_of_mlflow_but_for_what_it_does_not_sample(tmp_path):
    monitor = SystemMonitor(tmp_path)
    monitor.sample()
    own = {name for name in monitor.sample() if "process" in name}
    assert own == {"system/process_cpu_utilization_percentage", "system/process_memory_usage_megabytes"}
    assert monitor.sample().keys() - own <= names_of(CPUMonitor(), DiskMonitor())


def test_the_load_is_a_mean_since_the_last_sample(tmp_path):
    monitor = SystemMonitor(tmp_path)
    first, second = monitor.sample(), monitor.sample()
    load = {"system/cpu_utilization_percentage", "system/process_cpu_utilization_percentage"}
    assert set(second) - set(first) == load
    assert 0 < second["system/system_memory_usage_percentage"] <= 100
    assert second["system/process_memory_usage_megabytes"] < second["system/system_memory_usage_megabytes"]
    assert second["system/disk_available_megabytes"] >= 0


def test_gpus_are_sampled_where_nvml_answers(tmp_path, monkeypatch):
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetMemoryInfo = lambda _: types.SimpleNamespace(used=3e6, total=12e6)
    nvml.nvmlDeviceGetPowerUsage = nvml.nvmlDeviceGetEnforcedPowerLimit = lambda _: 1000

    def utilization(index):
        if index == 1:
            raise nvml.NVMLError("Not Supported")
        return types.SimpleNamespace(gpu=40)

    nvml.nvmlDeviceGetUtilizationRates = utilization
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_monitor, "pynvml", nvml, raising=False)
    gpus = {name: value for name, value in SystemMonitor(tmp_path).sample().items() if "gpu" in name}
    assert gpus == {
        "system/gpu_0_memory_usage_megabytes": 3.0,
        "system/gpu_0_memory_usage_percentage": 25.0,
        "system/gpu_0_utilization_percentage": 40.0,
        "system/gpu_1_memory_usage_megabytes": 3.0,
        "system/gpu_1_memory_usage_percentage": 25.0,
    }
    assert gpus.keys() <= names_of(GPUMonitor())


def test_a_machine_without_nvml_has_no_gpu_metrics(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not [name for name in SystemMonitor(tmp_path).sample() if "gpu" in name]
