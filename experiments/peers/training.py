"""Whole trainings on MPE's ``simple_spread``: BenchMARL's MASAC, and ours in float32 and in bf16.

Both step the same simulator (mpe2, three agents) in 8 copies, one after the other; both update once for every 8
environment steps on 256 transitions, with networks of two hidden layers of 128 that agents do not share. Every
training has a process of its own, so that none finds what another has compiled but on the disk, where the first one
finds nothing.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benchmarl.algorithms import MasacConfig
from benchmarl.environments.pettingzoo.common import PettingZooClass
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig
from mpe2 import simple_spread_v3
from session import keep
from torch import nn
from torchrl.envs import PettingZooWrapper

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system import generators
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.signals import Stop

ENVS, BATCH, WIDTH, WARM_UP, PER_UPDATE = 8, 256, 128, 2_000, 8
EPISODES, CYCLES, TAU = 500, 25, 0.04
SETTINGS = (
    "optimization.fused_optimizer=on",
    "optimization.float32_matmul=on",
    "optimization.compile=on",
    "optimization.heap_retention=on",
    "train.evaluate_every=null",
    "train.checkpoint_every=null",
    f"data.evaluation.episodes={EPISODES}",
    "device=cpu",
)
BF16 = "optimization.amp.dtype=bf16"


class Spread(PettingZooClass):
    """The same scenario from the package that took it over; BenchMARL's own entry asks for where it was before."""

    def get_env_fun(self, num_envs: int, continuous_actions: bool, seed: int | None, device: Any) -> Any:
        return lambda: PettingZooWrapper(
            simple_spread_v3.parallel_env(max_cycles=CYCLES, continuous_actions=True), seed=seed, device=device
        )

    def has_state(self) -> bool:
        return False

    def has_render(self, env: Any) -> bool:
        return False


def benchmarl(*, steps: int, seed: int) -> dict[str, float]:
    """A training with BenchMARL."""
    settings = ExperimentConfig.get_from_yaml()
    settings.max_n_frames = steps
    settings.gamma = 0.95
    settings.lr = 1e-3
    settings.share_policy_params = False
    settings.polyak_tau = TAU
    settings.off_policy_n_envs_per_worker = ENVS
    settings.off_policy_collected_frames_per_batch = ENVS * CYCLES
    settings.off_policy_n_optimizer_steps = ENVS * CYCLES // PER_UPDATE
    settings.off_policy_train_batch_size = BATCH
    settings.off_policy_memory_size = 100_000
    settings.off_policy_init_random_frames = WARM_UP
    settings.evaluation = False
    settings.render = False
    settings.loggers = []
    settings.create_json = False
    algorithm = MasacConfig.get_from_yaml()
    algorithm.share_param_critic = False
    network = MlpConfig(num_cells=[WIDTH, WIDTH], layer_class=nn.Linear, activation_class=nn.ReLU,
                        norm_class=nn.LayerNorm, norm_kwargs={"normalized_shape": WIDTH})  # fmt: skip
    with TemporaryDirectory() as folder:
        settings.save_folder = folder
        experiment = Experiment(
            task=Spread("SIMPLE_SPREAD", {"max_cycles": CYCLES}), algorithm_config=algorithm,
            model_config=network, critic_model_config=network, seed=seed, config=settings,
        )  # fmt: skip
        started = time.perf_counter()
        experiment.run()
        seconds = time.perf_counter() - started
        value = statistics.mean(
            float(episode["next", "agent", "reward"].sum(0).mean()) for episode in evaluated(experiment)
        )
    return {"seconds": seconds, "return": value}


def evaluated(experiment: Experiment) -> list[Any]:
    """Episodes of the deterministic policy."""
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    env = Spread("SIMPLE_SPREAD", {}).get_env_fun(1, True, 10_000, "cpu")()
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        return [env.rollout(CYCLES, experiment.policy) for _ in range(EPISODES)]


class Stopwatch(NoOutput):
    """Knows when the training last reported, which is before it evaluates."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        if "train/updates" in metrics:
            self.reported = time.perf_counter()


def ours(*settings: str, steps: int, seed: int) -> dict[str, float]:
    """The same with ``recipes/marl_spread.yaml``; compilation is part of the time."""
    recipe = load("marl_spread", [*SETTINGS, *settings, f"train.env_steps={steps}", f"seed={seed}"], Registry())
    assert recipe.train.batch_size == BATCH
    assert recipe.data.updates_per_step == 1 / PER_UPDATE
    assert recipe.model.tau == TAU
    generators.seed(seed)
    pipeline = assemble(recipe, [])
    watch = Stopwatch()
    with TemporaryDirectory() as folder:
        started = time.perf_counter()
        loop = Loop(pipeline, Path(folder), watch, watch, Stop())
        loop.run()
    first = loop.metrics["perf/first_update_seconds"]  # compilation, for the most part
    seconds = watch.reported - started
    return {"seconds": seconds, "return": loop.metrics["eval/return"], "first_update_seconds": first}


TRAININGS = {"BenchMARL": benchmarl, "ours, float32": ours, "ours, bf16": partial(ours, BF16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    with (
        TemporaryDirectory() as compiled,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes,
    ):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled  # inherited by the processes, none of which has begun
        for seed in range(arguments.seeds):
            for name, train in list(TRAININGS.items())[:: -1 if seed % 2 else 1]:
                figures = processes.submit(train, steps=arguments.steps, seed=seed).result()
                rows.append({"name": name, "seed": seed, **figures})
                rows[-1]["steps_per_second"] = arguments.steps / rows[-1]["seconds"]
                print(json.dumps(rows[-1]), flush=True)
    command = f"python experiments/peers/training.py --steps {arguments.steps} --seeds {arguments.seeds}"
    keep("training", command, {"steps": arguments.steps, "trainings": rows})


if __name__ == "__main__":
    main()
