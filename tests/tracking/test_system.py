import sys
import types

from runner.tracking.tracker import SystemMonitor


def test_the_load_is_a_mean_since_the_last_sample(tmp_path):
    monitor = SystemMonitor(tmp_path)
    first, second = monitor.sample(), monitor.sample()
    assert set(second) - set(first) == {"system/cpu_percent", "system/process_cpu_percent"}
    assert 0 < second["system/memory_percent"] <= 100
    assert second["system/disk_free_gib"] >= 0


def test_gpus_are_sampled_where_nvml_answers(tmp_path, monkeypatch):
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetMemoryInfo = lambda _: types.SimpleNamespace(used=3 * 2**20)

    def utilization(index):
        if index == 1:
            raise nvml.NVMLError("Not Supported")
        return types.SimpleNamespace(gpu=40)

    nvml.nvmlDeviceGetUtilizationRates = utilization
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus = {name: value for name, value in SystemMonitor(tmp_path).sample().items() if "gpu" in name}
    assert gpus == {
        "system/gpu_0_memory_mib": 3.0,
        "system/gpu_0_percent": 40.0,
        "system/gpu_1_memory_mib": 3.0,
    }


def test_a_machine_without_nvml_has_no_gpu_metrics(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not [name for name in SystemMonitor(tmp_path).sample() if "gpu" in name]
