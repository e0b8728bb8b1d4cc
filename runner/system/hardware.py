"""Facts about this machine for the lock file, for MLflow tags and for ``runner doctor``."""

import math
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"
"""Written to ``clear_refs``, it resets the high-water mark (proc_pid_clear_refs(5))."""
_MEMBERSHIP = re.compile(r"^\d+:([^:]*):(/.*)$", re.MULTILINE)
"""A line of ``cgroup``: controllers, none for version 2, and the path."""
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*- (cgroup2?) \S* (\S+)$", re.MULTILINE)
"""A line of ``mountinfo``: what of the file system is mounted, where, the file system's type and its options."""
_MEMORY_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By type of file system: the files with limit and use, and in ``memory.stat`` what the kernel gives back at need."""


def hardware() -> dict[str, str | int]:
    """Facts about this machine that can change a measurement; of torch's only if the caller has imported it already."""
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
    """Cores that this process may use, which ``taskset`` or a container's quota can make fewer."""
    process = psutil.Process()
    affinity = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None  # not on macOS
    cores = len(affinity or ()) or psutil.cpu_count() or 1
    quotas = [_quota(kind, folder) for kind, folder in _cgroups("cpu")]
    return max(1, math.ceil(min([cores, *quotas])))


def available_memory() -> int:
    """Bytes of host memory that this process can still take: what is free, or the tightest limit of its cgroups."""
    limits = [_remaining_bytes(folder, *_MEMORY_FILES[kind]) for kind, folder in _cgroups("memory")]
    return max(0, int(min([psutil.virtual_memory().available, *limits])))


def peak_host_memory() -> int:
    """Most bytes that this program ever held; ``getrusage`` on Linux includes the process that started it."""
    status = _PROCESS / "status"
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def resident_memory() -> int:
    """Returns the bytes of this process that are in physical memory.

    Raises:
        OSError: This system has no ``/proc``.
    """
    lines = (_PROCESS / "status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def reset_peak_host_memory() -> None:
    """Lowers the mark of ``peak_host_memory`` to what this process holds now.

    Raises:
        OSError: This system does not allow it.
    """
    (_PROCESS / "clear_refs").write_text(_RESET_PEAK)


def _cgroups(controller: str) -> Iterator[tuple[str, Path]]:
    """File system type and folder of this process's cgroups, and of all their visible parents."""
    paths: dict[str, str] = {}  # of this process's cgroups, by file system type
    for line in _MEMBERSHIP.finditer(_content(_PROCESS / "cgroup")):
        controllers, path = line.groups()
        if not controllers or controller in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in _MOUNT.finditer(_content(_PROCESS / "mountinfo")):
        root, point, kind, options = line.groups()
        if kind not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        # In a container, the path may be that of the host: then the mount shows the
        # container's cgroup.
        path = Path(paths[kind])
        folders: tuple[str, ...] = ()
        if path.is_relative_to(root) and ".." not in path.parts:
            folders = path.relative_to(root).parts
        top = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point))
        for depth in range(len(folders) + 1):
            yield kind, top.joinpath(*folders[:depth])


def _quota(kind: str, cgroup: Path) -> float:
    """Processor time per time of a cgroup, in cores; infinite if it has no limit."""
    files = ("cpu.max",) if kind == "cgroup2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        text = " ".join((cgroup / file).read_text() for file in files)
        quota, period = map(int, text.split())
    except (OSError, ValueError):  # "max" is not a number
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _remaining_bytes(cgroup: Path, limit: str, used: str, reclaimable: str) -> float:
    """Returns the bytes that a cgroup may still allocate; infinite without a limit."""
    try:
        # "max" is not a number.
        limit_bytes = int((cgroup / limit).read_text())
        used_bytes = int((cgroup / used).read_text())
    except (OSError, ValueError):
        return math.inf
    # The kernel gives the file cache back when memory is needed.
    file_cache = re.search(rf"^{reclaimable} (\d+)$", _content(cgroup / "memory.stat"), re.MULTILINE)
    cached_bytes = int(file_cache[1]) if file_cache else 0
    return limit_bytes - used_bytes + cached_bytes


def _content(path: Path) -> str:
    """Returns the content of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


@cache
def cpu_model() -> str:
    """Returns the processor's trade name, or its architecture if the system does not
    provide the name.
    """
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    lines = _content(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def slow_bf16() -> str | None:
    """Why bf16 is slower than float32 on this processor; None if nothing is known against it."""
    import torch

    has = torch.cpu.get_capabilities()
    if not has.get("avx512_bf16", False):
        return "this processor has no AVX512-BF16, and emulated bf16 is slower than float32"
    # A Xeon with arithmetic in fp16 has AMX; what else has the one need not have the other.
    xeon = str(has.get("cpu_name", "")).startswith("Intel Xeon") and has.get("avx512_fp16", False)
    if xeon and not has.get("amx_bf16", False):
        return "this processor's AMX is not to be had here, and its other bf16 arithmetic is slower than float32"
    return None
