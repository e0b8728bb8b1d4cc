"""Reports of trainings that a signal or a shortage of memory has interrupted."""

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
    """Reports the code that a signal interrupted, or the memory that an update needed.

    Raises:
        MemoryShortageError: An accelerator has less memory than an update needs.
    """
    try:
        yield
    except OutOfMemoryError as error:
        raise explain_shortage(error, loop.pipeline, loop.step, loop.folder) from error
    except StopNow as error:
        location = place_of(list(traceback.walk_tb(error.__traceback__)))
        signal = "" if stop.received is None else stop.received.name
        state = "there is no checkpoint yet, it starts again by"
        if checkpoints(loop.writer.folder):
            state = "the newest checkpoint is resumed by"
        # The run can be resumed, so this is a warning and not an error.
        command = loop.resume_command
        _log.warning("%s interrupted %s; %s: %s", signal, location, state, command)
