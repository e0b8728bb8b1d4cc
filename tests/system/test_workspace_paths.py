import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, make_url, text

from runner.system.errors import StorageError
from runner.system.workspace_paths import sqlite_path, sqlite_uri
from runner.tracking import Workspace
from runner.tracking.store import Store

ODD_NAMES = ["a b", "a%20b", "a%3Fb", "a?b=1", "a#b", "a&b;c", "über", "a'b\"c", "a+b", "50%"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_sqlite_opens_the_file_of_that_path_and_makes_no_other(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    engine = create_engine(sqlite_uri(folder / "x.db"))
    with engine.connect() as connection:
        connection.execute(text("create table t (x int)"))
    engine.dispose()
    assert (folder / "x.db").exists()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1))
def test_a_path_survives_the_way_to_a_uri_and_back(name):
    path = Path("/somewhere") / name
    assert sqlite_path(sqlite_uri(path)) == path
    assert make_url(sqlite_uri(path)).database == str(path)


def test_an_ordinary_path_is_written_as_it_is():
    assert sqlite_uri(Path("/home/me/my runs/x.db")) == "sqlite:////home/me/my runs/x.db"


def test_other_databases_have_no_file():
    assert sqlite_path("postgresql://host/name") is None
    assert sqlite_path("http://127.0.0.1:5000") is None


def test_workspaces_of_similar_names_have_databases_of_their_own(tmp_path, monkeypatch, migrated_workspace):
    ids = {}
    for name in ("a b", "a%20b"):
        root = tmp_path / name
        root.mkdir()
        (root / "mlflow.db").write_bytes((migrated_workspace / "mlflow.db").read_bytes())
        monkeypatch.setenv("RUNNER_WORKSPACE", str(root))
        store = Store(Workspace())
        ids[name] = store.create_run(store.experiment(name), name)
        assert store.run_named(store.experiment(name), name) == ids[name]
    assert len(set(ids.values())) == 2
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("a")} == set(ids)


def test_a_workspace_that_sqlite_cannot_name_is_a_storage_error(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_WORKSPACE", os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    with pytest.raises(StorageError, match=r"SQLite cannot open a path that is not UTF-8.*RUNNER_WORKSPACE"):
        Store(Workspace())
