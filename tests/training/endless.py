"""Code of plugins that does not return: ``--plugin`` takes this file beside ``toys.py``."""

import contextlib
import ctypes
import time
from pathlib import Path

from toys import Toy, ToyConfig, WordsConfig  # noqa: F401 (the data)

from runner.training import signals, stall_report

# Tests wait for these times.
signals.GRACE_SECONDS = 0.5
signals.UNWINDING_SECONDS = 0.75
stall_report._LOOK_SECONDS = 0.05


class EndlessConfig(ToyConfig):
    """The toy, that stays somewhere for ever."""

    kind = "toy_endless"
    implementation = "Endless"
    where: str = "loss"
    how: str = "loop"
    begun: str = ""
    """A file that is written when it does not return any more."""


class Endless(Toy):
    def loss(self, batch, noise, progress):
        where, how, begun = self.config.where, self.config.how, self.config.begun
        if where == ("loss" if self.module.training else "evaluation") and progress.updates >= 8:
            stay(how, begun)
        return super().loss(batch, noise, progress)


def stay(how, begun):
    Path(begun).touch()
    while True:
        if how == "c":
            ctypes.CDLL(None).pause()  # without the interpreter's lock, and begun again by every signal
            ctypes.CDLL(None).sleep(1000)
            ctypes.CDLL(None).usleep(10**9)
        elif how == "deaf":
            with contextlib.suppress(BaseException):
                time.sleep(1000)
        else:
            time.sleep(0.01)
