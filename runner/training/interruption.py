"""Reports of trainings that a signal, or want of memory, has interrupted."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import OutOfMemoryError

from runner.plugin.plugin_errors import place_of
from runner.training.checkpoint import checkpoints
from runner.training.memory_shortage import explain_shortage
from runner.training.signals import Stop, StopNow

if TYPE_CHECKING:
    from runner.training.loop import Loop

_log = logging.getLogger(__name__)


@contextmanager
def interruptible(loop: Loop, stop: Stop) -> Iterator[None]:
    """Reports where a signal interrupted code that does not return, and what an update without memory needed.

    Raises:
        MemoryShortageError: An accelerator has less memory than an update needs.
    """
    try:
        yield
    except OutOfMemoryError as error:
        raise explain_shortage(error, loop.pipeline, loop.step, loop.folder) from error
    except StopNow as error:
        place = place_of(list(traceback.walk_tb(error.__traceback__)))
        name = "" if stop.received is None else stop.received.name
        state = (
            "the newest checkpoint is resumed by"
            if checkpoints(loop.writer.folder)
            else "there is no checkpoint yet, it starts again by"
        )
        _log.warning("%s interrupted %s; %s: %s", name, place, state, loop.again)
