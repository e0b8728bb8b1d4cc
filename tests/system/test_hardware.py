import json
import subprocess
import sys

import psutil
import pytest

from runner.system import hardware as module
from runner.system.hardware import available_memory, hardware, usable_cores

MIB = 2**20


def test_facts_are_plain_values_that_json_can_hold():
    facts = hardware()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cpu"]
    assert 1 <= facts["cores"] == usable_cores() <= (psutil.cpu_count() or 1)
    assert facts["memory_gib"] >= 0


def test_threads_are_told_once_torch_is_imported():
    import torch

    assert hardware()["torch_threads"] == torch.get_num_threads()


def test_torch_is_not_imported_for_it():
    code = "import sys, runner.system.hardware as h; h.hardware(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 1000 MiB free, and what its files say of a process and its cgroups; a path names a folder."""
    memory = psutil.virtual_memory()._replace(available=1000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(module, "_PROCESS", tmp_path / "proc")

    def write(membership: str, mounts: str, cgroups: dict[str, dict[str, int | str]]) -> None:
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc" / "cgroup").write_text(membership)
        (tmp_path / "proc" / "mountinfo").write_text(mounts.replace("/sys", str(tmp_path / "sys")))
        for folder, files in cgroups.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for name, value in files.items():
                text = str(value if isinstance(value, str) else value * MIB)
                (tmp_path / folder / name).write_text(text + "\n")

    return write


V2_MOUNT = "24 30 0:6 / /dev rw - devtmpfs devtmpfs rw\n31 23 0:28 / /sys rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
V1_MOUNT = "30 23 0:9 / /sys/cpu rw - cgroup cgroup rw,cpu\n31 23 0:28 / /sys/memory rw - cgroup cgroup rw,memory\n"


def v2(limit: int | str, used: int, inactive: int = 0) -> dict[str, int | str]:
    statistics = f"anon 4096\ninactive_anon 77\ninactive_file {inactive * MIB}\nactive_file 99"
    return {"memory.max": limit, "memory.current": used, "memory.stat": statistics}


def v1(limit: int, used: int, inactive: int = 0) -> dict[str, int | str]:
    statistics = f"inactive_file 1\ntotal_inactive_file {inactive * MIB}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": statistics}


@pytest.mark.parametrize(
    ("cgroups", "mib"),
    [
        pytest.param({"sys/job/step": v2(500, 300, 50)}, 250, id="own limit, with cache that the kernel gives back"),
        pytest.param({"sys/job/step": v2("max", 300), "sys/job": v2(400, 300)}, 100, id="a parent's limit"),
        pytest.param({"sys/job/step": v2(200, 50), "sys/job": v2(400, 390)}, 10, id="the tighter of two"),
        pytest.param({"sys/job/step": v2("max", 300), "sys": v2(700, 0)}, 700, id="limit of the topmost in sight"),
        pytest.param({"sys/job/step": v2(5000, 300)}, 1000, id="a limit above what the machine has"),
        pytest.param({"sys/job/step": v2(200, 250)}, 0, id="more used than allowed"),
        pytest.param({"sys/job/step": {"memory.max": 500}}, 1000, id="a limit without the use"),
        pytest.param({"sys/job/step": {"memory.max": 500, "memory.current": 100}}, 400, id="no statistics"),
        pytest.param({"sys/job/step": v2("nonsense", 300)}, 1000, id="nonsense"),
        pytest.param({}, 1000, id="no files"),
    ],
)
def test_a_container_may_have_less_than_the_machine(machine, cgroups, mib):
    machine("0::/job/step\n", V2_MOUNT, cgroups)
    assert available_memory() == mib * MIB


def test_version_1_counts_the_memory_controller(machine):
    no_limit = 2**63 // MIB
    cgroups = {"sys/memory/job": v1(300, 200, 20), "sys/memory": v1(no_limit, 0), "sys/cpu/job": v1(100, 90)}
    machine("4:cpu,cpuacct:/job\n3:memory:/job\n1:name=systemd:/\n0::/\n", V1_MOUNT, cgroups)
    assert available_memory() == 120 * MIB


@pytest.mark.parametrize("path", ["/docker/abc/step", "/host/slice", "/../../step"])
def test_a_container_sees_its_own_cgroup_whatever_the_host_calls_it(machine, path):
    mount = V2_MOUNT.replace(" / /sys", " /docker/abc /sys")
    machine(f"0::{path}\n", mount, {"sys": v2(600, 100), "step": v2(60, 10)})
    assert available_memory() == 500 * MIB


def test_a_mount_point_may_hold_a_space(machine):
    machine("0::/job\n", V2_MOUNT.replace(" /sys ", r" /sys\040group "), {"sys group/job": v2(90, 40)})
    assert available_memory() == 50 * MIB


@pytest.mark.parametrize("mounts", ["", "31 23 0:28\n", " - \n - cgroup2 \n", "a b c / /sys rw - cgroup2\n"])
def test_what_cannot_be_understood_is_no_limit(machine, mounts):
    machine("nonsense\n\n0:\n0::/job\n", mounts, {"sys/job": v2(90, 40)})
    assert available_memory() == 1000 * MIB


def test_a_system_without_cgroups_has_what_is_free(machine):
    assert available_memory() == 1000 * MIB


def test_this_machine_has_memory_left():
    assert 0 < available_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        pytest.param({"sys/job": {"cpu.max": "200000 100000"}}, 2, id="two cores"),
        pytest.param({"sys/job": {"cpu.max": "150000 100000"}}, 2, id="a part of a core needs a thread"),
        pytest.param({"sys/job": {"cpu.max": "20000 100000"}}, 1, id="less than a core"),
        pytest.param({"sys/job": {"cpu.max": "max 100000"}, "sys": {"cpu.max": "300000 100000"}}, 3, id="a parent's"),
        pytest.param({"sys/job": {"cpu.max": "max 100000"}}, 8, id="no limit"),
        pytest.param({"sys/job": {"cpu.max": "nonsense"}}, 8, id="nonsense"),
        pytest.param({"sys/job": {"cpu.max": "6400000 100000"}}, 8, id="more than there are"),
        pytest.param({}, 8, id="no file"),
    ],
)
def test_a_container_may_use_fewer_cores_than_the_machine_has(machine, monkeypatch, limits, cores):
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: range(8), raising=False)
    machine("0::/job\n", V2_MOUNT, limits)
    assert usable_cores() == cores


def test_version_1_limits_cores_in_two_files(machine, monkeypatch):
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: range(8), raising=False)
    limited = {"cpu.cfs_quota_us": "350000", "cpu.cfs_period_us": "100000"}
    unlimited = {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}
    machine("4:cpu,cpuacct:/job\n3:memory:/job\n", V1_MOUNT, {"sys/cpu/job": limited, "sys/cpu": unlimited})
    assert usable_cores() == 4


def test_the_high_water_mark_can_be_reset():
    block = bytearray(64 * 2**20)
    block[:: 2**12] = bytes(len(block[:: 2**12])).replace(b"\0", b"x")
    peak = module.peak_host_memory()
    del block
    try:
        module.reset_peak_host_memory()
    except OSError:
        pytest.skip("this system does not allow it")
    assert module.peak_host_memory() < peak - 32 * 2**20
    assert module.resident_memory() <= module.peak_host_memory() + 2**20
