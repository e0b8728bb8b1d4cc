"""Global state of the process: the random generators of Python, NumPy and torch, and
settings of torch.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.system import torch_settings
from runner.system.errors import UsageError

if TYPE_CHECKING:
    from runner.plugin.source import State


_owner: tuple[int, int] | None = None
"""Process and thread of the training or evaluation that uses the generators; a forked
process has other generators.
"""
_OWNING = threading.Lock()


@contextmanager
def exclusive(what: str, nested: bool = False) -> Iterator[None]:
    """Reserves the generators and settings of the process for a training, an evaluation or the loading of a model.

    They are the caller's again after the ``with``. Inside, no context of the caller has an effect:
    gradients are recorded, nothing is cast, and tensors are created on the CPU.

    Args:
        what: The user of the generators, for the message.
        nested: Whether it may be a part of another use by this thread, such as a model
            that a learner loads.

    Raises:
        UsageError: Something else uses them. Both would use one sequence, so that neither would get
            the numbers of its seed.
    """
    global _owner
    thread = os.getpid(), threading.get_ident()
    with _OWNING:
        outer = _owner if _owner is not None and _owner[0] == os.getpid() else None
        if outer is not None and not (nested and outer == thread):
            reason = "they would share its random generators; use a process for each"
            raise UsageError(f"{what} cannot start while a training runs in this process: {reason}")
        _owner = thread
    try:
        with ExitStack() as stack:
            if outer is None:
                stack.enter_context(_callers_state_restored())
            stack.enter_context(torch_settings.default_contexts())
            yield
    finally:
        _owner = outer


@contextmanager
def _callers_state_restored() -> Iterator[None]:
    """Restores generators and settings after the ``with``."""
    # Asking for the generators of GPUs would initialize CUDA, after which the process cannot fork.
    states = state_dict(with_cuda=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    settings = torch_settings.read(with_compiler=False)
    try:
        yield
    finally:
        torch_settings.write(settings)
        load_state_dict(states)


def seed(value: int) -> None:
    """Seeds them all, with 0 to 2^32 - 1; plugins that draw from them are repeatable too."""
    random.seed(value)
    np.random.seed(value)
    seed_torch(value)


def seed_torch(value: int) -> None:
    """Seeds torch's generators of all devices."""
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:
        # For each kind of device that is missing, torch.manual_seed formats the call stack.
        torch.default_generator.manual_seed(value)


def state_dict(with_cuda: bool = True) -> State:
    """Returns the states of the generators.

    Args:
        with_cuda: Whether those of GPUs are among them.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            gauss,
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if with_cuda and torch.cuda.is_available() else [],
    }


def load_state_dict(state: State) -> None:
    """Restores what ``state_dict`` returned; generators of GPUs that are not there any more are passed over."""
    random.setstate(state["python"])
    kind, keys, *counters = state["numpy"]
    numpy_state: Any = (kind, keys.numpy().astype(np.uint32), *counters)
    np.random.set_state(numpy_state)
    torch.set_rng_state(state["torch"])
    for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, device)


@contextmanager
def restored() -> Iterator[None]:
    """Restores the generators after the ``with``."""
    states = state_dict()
    try:
        yield
    finally:
        load_state_dict(states)


class Globals:
    """The random generators and torch's settings, as they are when it is made."""

    def __init__(self) -> None:
        self.random = state_dict()
        self.settings = torch_settings.read()
        self._is_inside = False

    def set(self, current: Globals | None = None) -> None:
        """Restores them.

        Args:
            current: The generators and settings at this moment, if the caller has read them. Equal
                settings are not written, because reading them again takes longer than an update.
        """
        if current is None or current.settings != self.settings:
            torch_settings.write(self.settings)
        load_state_dict(self.random)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Makes them so inside the ``with``, and remembers what they become there; outside they stay as they were.

        Inside another ``with`` of the same object, nothing is exchanged.
        """
        if self._is_inside:
            yield
            return
        outer_globals = Globals()
        self.set(outer_globals)
        self._is_inside = True
        try:
            yield
        finally:
            inner_globals = Globals()
            self.random = inner_globals.random
            self.settings = inner_globals.settings
            self._is_inside = False
            outer_globals.set(inner_globals)
