"""Words that mark everything that was trained on synthetic data, or as a smoke test."""

DATA_TAG = "data"
"""Tag of MLflow that marks such runs."""
SYNTHETIC = "synthetic"
SYNTHETIC_REMARK = f"{SYNTHETIC}: results cannot be compared with those on real data"
SMOKE_TAG = "smoke"
"""Tag of MLflow that marks smoke tests."""
SMOKE_REMARK = "a few updates on a part of the data: the results have no meaning"
