"""Finds out once, for all children, what comes out the same in each: the fork server imports this last."""

from functools import cache

from mlflow.store.db import utils
from running import tiny
from sqlalchemy.orm import configure_mappers

from runner.recipe import provenance

configure_mappers()
utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
utils._get_latest_schema_revision()
for name in ("marl_phase3", "digits_classifier", "shakespeare_gpt"):
    tiny(name)
provenance.versions([])
provenance._installed.cache_clear = lambda: None
