"""Time of the command."""

import os
import time


def process_start() -> float:
    """Returns when this process started, on the clock of ``time.perf_counter``."""
    # Here, because commands that print help need not wait for it.
    import psutil

    age = time.time() - psutil.Process(os.getpid()).create_time()
    # A clock that was set meanwhile must not make a command older than the machine.
    return time.perf_counter() - max(0.0, age)
