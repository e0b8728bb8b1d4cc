"""Exceptions of Ray."""


class RayError(Exception):
    """Any of them."""


class TaskCancelledError(RayError):
    """A task was cancelled."""
