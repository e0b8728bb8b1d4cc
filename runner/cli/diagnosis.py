"""Checks of this machine, each with a hint."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from runner.plugin.registry import SECTIONS, Registry
from runner.system.console import CleanText, Console
from runner.system.contention import SINCE_START
from runner.system.errors import RunnerError, StorageError
from runner.system.hardware import available_memory, cpu_model, slow_bf16, usable_cores
from runner.system.processor import WAIT_VARIABLES, Surroundings, choose, describe, is_fixed_by
from runner.system.text_lines import labelled
from runner.system.workspace_paths import RECORD, VARIABLE
from runner.tracking.access import is_http, on_network_disk
from runner.tracking.lookup import folders
from runner.tracking.recovery import reap
from runner.tracking.spool import unsent
from runner.tracking.store import Store, shown
from runner.tracking.workspace import Workspace

_DISTRIBUTION = "proven-runner"
_GIB = 2**30
# Below these, runs may fail.
_DISK_GIB = 5
_MEMORY_GIB = 2
_SHOWN_RUNS = 4
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Diagnosis:
    """Result of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]  # warn: runs work, but not everything does; fail: runs do not work
    found: str
    remedy: str = ""


def examine(workspace: Workspace, registry: Registry) -> list[Diagnosis]:
    """Looks at packages, devices, compiler, plugins, workspace, tracking store, runs and memory.

    Creates no workspace. Runs whose process died without a word are given their end.
    """
    memory = available_memory() / _GIB
    available = f"{memory:.1f} of {psutil.virtual_memory().total / _GIB:.1f} GiB available"
    remedy = "end other programs, or keep less data in memory"
    return [
        *_packages(),
        *_torch(),
        _compiler(),
        *_plugins(registry),
        *_workspace(workspace),
        *_store(workspace),
        *_runs(workspace),
        _warn_if(memory < _MEMORY_GIB, "memory", available, remedy),
    ]


def show(checks: list[Diagnosis], console: Console) -> None:
    """Prints the checks, each remedy beneath its finding."""
    name_width = max(len(check.name) for check in checks)
    for check in checks:
        head = f"{check.status:4}  {check.name:{name_width}}  "
        texts = [(head, check.found, "")]
        if check.remedy:
            texts.append((" " * len(head), f"-> {check.remedy}", "bold"))
        for label, text, style in texts:
            for first_columns, line in labelled(label, [text], console.width):
                status = (first_columns[:4], _COLOURS[check.status])
                console.print(CleanText.assemble(status, first_columns[4:], (line, style)), soft_wrap=True)


