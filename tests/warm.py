"""Does once, for all children, what each of them would do: the fork server imports this last."""

import gc
import logging
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import remembered  # noqa: F401
from fork_server import GARBAGE
from mlflow.store.db import utils
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from running import tiny, train_here
from sqlalchemy.orm import configure_mappers

from runner.plugin.optimizer import kinds, settings_of
from runner.plugins.graphs.citation import _nearest_digits
from runner.plugins.vision.digits import read_digits
from runner.recipe import provenance
from runner.verify import global_patches

gc.set_threshold(*GARBAGE)
configure_mappers()
utils._get_latest_schema_revision()
for name in ("marl_phase3", "digits_classifier", "shakespeare_gpt"):
    tiny(name)
for kind in kinds():
    settings_of(kind)
provenance.versions([])
provenance.code_digests([])
provenance.source(Path(__file__))
_nearest_digits()
read_digits()
# What every verification reads of the sources of the modules that it compares.
for _ in global_patches._changed_constants():
    pass

logging.getLogger("mlflow").setLevel(logging.CRITICAL)
# The first training of a process imports modules, and prepares queries of the database.
with TemporaryDirectory() as folder:
    places = {"RUNNER_WORKSPACE": folder, "XDG_STATE_HOME": folder}
    # If it fails, the tests report it, for which they need this process.
    with patch.dict(os.environ, places), suppress(Exception):
        train_here("marl_baseline")
# No child gets a connection to a database that is removed.
for engine in SqlAlchemyStore._engine_map.values():
    engine.dispose()
SqlAlchemyStore._engine_map.clear()
