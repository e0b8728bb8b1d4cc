"""Carries what a run has logged from its spool to a sink."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from runner.plugin.sink import Sink
from runner.tracking.spool import lines


class SinkFeed:
    """Reads a spool from the beginning, and gives every line to a sink.

    Args:
        sink_class: The sink, which is made when there is something to give.
        spool: The spool of a run, in the run's folder.
        run_name: Name of the run.
    """

    def __init__(self, sink_class: type[Sink], spool: Path, run_name: str) -> None:
        self._class = sink_class
        self._spool = spool
        self._run_name = run_name
        self._sink: Sink | None = None
        self._offset = 0

    def update(self) -> None:
        """Gives what is new in the spool; raises whatever the sink raises."""
        try:
            sink = self._sink
            # It is made here, in the thread of the feed, because its import may take seconds.
            if sink is None:
                self._offset = 0
                sink = self._sink = self._class(self._spool.parent, self._run_name)
            for line, offset in lines(self._spool, self._offset):
                if line.params:
                    sink.add_params(line.params)
                if line.metrics:
                    sink.add_metrics(line.metrics, line.step, line.t / 1000)
                self._offset = offset
            sink.flush()
        except Exception:
            # It may have taken a part of the lines, so it begins anew.
            failed = self._sink
            self._sink = None
            if failed is not None:
                # Its file is not left open; the first error is the relevant one.
                with suppress(Exception):
                    failed.close()
            raise

    def close(self) -> None:
        """Gives the rest of the spool, and closes the sink."""
        self.update()
        if self._sink is not None:
            self._sink.close()
