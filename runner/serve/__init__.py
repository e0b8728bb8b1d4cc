"""Serves a run's model over HTTP: requests in micro-batches, and none that waits for ever."""
