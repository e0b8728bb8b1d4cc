"""Computes what is the same in every training of a test process once: importing this module switches that on."""

import os
from functools import cache
from pathlib import Path

from mlflow.store.db import utils

import runner
from runner.recipe import provenance

_PACKAGE = Path(runner.__file__).parent
_checkout = provenance._checkout


@cache
def _package_checkout(results, environment):
    return _checkout(_PACKAGE, results, _PACKAGE)


def _remembered_checkout(folder, results, tracked=None):
    """Asks git about the runner's own checkout once; tests with repositories of their own ask it each time."""
    if tracked != _PACKAGE:
        return _checkout(folder, results, tracked)
    environment = [pair for pair in os.environ.items() if pair[0].startswith("GIT_") or pair[0] == "PATH"]
    return _package_checkout(results, frozenset(environment))


utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
# The packages of the environment, and the runner's own code, stay as they are while the tests run.
provenance._installed.cache_clear = lambda: None
provenance._checkout = _remembered_checkout
