"""Computes what is the same in every training of a test process once: importing this module switches that on."""

import os
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.store.db import utils
from sqlalchemy import create_engine

import runner
from runner.recipe import provenance

_PACKAGE = Path(runner.__file__).parent
_checkout = provenance._checkout
_migrate = utils._initialize_tables


@cache
def _package_checkout(results, environment):
    return _checkout(_PACKAGE, results, _PACKAGE)


def _remembered_checkout(folder, results, tracked=None):
    """Asks git about the runner's own checkout once; tests with repositories of their own ask it each time."""
    if tracked != _PACKAGE:
        return _checkout(folder, results, tracked)
    environment = [pair for pair in os.environ.items() if pair[0].startswith("GIT_") or pair[0] == "PATH"]
    return _package_checkout(results, frozenset(environment))


@cache
def _migrated_database():
    with TemporaryDirectory() as folder:
        path = Path(folder, "mlflow.db")
        engine = create_engine(f"sqlite:///{path}")
        _migrate(engine)
        engine.dispose()
        return path.read_bytes()


def _initialize_tables(engine):
    """Copies a database that has been migrated: the migrations take most of the time of a short training."""
    if engine.dialect.name != "sqlite" or not utils._is_empty_database(engine):
        _migrate(engine)
        return
    with closing(sqlite3.connect(":memory:")) as source, closing(engine.raw_connection()) as connection:
        source.deserialize(_migrated_database())
        source.backup(connection.driver_connection)


utils._initialize_tables = _initialize_tables
utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
# The packages of the environment, and the runner's own code, stay as they are while the tests run.
provenance._installed.cache_clear = lambda: None
provenance._checkout = _remembered_checkout
