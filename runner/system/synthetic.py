"""Words that mark everything that was trained on synthetic data."""

DATA_TAG = "data"
"""Tag of MLflow that marks such runs."""
SYNTHETIC = "synthetic"
SYNTHETIC_REMARK = f"{SYNTHETIC}: results cannot be compared with those on real data"
