"""What machine this is: facts for the lock file, for MLflow tags and for ``runner doctor``."""

import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import psutil


def hardware() -> dict[str, str | int]:
    """Facts about this machine that can change a measurement.

    Light: torch is asked for accelerators only if the caller has imported it already.

    Returns:
        ``cpu`` (model name), ``cores`` (usable by this process), ``physical_cores``, ``memory_gib``, ``platform``,
        ``python``; with torch imported also ``torch_threads`` and, where there is one, ``gpu``, ``gpus`` and
        ``gpu_memory_gib``.
    """
    facts: dict[str, str | int] = {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "physical_cores": psutil.cpu_count(logical=False) or usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            facts["gpu"] = properties.name
            facts["gpus"] = torch.cuda.device_count()
            facts["gpu_memory_gib"] = round(properties.total_memory / 2**30)
    return facts


def usable_cores() -> int:
    """Logical processors that this process may run on, which a container or ``taskset`` can make fewer."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return len(process.cpu_affinity() or ())
    return psutil.cpu_count() or 1


@cache
def cpu_model() -> str:
    """The processor's trade name, or its architecture where the system does not tell."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    elif sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set extensions as Linux names them (``avx512_bf16``, ``amx_bf16``); empty on other systems."""
    if sys.platform != "linux":
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
