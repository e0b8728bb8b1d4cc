"""Computes what is the same in every training of a test process once: importing this module switches that on."""

from functools import cache

from mlflow.store.db import utils

from runner.recipe import provenance

utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
# The packages of the environment stay as they are while the tests run.
provenance._installed.cache_clear = lambda: None
