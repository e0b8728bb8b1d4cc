"""Addresses of MLflow's pages."""

import json
from collections.abc import Sequence
from urllib.parse import urlencode

HOST = "127.0.0.1"
PORT = 5000
_TRAINING = {"workflowType": "machine_learning"}  # MLflow's page for training rather than for language models


def experiments_page(server: str) -> str:
    """The list of experiments."""
    return f"{server.rstrip('/')}/#/experiments?{urlencode(_TRAINING)}"


def compare_page(server: str, experiment_ids: Sequence[str], run_ids: Sequence[str]) -> str:
    """The page that shows several runs side by side."""
    query = {"runs": json.dumps(list(run_ids)), "experiments": json.dumps(sorted(set(experiment_ids))), **_TRAINING}
    return f"{server.rstrip('/')}/#/compare-runs?{urlencode(query)}"
