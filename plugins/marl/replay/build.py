"""Creates the replay buffer of a recipe."""

from collections.abc import Mapping

import torch

from runner.api import Context

from .buffer import Replay
from .config import ReplayConfig
from .prioritized import PrioritizedReplay
from .uniform import UniformReplay


def storage_device(config: ReplayConfig, device: torch.device) -> torch.device:
    """Returns the device of the transitions for a learner on ``device``."""
    return torch.device("cpu") if config.device == "cpu" else device


def make_replay(
    config: ReplayConfig,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
    generator: torch.Generator,
    context: Context | None = None,
) -> Replay:
    """Creates the replay buffer of a recipe.

    Args:
        config: the recipe's ``data.replay``.
        shapes: shape of every field of one transition.
        device: the learner's device.
        generator: what batches are drawn from; on ``storage_device(config, device)``.
        context: has the processes that divide the buffer, if there are several.

    Raises:
        UsageError: the buffer will not fit in the memory that is free now.
    """
    storage = storage_device(config, device)
    processes = None if context is None else context.processes
    # Rounded up, so that a buffer is never smaller than the part of the largest batch.
    capacity = config.capacity
    if processes is not None:
        capacity = -(-capacity // processes.count)
    if config.kind == "uniform":
        return UniformReplay(capacity, shapes, storage, generator)
    return PrioritizedReplay(
        capacity,
        shapes,
        storage,
        generator,
        alpha=config.alpha,
        beta=config.beta,
        epsilon=config.epsilon,
        context=context if processes is not None else None,
    )
