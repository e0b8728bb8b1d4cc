"""What a run logged after the checkpoint that it resumes from."""

import logging
from pathlib import Path

from runner.tracking.lines import lines

_MEASURED = ("perf/", "system/")
"""Metrics that are not the same when something is done twice."""
_log = logging.getLogger(__name__)


class History:
    """The metrics that a dead process logged and that a resumed training comes past again.

    Each is logged once, so the first value stays. Where the second differs, the run did not continue bit for bit,
    which is said once.
    """

    def __init__(self, start: int = 0, values: dict[tuple[str, int], float] | None = None) -> None:
        self._start = start
        self._values = values or {}
        self._warned = False

    @classmethod
    def read(cls, spool: Path, start: int, step: int) -> "History":
        """Reads what follows in a spool from a byte on, for metrics from a step on."""
        values = {
            (name, line.step): value
            for line, _ in lines(spool, start)
            if line.step >= step
            for name, value in line.metrics.items()
            if not name.startswith("system/")
        }
        return cls(start, values)

    def __bool__(self) -> bool:
        return bool(self._values)

    def has(self, name: str, step: int, value: float) -> bool:
        """Whether the metric of that step has been logged; asked once for each."""
        before = self._values.pop((name, step), None)
        if before is None:
            return False
        if not name.startswith(_MEASURED) and repr(before) != repr(value) and not self._warned:
            self._warned = True
            _log.warning(
                "not resumed bit for bit: %s at step %d was %s and is now %s (a GPU, another machine or another number "
                "of threads rounds differently)", name, step, before, value,
            )  # fmt: skip
        return True

    def cursor(self, step: int, end: int) -> int:
        """Where a run that resumes at ``step`` has to begin to read.

        Args:
            step: that of the checkpoint.
            end: the size of the spool.
        """
        self._values = {key: value for key, value in self._values.items() if key[1] >= step}
        return self._start if self._values else end