def _packages() -> Iterator[Diagnosis]:
    installed = []
    for requirement in map(Requirement, metadata.requires(_DISTRIBUTION) or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        lack = "not installed"
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(requirement.name)
            if requirement.specifier.contains(version, prereleases=True):
                installed.append(f"{requirement.name} {version}")
                continue
            lack = f"{version} is installed, {requirement.specifier} is needed"
        yield Diagnosis(requirement.name, "fail", lack, f"pip install '{requirement}'")
    yield Diagnosis("packages", "ok", ", ".join(installed))


def _warn_if(is_bad: bool, name: str, finding: str, remedy: str) -> Diagnosis:
    if is_bad:
        return Diagnosis(name, "warn", finding, remedy)
    return Diagnosis(name, "ok", finding)


def _torch() -> Iterator[Diagnosis]:
    try:
        import torch
    except Exception as error:  # a broken build raises anything from ImportError to OSError
        yield Diagnosis("torch", "fail", f"cannot be imported: {error}", "reinstall torch")
        return
    cores = usable_cores()
    yield Diagnosis("processor", "ok", f"{cpu_model()}, {cores} cores usable")
    yield from _processor_use(cores, torch.get_num_threads())
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            memory = f"{device.total_memory / _GIB:.0f} GiB"
            yield Diagnosis(
                f"cuda:{index}",
                "ok",
                f"{device.name}, {memory}, capability {device.major}.{device.minor}",
            )
        if find_spec("pynvml") is None:
            remedy = f"pip install '{_DISTRIBUTION}[nvidia]'"
            yield Diagnosis("GPU metrics", "warn", "not logged, because pynvml is not installed", remedy)
    elif Path("/proc/driver/nvidia/version").exists():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for the CPU only"
        lack = f"an NVIDIA driver is installed, but torch {torch.__version__} ({build}) sees no GPU"
        yield Diagnosis("cuda", "warn", lack, "install a torch build that fits the driver")
    else:
        yield Diagnosis("cuda", "ok", "no NVIDIA GPU; recipes run on the CPU")
    slow = slow_bf16()
    remedy = "leave optimization.amp off on the CPU"
    yield _warn_if(slow is not None, "bf16 on the processor", slow or "in hardware", remedy)


def _processor_use(cores: int, threads: int) -> Iterator[Diagnosis]:
    """Reports how a training would use the processor now, and what other programs use."""
    contention = SINCE_START.read()
    use = choose("auto", "auto", os.environ, Surroundings(cores, threads, contention=contention))
    remedy = f"set OMP_NUM_THREADS={cores}"
    yield _warn_if(use.threads > cores, "threads", f"{use.threads}: {use.threads_reason}", remedy)
    is_shared = contention.is_high(cores)
    load = describe(contention, cores) if is_shared else "no other program uses the cores"
    remedy = "end other programs, or expect runs to get only a part of the cores"
    if use.wait == "active" and is_fixed_by(use.variables):
        name = next(name for name in WAIT_VARIABLES if name in use.variables)
        remedy = f"unset {name}: with it, threads that wait for each other spin"
    yield _warn_if(is_shared, "load", load, remedy)


def _compiler() -> Diagnosis:
    """Checks whether ``torch.compile`` can build kernels for the CPU."""
    command = os.environ.get("CXX") or "g++"
    path = shutil.which(command) or shutil.which("clang++")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if path is None:
        finding = f"no C++ compiler ({command})"
        remedy = "install g++ or name a C++ compiler in CXX"
    elif not header.exists():
        finding = f"{path}, but {header} is missing"
        remedy = "install Python's development headers"
    else:
        return Diagnosis("compiler", "ok", path)
    return Diagnosis("compiler", "warn", finding, f"{remedy}, or leave optimization.compile off")


def _plugins(registry: Registry) -> list[Diagnosis]:
    failures = []
    remedy = "reinstall or remove its distribution"
    for section in SECTIONS:
        for kind in registry.kinds(section):
            try:
                registry.get(section, kind)
            except RunnerError as error:
                finding = f"cannot be imported: {error}"
                failures.append(Diagnosis(f"plugin {section}.{kind}", "warn", finding, remedy))
    return failures or [Diagnosis("plugins", "ok", "all can be imported")]


def _workspace(workspace: Workspace) -> Iterator[Diagnosis]:
    root = workspace.root
    nearest = next(folder for folder in [root, *root.parents] if folder.exists())
    try:
        # Permissions are not enough: root has all of them.
        tempfile.TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        lack = f"{nearest} cannot be written: {error.strerror}"
        yield Diagnosis("workspace", "fail", lack, f"name a writable folder in {VARIABLE}")
        return
    yield Diagnosis("workspace", "ok", str(root) if nearest == root else f"{root}, created by the first run")
    free = psutil.disk_usage(str(nearest)).free / _GIB
    yield _warn_if(
        free < _DISK_GIB,
        "disk",
        f"{free:.1f} GiB free",
        f"free some, or name another disk in {VARIABLE}",
    )


def _store(workspace: Workspace) -> Iterator[Diagnosis]:
    if "MLFLOW_TRACKING_URI" not in os.environ and not workspace.database.exists():
        yield Diagnosis("tracking", "ok", f"{workspace.database}, created by the first run")
        return
    try:
        Store(workspace)
    except StorageError as error:
        finding, _, remedy = str(error).rpartition("; ")
        yield Diagnosis("tracking", "fail", finding, remedy)
        return
    yield Diagnosis("tracking", "ok", f"{shown(workspace.tracking_uri)} answers")
    if not is_http(workspace.tracking_uri) and on_network_disk(workspace.database):
        remedy = "run an MLflow server and name it in MLFLOW_TRACKING_URI if several machines share the workspace"
        yield Diagnosis("database", "warn", "on a network disk, where SQLite is slow and locks are weak", remedy)


def _runs(workspace: Workspace) -> Iterator[Diagnosis]:
    reaped = reap(workspace)
    run_folders = folders(workspace.runs)
    readable = [folder for folder in run_folders if folder.record() is not None]
    finding = f"{len(run_folders)} in {workspace.runs}" if run_folders else "none yet"
    if reaped:
        finding += f"; {len(reaped)} had crashed: {_names(reaped)}"
    yield Diagnosis("runs", "ok", finding)

    idle = [folder for folder in readable if not folder.alive()]
    for folder in folders(workspace.seeds):
        # The process of a group holds no lock.
        record = folder.record()
        if record is not None and not record.at_work:
            idle.append(folder)
    unsent_runs = [folder.name for folder in idle if unsent(folder.spool)]
    if unsent_runs:
        finding = f"metrics are missing in MLflow for {len(unsent_runs)} runs: {_names(unsent_runs)}"
        yield Diagnosis("unsent", "warn", finding, "runner sync")
    damaged = [folder.name for folder in run_folders if folder not in readable]
    if damaged:
        finding = f"{RECORD} of {len(damaged)} runs cannot be read: {_names(damaged)}"
        remedy = f"restore it from a copy, or remove the run's folder in {workspace.runs}"
        yield Diagnosis("damaged runs", "warn", finding, remedy)


def _names(runs: Sequence[str]) -> str:
    return ", ".join(runs[:_SHOWN_RUNS]) + (", ..." if len(runs) > _SHOWN_RUNS else "")
