"""Metrics of the server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Of batches, up to and including."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Of requests."""


class ServerMetrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "runner_requests",
            "Requests to /predict, by their answers.",
            ["status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "runner_request_seconds",
            "From a request to its answer.",
            registry=self._registry,
            buckets=SECONDS,
        )
        self.batch = Histogram(
            "runner_batch_size",
            "Requests that were answered together.",
            registry=self._registry,
            buckets=SIZES,
        )
        self._waiting = Gauge("runner_waiting_requests", "Requests that wait for their turn.", registry=self._registry)

    def watch(self, waiting: Callable[[], int]) -> None:
        """Registers a function that returns the number of waiting requests."""
        self._waiting.set_function(waiting)

    def watch_programs(self, calls: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Registers a function that returns numbers of calls by stage and by what answered them."""

        class ProgramCalls(Collector):
            def collect(self) -> Iterator[CounterMetricFamily]:
                description = "Calls of the network, by stage and by what answered them."
                family = CounterMetricFamily("runner_network_calls", description, labels=["stage", "answered_by"])
                for labels, count in calls().items():
                    family.add_metric(labels, count)
                yield family

        self._registry.register(ProgramCalls())

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Counts an answer."""
        # Only requests to the model: health checks would hide them.
        if path == "/predict":
            self._requests.labels(str(status)).inc()
            self._seconds.observe(seconds)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
