"""Tracking: metrics, params, tags and artifacts go to a file first and from there to MLflow."""

from runner.tracking.folder import RunFolder, Status
from runner.tracking.tracker import Target, Tracker
from runner.tracking.workspace import Workspace, workspace

__all__ = ["RunFolder", "Status", "Target", "Tracker", "Workspace", "workspace"]
