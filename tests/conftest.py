import gc
import ipaddress
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fork_server
import pytest
import sampling
from filelock import FileLock
from hypothesis import settings

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 2 * 2**30
"""Free space above which the files of tests lie in memory."""

# Until all tests are collected: looking for garbage takes a fifth of that time, and there is none.
gc.disable()

# Read by torch when it is first imported, here and in child processes: tests share the processor with each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# A training waits for dozens of writes to the disk, which takes as long as its computations. A process that is killed
# loses nothing that it has written to memory either; what a machine loses is no matter of these tests.
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

if "RUNNER_DATA" in os.environ:  # for the tests that ask for it; also in processes that begin later
    os.environ["PUBLISHED_DATA"] = os.environ["RUNNER_DATA"]
OF_THE_USER = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES")
for name in [name for name in os.environ if name.startswith(("MLFLOW_", "RUNNER_")) or name in OF_THE_USER]:
    del os.environ[name]  # tests take nothing from the user's environment; also for fixtures that outlive a test

settings.register_profile("suite", deadline=None, max_examples=15, database=None)
settings.load_profile("suite")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fork_server"] = fork_server.begin()
    node.workerinput["selects"] = selects(node.config)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        fork_server.join(config.workerinput["fork_server"])
    # MLflow's own calls into newer libraries; every other warning is an error.
    config.addinivalue_line("filterwarnings", "ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for garbage again when all tests are collected."""
    result = yield
    gc.freeze()
    gc.set_threshold(*fork_server.GARBAGE)
    gc.enable()
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Spares pytest's last search for garbage, which it repeats ten times, what the last tests have imported."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="run all tests")
    parser.addoption("--sample", metavar="TEXT", help="select the cases with TEXT instead of the commit")


def selects(config: pytest.Config) -> bool:
    """Returns whether a part of the tests is run: unless all are asked for, or some by path or name."""
    is_named = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
    return not (config.option.complete or is_named)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects cases, and begins with long tests: while one of them waits, the others compute."""
    if config.workerinput["selects"] if hasattr(config, "workerinput") else selects(config):
        seed = config.option.sample or sampling.commit()
        omitted = sampling.omitted(items, seed, sampling.slow_tests(), sampling.changed_files())
        config.hook.pytest_deselected(items=omitted)
        items[:] = [item for item in items if item not in omitted]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True, scope="module")
def imported_for_good() -> None:
    """What the tests before have imported is no garbage: looking through it takes half a second each time."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def remembered_work() -> None:
    """What is the same in every training is computed once."""
    import remembered  # noqa: F401


@pytest.fixture(autouse=True, scope="session")
def isolated_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests have a state folder of their own, also in child processes: the user's key stays as it is."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def isolated_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a workspace of its own, also in its child processes."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    root = tmp_path / ".runner"
    monkeypatch.setenv("RUNNER_WORKSPACE", str(root))
    return root


@pytest.fixture(autouse=True)
def unchanged_settings() -> Iterator[None]:
    """A test that leaves one of torch's settings changed fails, and not the tests after it."""
    import torch_settings

    before = torch_settings.read()
    yield
    changed = torch_settings.restore(before)
    assert not changed, f"the test left torch's settings changed: {changed}"


@pytest.fixture
def published() -> Callable[[str], Path]:
    """Finds a published file in ``RUNNER_DATA`` as it was when the tests began; without it, the test is skipped."""

    def path_of(name: str) -> Path:
        path = Path(os.environ.get("PUBLISHED_DATA", ""), name)
        if not path.is_file():
            pytest.skip(f"no {name} in RUNNER_DATA")
        return path

    return path_of


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches beyond this machine fails."""
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: tuple[str, int]) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not is_local(address[0]):
            raise AssertionError(f"a test tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)


def is_local(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


@pytest.fixture
def float64() -> Iterator[None]:
    """Numbers have that type unless told."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``torch.compile`` traces is run by eager kernels: compiling C++ takes most of a minute, and others do.

    Also in the children of ``children.start``.
    """
    import torch

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setenv("TRACED_ONLY", "yes")


@pytest.fixture
def copied_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that this process starts have imported everything already, as those of ``children.start``."""
    import children

    monkeypatch.setattr("runner.child.spawn._executed", children.executed)
    monkeypatch.setattr("runner.child.spawn._forked", lambda *given: children.executed(*given[:3], None))


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database as its migrations leave it: made once, whatever the number of test processes."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    database = shared / "migrated.db"
    with FileLock(shared / "migrated.lock"):
        if not database.exists():
            from runner.tracking.store import Store
            from runner.tracking.workspace import Workspace

            fresh = Workspace(shared / "migrated")
            Store(fresh)
            with sqlite3.connect(fresh.database) as source, sqlite3.connect(shared / "partial.db") as copy:
                source.backup(copy)
            source.close()
            copy.close()
            (shared / "partial.db").rename(database)
    return database


@pytest.fixture
def migrated_workspace(isolated_workspace: Path, migrated_database: Path) -> Path:
    """The test's workspace with a database that needs no migration."""
    isolated_workspace.mkdir()
    shutil.copy(migrated_database, isolated_workspace / "mlflow.db")
    return isolated_workspace
