"""The minimal work of one update of multi-agent SAC."""

import itertools
from collections.abc import Sequence

ADAM_BYTES = 28
"""A parameter is read and written with two moments, and its gradient read."""
POLYAK_BYTES = 12
ACTIVATIONS = 13
"""Times an activation of the hidden layers is written or read at least, over all networks of an
agent.
"""


def least_flop(
    agents: int,
    observation: int,
    action: int,
    hidden: Sequence[int],
    batch_size: int,
) -> int:
    """Returns the minimal matrix FLOP of one simultaneous update.

    A forward through P weights costs 2 P per sample, as do the gradient of the weights and that of
    the inputs, which the first layer does not need. For every agent there are two target and two
    online critics forward, both gradients of the online ones, these once more on fresh actions with
    gradients for the agent's action alone, and two forwards and one backward of the actor.
    """
    actor, critic = _weights(agents, observation, action, hidden)
    joint = agents * (observation + action)
    first_width = hidden[0]
    flop_per_sample = (
        24 * critic
        - 8 * joint * first_width
        + 4 * action * first_width
        + 8 * actor
        - 2 * observation * first_width
    )
    return agents * batch_size * flop_per_sample


def least_bytes(
    agents: int,
    observation: int,
    action: int,
    hidden: Sequence[int],
    batch_size: int,
    parameters: int,
) -> int:
    """Returns the bytes that one update at least reads or writes.

    Args:
        agents: number of agents.
        observation: numbers that an agent observes.
        action: numbers of an agent's action.
        hidden: widths of the hidden layers.
        batch_size: transitions.
        parameters: trainable ones, of all agents.
    """
    actor, _ = _weights(agents, observation, action, hidden)
    activations = 4 * batch_size * agents * ACTIVATIONS * sum(hidden)
    return (
        ADAM_BYTES * parameters
        + POLYAK_BYTES * (parameters - agents * actor)
        + activations
    )


def _weights(
    agents: int, observation: int, action: int, hidden: Sequence[int]
) -> tuple[int, int]:
    """Returns the weights of one actor and of one critic, without biases."""
    between = sum(a * b for a, b in itertools.pairwise(hidden))
    # An actor puts out mean and standard deviation of every number of an action.
    actor = observation * hidden[0] + between + hidden[-1] * 2 * action
    joint = agents * (observation + action)
    return actor, joint * hidden[0] + between + hidden[-1]
