"""Prioritized replay: sample 256 transitions and update their priorities; ours, TorchRL's and cpprb's."""

import argparse
from collections.abc import Callable
from functools import partial

import cpprb
import numpy as np
import torch
from session import keep, take_turns
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

from runner.plugins.marl.replay.build import make_replay
from runner.plugins.marl.replay.config import PrioritizedConfig

AGENTS, OBSERVATION, ACTION = 4, 7, 2
SHAPES = {
    "observation": (AGENTS, OBSERVATION),
    "action": (AGENTS, ACTION),
    "reward": (AGENTS,),
    "next_observation": (AGENTS, OBSERVATION),
    "terminated": (),
}
BATCH, CHUNK = 256, 10_000
ALPHA, BETA = 0.6, 0.5


def chunks(capacity: int) -> "list[dict[str, torch.Tensor]]":
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(CHUNK, *shape, generator=generator) for name, shape in SHAPES.items()}
        for _ in range(capacity // CHUNK)
    ]


def errors() -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda: torch.rand(BATCH, generator=generator) * 10 + 0.1


def ours(capacity: int) -> Callable[[], object]:
    config = PrioritizedConfig(capacity=capacity, alpha=ALPHA, beta=(BETA, BETA))
    replay, error = make_replay(config, SHAPES, torch.device("cpu"), torch.Generator().manual_seed(0)), errors()
    for chunk in chunks(capacity):
        replay.add(chunk)

    def cycle() -> None:
        replay.update_priorities(replay.sample(BATCH, 0.5)["index"], error())

    return cycle


def torchrl(capacity: int) -> Callable[[], object]:
    storage = LazyTensorStorage(capacity)
    replay = TensorDictPrioritizedReplayBuffer(
        alpha=ALPHA, beta=BETA, storage=storage, batch_size=BATCH, priority_key="td_error"
    )
    error = errors()
    for chunk in chunks(capacity):
        replay.extend(TensorDict(chunk, batch_size=[CHUNK]))

    def cycle() -> None:
        batch = replay.sample()
        batch["td_error"] = error()
        replay.update_tensordict_priority(batch)

    return cycle


def by_cpprb(capacity: int) -> Callable[[], object]:
    fields = {name: {"shape": shape or 1, "dtype": np.float32} for name, shape in SHAPES.items()}
    replay, error = cpprb.PrioritizedReplayBuffer(capacity, fields, alpha=ALPHA), errors()
    for chunk in chunks(capacity):
        replay.add(**{name: value.numpy() for name, value in chunk.items()})

    def cycle() -> None:
        batch = replay.sample(BATCH, beta=BETA)
        {name: torch.from_numpy(batch[name]) for name in SHAPES}
        replay.update_priorities(batch["indexes"], error().numpy())

    return cycle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacities", type=int, nargs="+", default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    figures = {}
    for capacity in arguments.capacities:
        builds = {"ours": ours, "TorchRL": torchrl, "cpprb": by_cpprb}
        builds = {name: partial(build, capacity) for name, build in builds.items()}
        figures[f"{capacity:,}"] = take_turns(builds, "TorchRL", arguments.rounds, 0.1)
        for name, each in figures[f"{capacity:,}"].items():
            low, high = each["ci95"]
            print(f"{capacity:9,} {name:8} {1e3 * each['ms']:7.0f} us   {each['ratio']:.2f} [{low:.2f}, {high:.2f}]")
    keep("replay", f"python experiments/peers/replay.py --rounds {arguments.rounds}", figures)


if __name__ == "__main__":
    main()
