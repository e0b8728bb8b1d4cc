"""What a line of a spool may say, which somebody may have changed, or a failing disk."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from runner.tracking.folder import Status
from runner.tracking.spool import read

_log = logging.getLogger(__name__)
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class Line(BaseModel, frozen=True):
    """One line of a spool."""

    t: _Count
    """When it was logged, in milliseconds since 1970."""
    step: _Count = 0
    metrics: dict[str, float] = {}
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    artifact: str | None = None
    """A path inside the run's folder."""
    folder: str = ""
    """Where to put it among the run's artifacts."""
    status: Literal["RUNNING"] | Status | None = None


_NOTHING = Line(t=0)


def lines(spool: Path, offset: int = 0) -> Iterator[tuple[Line, int]]:
    """Yields every whole line from a byte offset on, each with the offset after it.

    One that is damaged says nothing, with a warning, so that it does not hold up what follows it.
    """
    for record, end in read(spool, offset) if spool.exists() else ():
        try:
            yield Line.model_validate(record) if record else _NOTHING, end
        except ValidationError as error:
            _log.warning("%s: skipped the line that ends at byte %d: %s", spool, end, error.errors()[0]["msg"])
            yield _NOTHING, end
