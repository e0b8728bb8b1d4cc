"""Tracking: metrics, params, tags and artifacts go to a file first and from there to MLflow."""

from runner.tracking.workspace import RunFolder, Status, Workspace

__all__ = ["RunFolder", "Status", "Workspace"]
