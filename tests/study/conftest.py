import shutil
from pathlib import Path

import pytest

from runner.study.leases import Leases
from runner.study.store import VARIABLE, StudyStore
from runner.tracking import Workspace


@pytest.fixture(autouse=True)
def no_shared_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies of a test are in its own workspace, whatever this machine's environment says."""
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="session")
def storage_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Optuna's database as it is made, once for all tests of a process."""
    made = Workspace(tmp_path_factory.mktemp("storage"))
    store = StudyStore.open(made)
    Leases(store.engine, "none")
    store.engine.dispose()
    return made.root / "optuna.db"


@pytest.fixture
def storage_url(isolated_workspace: Path, storage_file: Path) -> str:
    """The storage of the test's workspace, with all tables and nothing in them."""
    isolated_workspace.mkdir(exist_ok=True)
    shutil.copy(storage_file, isolated_workspace / "optuna.db")
    return f"sqlite:///{isolated_workspace / 'optuna.db'}"


@pytest.fixture
def store(storage_url: str):
    """The storage, opened."""
    opened = StudyStore.open(Workspace())
    yield opened
    opened.remove_session()
    opened.engine.dispose()
