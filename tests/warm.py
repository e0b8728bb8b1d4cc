"""Finds out once, for all children, what comes out the same in each: the fork server imports this last."""

import gc
from pathlib import Path

import remembered  # noqa: F401
from fork_server import GARBAGE
from mlflow.store.db import utils
from running import tiny
from sqlalchemy.orm import configure_mappers

from runner.plugins.graphs.citation import _nearest_digits
from runner.plugins.vision.digits import read_digits
from runner.recipe import provenance

gc.set_threshold(*GARBAGE)
configure_mappers()
utils._get_latest_schema_revision()
for name in ("marl_phase3", "digits_classifier", "shakespeare_gpt"):
    tiny(name)
provenance.versions([])
provenance.code_digests([])
provenance.source(Path(__file__))
_nearest_digits()
read_digits()
