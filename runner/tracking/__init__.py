"""Tracking: metrics, params, tags and artifacts go to a file first and from there to MLflow."""

from runner.tracking.record import Status
from runner.tracking.workspace import RunFolder, Workspace

__all__ = ["RunFolder", "Status", "Workspace"]
