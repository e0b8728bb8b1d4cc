"""The random generators that belong to nobody: those of Python, NumPy and torch, on every device."""

import random
from typing import Any

import numpy as np
import torch

from runner.plugin.source import State


def seed(value: int) -> None:
    """Seeds them all; plugins that draw from them are repeatable too.

    Args:
        value: 0 to 2^32 - 1.
    """
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)  # also on every GPU


def state_dict() -> State:
    """Where they are."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_state_dict(state: State) -> None:
    """Restores what ``state_dict`` returned; generators of GPUs that are not there any more are passed over."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy_state: Any = (kind, keys.numpy().astype(np.uint32), *rest)
    np.random.set_state(numpy_state)
    torch.set_rng_state(state["torch"])
    for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, device)
