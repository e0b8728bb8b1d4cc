"""The mode in which threads wait for each other, which is the same in all processes of an
ablation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from statistics import median

import torch

from runner.recipe.recipe import SystemConfig
from runner.system.contention import SINCE_START, Contention
from runner.system.hardware import usable_cores
from runner.system.processor import (
    SAMPLE_SECONDS,
    Surroundings,
    WaitMode,
    WaitSwitch,
    choose,
    is_fixed_by,
)


class SharedWait:
    """Switches all processes of a round together, so that load favours no variant.

    Args:
        system: The recipe's section.
        command: Called with ``sleep`` or ``spin``, which every process has to do.
    """

    def __init__(self, system: SystemConfig, command: Callable[[str], None]) -> None:
        cores = usable_cores()
        surroundings = Surroundings(
            cores, torch.get_num_threads(), contention=SINCE_START.read()
        )
        self._command = command
        self._use = choose(system.threads, system.wait, os.environ, surroundings)
        self._sleeps = self._use.wait == "passive"
        is_auto = system.wait == "auto" and not is_fixed_by(self._use.variables)
        self._switch = WaitSwitch(self, self._use, is_auto, cores)

    @property
    def sleeps(self) -> bool:
        """Returns whether waiting threads sleep."""
        return self._sleeps

    @property
    def mode(self) -> WaitMode:
        """Returns the present mode."""
        return "passive" if self.sleeps else "active"

    def observe(self, contentions: Sequence[Contention]) -> None:
        """Takes the contention that each process measured in a round, before the next round."""
        # A single thread does not wait for others.
        if contentions and self._use.threads > 1:
            waited = median(contention.waited for contention in contentions)
            other_cores = median(contention.other_cores for contention in contentions)
            self._switch.observe(Contention(waited, other_cores), SAMPLE_SECONDS)

    def sleep(self) -> bool:
        """Makes waiting threads sleep in all processes."""
        if not self._sleeps:
            self._sleeps = True
            self._command("sleep")
        return True

    def spin(self) -> None:
        """Makes waiting threads spin in all processes."""
        self._sleeps = False
        self._command("spin")
