"""Tracking: metrics, params, tags and artifacts go to a file first and from there to MLflow."""

from runner.tracking.tracker import Status, Tracker
from runner.tracking.workspace import Workspace, workspace

__all__ = ["Status", "Tracker", "Workspace", "workspace"]
