"""A training of the flagship's task with BenchMARL's MASAC; ``flights.py`` is the command."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarl.algorithms import MasacConfig
from benchmarl.environments.pettingzoo.common import PettingZooClass
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig
from pettingzoo.utils import BaseParallelWrapper
from tensordict import TensorDict
from torch import Tensor, nn, no_grad
from torchrl.envs import MarlGroupMapType, PettingZooWrapper
from torchrl.envs.utils import ExplorationType, set_exploration_type

from runner.plugin.registry import Registry
from runner.plugins.marl.uav.parallel import parallel_env
from runner.plugins.marl.uav.rewards import coefficients
from runner.recipe.loader import load

sys.path.append(str(Path(__file__).parent.parent / "marl_learning"))

from flagship import FIRST_FLIGHT
from pilot import fly

AGENTS = "agents"


class ScaledRewards(BaseParallelWrapper):  # type: ignore[misc]
    """Multiplies the rewards of every agent by a factor.

    Args:
        env: The environment.
        leader: Factor of the leader's rewards.
        followers: Factor of those of each follower.
    """

    def __init__(self, env: Any, leader: float, followers: float) -> None:
        super().__init__(env)
        self.factors = {agent: leader if agent == "leader" else followers for agent in env.possible_agents}

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, {agent: self.factors[agent] * reward for agent, reward in rewards.items()}, *rest


class Flights(PettingZooClass):
    """The task; its settings are the arguments of ``parallel_env`` and the factors of rewards."""

    def get_env_fun(self, num_envs: int, continuous_actions: bool, seed: int | None, device: Any) -> Any:
        task = dict(self.config)
        factors = task.pop("factors")
        return lambda: PettingZooWrapper(
            ScaledRewards(parallel_env(**task), *factors),
            group_map=MarlGroupMapType.ALL_IN_ONE_GROUP,
            seed=seed,
            device=device,
        )

    def supports_continuous_actions(self) -> bool:
        return True

    def max_steps(self, env: Any) -> int:
        limit: int = self.config["episode_limit"]
        return limit

    def has_state(self) -> bool:
        return False

    def has_render(self, env: Any) -> bool:
        return False


def train(factors: tuple[float, float], seed: int, *assignments: str) -> dict[str, Any]:
    """Trains the task of the flagship in this process, and flies the last weights.

    Args:
        factors: Factors of the leader's rewards and of the followers'.
        seed: Of the training, and of the flights as in ``flagship.py``.
        assignments: Changes of the flagship's recipe, such as ``train.env_steps=2000``.

    Returns:
        ``flights``, and ``seconds`` and ``cpu_seconds`` of the training.
    """
    recipe = load("marl_phase2", assignments, Registry())
    data, model = recipe.data, recipe.model
    (width, _) = model.hidden
    rewards = asdict(coefficients(data.reward))
    task = {
        "followers": data.followers,
        "episode_limit": data.training_limit,
        "reward": rewards,
        "factors": factors,
    }

    settings = ExperimentConfig.get_from_yaml()
    settings.max_n_frames = recipe.train.env_steps
    settings.gamma = model.gamma[0]
    settings.lr = recipe.optimizer["actor"].lr
    settings.polyak_tau = model.tau
    settings.share_policy_params = False
    settings.off_policy_n_envs_per_worker = data.envs
    settings.off_policy_collected_frames_per_batch = data.envs
    settings.off_policy_n_optimizer_steps = round(data.envs * data.updates_per_step)
    settings.off_policy_train_batch_size = recipe.train.batch_size
    settings.off_policy_memory_size = data.replay.capacity
    settings.off_policy_init_random_frames = data.warmup
    settings.evaluation = False
    settings.render = False
    settings.loggers = []
    settings.create_json = False
    algorithm = MasacConfig.get_from_yaml()
    algorithm.share_param_critic = False
    algorithm.alpha_init = model.initial_temperature
    network = MlpConfig(
        num_cells=model.hidden,
        layer_class=nn.Linear,
        activation_class=nn.ReLU,
        norm_class=nn.LayerNorm,
        norm_kwargs={"normalized_shape": width},
    )
    with TemporaryDirectory() as folder:
        settings.save_folder = folder
        experiment = Experiment(
            task=Flights("flights", task),
            algorithm_config=algorithm,
            model_config=network,
            critic_model_config=network,
            seed=seed,
            config=settings,
        )
        started = time.perf_counter()
        cpu_started = time.process_time()
        experiment.run()
        seconds = time.perf_counter() - started
        cpu_seconds = time.process_time() - cpu_started

    def policy(observation: Tensor) -> Tensor:
        """Returns the mean actions: [E, N, o] to [E, N, a]."""
        flights = TensorDict({AGENTS: {"observation": observation}}, batch_size=len(observation))
        action: Tensor = experiment.policy(flights)[AGENTS, "action"]
        return action

    with no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        flights = fly(policy, data.followers, FIRST_FLIGHT + seed)
    return {"flights": flights, "seconds": round(seconds), "cpu_seconds": round(cpu_seconds)}
