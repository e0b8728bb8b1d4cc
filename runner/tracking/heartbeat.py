"""The record of an ablation or a group of seeds for ``runner ls``, while a
process works on it and at its end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from runner.system.errors import ExitCode, RunnerError
from runner.system.secrets import redact
from runner.tracking.periodic import Periodic
from runner.tracking.record import Record
from runner.tracking.workspace import RunFolder

_BEAT_SECONDS = 5.0
_log = logging.getLogger(__name__)


@contextmanager
def heartbeat(folder: RunFolder, record: Record, progress: Callable[[], Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Keeps a record up to date with the values that ``progress`` returns, from the start of the ``with`` to its end.

    Yields a dictionary with further values for the final record, at least ``status``; after an
    error it may be empty.
    """

    def write(**changes: Any) -> None:
        values = {"heartbeat": time.time(), **progress(), **changes}
        folder.write(record.model_copy(update=values))

    final_values: dict[str, Any] = {"status": "FAILED"}
    write()
    beat = Periodic("record", _BEAT_SECONDS, write)
    try:
        yield final_values
    except BaseException as error:
        signals = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
        # KeyboardInterrupt and SystemExit are not of type Exception.
        is_stopped = not isinstance(error, Exception) or getattr(error, "exit_code", None) in signals
        reason = str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
        final_values.update(status="STOPPED" if is_stopped else "FAILED", reason=redact(reason))
        raise
    finally:
        beat.stop()
        try:
            write(**final_values)
        except OSError as error:
            # The result is printed, and a full disk must not cost that.
            _log.warning("the record of %s was not written: %s", folder.name, error.strerror or error)
