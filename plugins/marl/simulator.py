"""A source that simulates: a batch of environments, a replay buffer, and evaluation on held-out
seeds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from runner.api import (
    Batch,
    Context,
    Learner,
    Progress,
    RunnerError,
    Source,
    State,
    UsageError,
)

from .replay.build import make_replay, storage_device
from .simulator_config import SimulatorConfig

_COUNTERS = ("_steps", "_uncounted", "_credit", "_due", "_open")
STEPS_BETWEEN_CHECKS = 10
"""Steps of an evaluation between checks whether all episodes are over, because every check waits
for an accelerator.
"""
TEST_SEED_OFFSET = 1_000_003
"""Difference of the seeds of the test's episodes and the evaluation's."""


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """The result of one step of E environments with N agents; a finished environment is reset
    within the step.
    """

    observation: Tensor
    """[E, N, o]: what to act on next; of the new episode where the old one ended."""
    next_observation: Tensor
    """[E, N, o]: what the action led to, also where the episode ended."""
    reward: Tensor
    """[E, N]."""
    terminated: Tensor
    """[E], bool: the task ended; nothing follows, so nothing may be bootstrapped."""
    truncated: Tensor
    """[E], bool: the episode was cut off; its value continues."""
    episodes: Tensor
    """[E, 1 + m]: 1 and m numbers that can be added up for each episode that ended in this step,
    else zeros.
    """


class BatchedEnvironment(Protocol):
    """E copies of an environment with N agents that are stepped as one."""

    agents: int
    observation_size: int
    action_size: int

    def reset(self) -> Tensor:
        """Starts new episodes everywhere and returns their observations [E, N, o]."""

    def step(self, action: Tensor) -> EnvironmentStep:
        """Applies actions [E, N, a] in [-1, 1]."""

    def summarise(self, total: list[float]) -> dict[str, float]:
        """Metrics by name of the episodes whose rows of ``EnvironmentStep.episodes`` add up to
        ``total``.
        """

    def state_dict(self) -> State:
        """Returns the state with which ``load_state_dict`` continues in the middle of an
        episode.
        """

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""


class SimulatorSource(Source):
    """Collects transitions from a batched environment into a replay buffer.

    Batches hold ``observation`` [B, N, o], ``action`` [B, N, a], ``reward`` [B, N],
    ``next_observation`` [B, N, o] and ``terminated`` [B] (0 or 1), and what the replay adds:
    ``weight`` [B] and ``index`` [B]. Random numbers come from the context's generators
    ``environment``, ``exploration`` (actions of the warm-up) and ``replay``; their states are the
    context's, all others are in ``state_dict``.

    ``collect`` counts what ``simulate`` does, and ``draw`` selects what ``fetch_batch`` reads. A
    stage may capture ``simulate``, ``fetch_batch`` and ``update_priorities``, if the environment
    can be captured and the buffer is on the learner's device.

    Several processes divide the environments, the capacity of the buffer and every batch. Each
    samples from its own transitions, and the counters are those of all processes.
    """

    activities: ClassVar[Mapping[str, str]] = {"collect": "collecting"}
    captures_environment: ClassVar[bool] = False
    """Whether a step of the environment can be captured in a CUDA graph: it never waits for the
    device, and the state is in tensors that stay where they are.
    """

    def __init__(self, config: SimulatorConfig, context: Context) -> None:
        self.config = config
        self._slots = context.slots
        self._slots.define(
            collect=self.collect,
            simulate=self.simulate,
            fetch_batch=self.fetch_batch,
        )
        self._context = context
        self._nominal_batch_size = context.batch_size
        self._policy = context.process_generator("policy")
        self._steps = 0
        """Environment steps taken, by all processes."""
        self._uncounted = 0
        """Those of them whose updates are not all done."""
        self._credit = 0.0
        self._due = 0
        """Updates whose batches can be drawn before the next step."""
        self._open = 0
        """Batches that were drawn and whose updates are not over."""
        self._has_enough = False
        """Whether the buffers of several processes are known to be full enough for a batch."""
        self._device = context.device
        self._evaluation_episodes = config.evaluation.episodes
        self._evaluation_seed = config.evaluation.seed
        self._longest_episode = config.evaluation.longest
        self._exploration = context.process_generator("exploration")
        self._envs = context.process_part(config.envs)
        """Simulations of this process."""
        self._environment = self.make_environment(
            config,
            self._envs,
            self._device,
            context.process_generator("environment"),
        )
        # A copy, because an environment may reuse its memory.
        self._observation = self._environment.reset().clone()
        agents = self._environment.agents
        size = self._environment.observation_size
        self._action_shape = (agents, self._environment.action_size)
        stored = {
            "observation": (agents, size),
            "action": self._action_shape,
            "reward": (agents,),
            "next_observation": (agents, size),
            "terminated": (),
        }
        self.shapes = {**stored, "weight": (), "index": ()}
        storage = storage_device(config.replay, self._device)
        generator = context.process_generator("replay", storage)
        self._replay = make_replay(
            config.replay, stored, self._device, generator, context
        )
        if config.replay.kind == "prioritized":
            self._slots.define(update_priorities=self._replay.update_priorities)
        self.capturable = self._capturable(storage)
        self._finished: Tensor | None = None
        """Sums of the rows of episodes that ended since the last report, once there was a step."""
        self._step: EnvironmentStep | None = None
        self._has_stepped = False
        self._reward_squares = torch.zeros(
            agents, dtype=torch.float64, device=self._device
        )
        """Sums over all steps so far of every agent's squared rewards, [N]."""
        self._rewarded_steps = torch.zeros(
            (), dtype=torch.float64, device=self._device
        )
        """Environment steps of all processes, whose rewards are in these sums."""
        self._all_reward_squares: Tensor | None = None
        """Those of all processes; None if they have stepped since they were added up."""

    def _capturable(self, storage: torch.device) -> tuple[str, ...]:
        """Returns the slots that a stage may capture, for a buffer on ``storage``."""
        # A captured step must not copy to or from the host.
        if storage != self._device:
            return ()
        slots = ["fetch_batch"]
        if self.captures_environment:
            slots.append("simulate")
        if self.config.replay.kind == "prioritized":
            slots.append("update_priorities")
        return tuple(slots)

    @abstractmethod
    def make_environment(
        self,
        config: Any,
        envs: int,
        device: torch.device,
        generator: torch.Generator,
    ) -> BatchedEnvironment:
        """Builds ``envs`` simulations that draw their episodes from ``generator``."""

    def bind(self, learner: Learner) -> None:
        """Receives the policy: the learner's ``act``, or ``predict`` if it does not explore."""
        self._act = getattr(learner, "act", None) or (
            lambda observation, _: learner.predict(observation)
        )

    def draw(self, batch_size: int, progress: Progress) -> Batch | None:
        """Returns a batch from the replay buffer, or None after a step that earned no update.

        Every step of all environments earns ``updates_per_step`` updates for each, and none
        during the warm-up.
        """
        self._has_stepped = False
        if not self._due:
            self._due = self._advance(batch_size)
            if not self._due:
                return None
        self._due -= 1
        self._open += 1
        fraction = progress.fraction
        # The progress counts steps when their updates are done, and lags behind the simulator.
        if progress.unit == "env_steps" and progress.length:
            fraction = min(1.0, self._steps / progress.length)
        part = self._context.process_part(batch_size)
        return self._slots.fetch_batch(self._replay.draw(part, fraction))

    def fetch_batch(self, drawn: Batch) -> Batch:
        """Returns the batch that follows from numbers that the replay buffer has drawn."""
        batch = self._replay.fetch(drawn)
        if self.config.normalize_rewards:
            reward = batch["reward"]
            batch["reward"] = reward / self.reward_scale().to(reward.device)
        return batch

    def reward_scale(self) -> Tensor:
        """Returns the root mean square of every agent's rewards so far, [N]; 1 for an
        agent with only zeros.
        """
        # In float64, because the sum grows over the entire training.
        squares = self._all_reward_squares
        if squares is None:
            squares = self._context.sum_over_processes(self._reward_squares)
            self._all_reward_squares = squares
        scale = (squares / self._rewarded_steps).sqrt()
        return torch.where(scale > 0, scale, 1.0).float()

    def _advance(self, batch_size: int) -> int:
        """Steps all environments once; returns how many updates are due."""
        warming_up = self._steps < self.config.warmup
        self._slots.collect(None if warming_up else self._explore)
        self._steps += self.config.envs
        self._uncounted += self.config.envs
        # A buffer with fewer transitions would fill a batch with repetitions.
        if warming_up or not self._can_sample(batch_size):
            return 0
        # A larger batch than the recipe's has fewer updates of the same number of samples. The
        # fraction of an update remains as credit for the next step.
        earned = self.config.envs * self.config.updates_per_step
        self._credit += earned * self._nominal_batch_size / batch_size
        due = int(self._credit)
        self._credit -= due
        return due

    def _can_sample(self, batch_size: int) -> bool:
        """Returns whether the buffers of all processes have enough transitions for a batch."""
        can_sample = len(self._replay) >= self._context.process_part(batch_size)
        if self._context.processes is None:
            return can_sample
        # Transitions never become fewer, so the processes ask each other until all have enough.
        if not self._has_enough:
            fewest = torch.tensor(float(can_sample))
            self._has_enough = bool(self._context.min_over_processes(fewest))
        return self._has_enough

    def _explore(self, observation: Tensor) -> Tensor:
        actions: Tensor = self._act(observation, self._policy)
        return actions

    def ahead(self) -> int:
        """Returns the number of batches before the next step."""
        return self._due

    def size(self, batch: Batch) -> int:
        """Returns the number of transitions, those of this process."""
        return len(batch["reward"])

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """Returns what an update adds to the progress.

        Environment steps, of all processes, count when all updates that they earned are done.
        """
        counts = {}
        if batch is not None:
            self._open -= 1
            counts["samples"] = self.size(batch)
        if not self._due and not self._open:
            counts["env_steps"] = self._uncounted
            self._uncounted = 0
        return counts

    def collect(self, act: Callable[[Tensor], Tensor] | None) -> None:
        """Steps all environments once and stores the transitions; see ``simulate``."""
        self._slots.simulate(act)
        self._replay.count(self._envs)
        self._all_reward_squares = None
        self._has_stepped = True

    @torch.no_grad()
    def simulate(self, act: Callable[[Tensor], Tensor] | None) -> None:
        """Steps all environments once and stores the transitions, without counting them.

        Everything that it changes is in tensors that stay where they are, except at its first call.

        Args:
            act: Maps observations to actions; None selects uniformly random actions.
        """
        # Policies and environments may change their arguments and results in place.
        if act is None:
            action = self._random_action()
        else:
            action = act(self._observation.clone())
        step = self._environment.step(action.clone())
        self._step = step
        self._replay.store(
            {
                "observation": self._observation,
                "action": action,
                "reward": step.reward,
                "next_observation": step.next_observation,
                "terminated": step.terminated.to(step.reward.dtype),
            }
        )
        squares = step.reward.square().sum(0, dtype=torch.float64)
        self._reward_squares += squares
        self._rewarded_steps += self.config.envs
        self._observation.copy_(step.observation)
        finished = step.episodes.sum(0, dtype=torch.float64)
        if self._finished is None:
            self._finished = finished
        else:
            self._finished += finished

    @property
    def _latest(self) -> EnvironmentStep | None:
        """The step of the last ``draw``, if it made one."""
        return self._step if self._has_stepped else None

    def _random_action(self) -> Tensor:
        shape = (self._envs, *self._action_shape)
        uniform = torch.rand(
            shape, generator=self._exploration, device=self._device
        )
        return uniform * 2 - 1

    def feedback(self, batch: Batch, output: Batch) -> None:
        """Passes the TD errors of the batch, ``output["td_error"]`` [B], to prioritized replay.

        Raises:
            UsageError: the replay is prioritized and the learner returns no TD errors.
        """
        if self.config.replay.kind != "prioritized":
            return
        if "td_error" not in output:
            raise UsageError(
                "data.replay.kind: prioritized replay needs a learner whose update returns "
                "'td_error'"
            )
        self._slots.update_priorities(batch["index"], output["td_error"])

    @torch.no_grad()
    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Runs the deterministic policy through the held-out episodes, the same ones every time.

        Every episode has a separate simulation and counts once; training's environments and
        generators are unchanged.
        """
        environment, observation = self.held_out()
        total: Tensor | None = None
        for step, running in self.rollout(learner, environment, observation):
            # A simulation starts a second episode while others are in their first.
            first_episodes = step.episodes * running.unsqueeze(-1)
            finished = first_episodes.sum(0, dtype=torch.float64)
            total = finished if total is None else total + finished
        assert total is not None
        return environment.summarise(total.tolist())

    def has_test(self) -> bool:
        """Returns True: a test has episodes of another seed."""
        return True

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Evaluates as many other episodes inside the ``with``, the same ones every time."""
        seed = self._evaluation_seed
        self._evaluation_seed = seed + TEST_SEED_OFFSET
        try:
            yield
        finally:
            self._evaluation_seed = seed

    def held_out(self) -> tuple[BatchedEnvironment, Tensor]:
        """Returns the held-out episodes at their start, and their observations, [E, N, o]."""
        generator = torch.Generator(self._device).manual_seed(
            self._evaluation_seed
        )
        environment = self.make_environment(
            self.config, self._evaluation_episodes, self._device, generator
        )
        return environment, environment.reset()

    @torch.no_grad()
    def rollout(
        self,
        learner: Learner,
        environment: BatchedEnvironment,
        observation: Tensor,
    ) -> Iterator[tuple[EnvironmentStep, Tensor]]:
        """Steps the deterministic policy until all episodes are over; with each step, which had
        not ended before, [E].

        On an accelerator, some steps more.
        """
        running = torch.ones(
            len(observation), dtype=torch.bool, device=self._device
        )
        for steps in count(1):
            step = environment.step(learner.predict(observation.clone()))
            yield step, running
            running = running & ~(step.terminated | step.truncated)
            observation = step.observation
            may_check = (
                self._device.type == "cpu" or steps % STEPS_BETWEEN_CHECKS == 0
            )
            if may_check and not running.any():
                return
            if steps == self._longest_episode:
                unfinished = int(running.sum())
                config_name = type(self.config).__name__
                raise RunnerError(
                    f"{unfinished} of {len(running)} episodes of the evaluation have not ended "
                    f"after {steps:,} steps: "
                    f"let {config_name}'s environment terminate or truncate them, or set "
                    f"data.evaluation.longest"
                )

    def statistics(self) -> dict[str, float]:
        """Returns metrics of the training episodes that ended since the last call.

        ``episodes`` is their number, in all processes.
        """
        total = [0.0]
        # All processes have stepped equally often, so either all or none have sums.
        if self._finished is not None:
            total = self._context.sum_over_processes(self._finished).tolist()
            self._finished.zero_()
        if total[0] == 0:
            return {"episodes": 0.0}
        return {"episodes": total[0], **self._environment.summarise(total)}

    def events(self) -> Mapping[str, bool]:
        """Returns whether an episode was terminated or truncated in the last draw."""
        step = self._latest
        is_terminated = step is not None and bool(step.terminated.any())
        is_truncated = step is not None and bool(step.truncated.any())
        return {
            "an episode that is terminated": is_terminated,
            "an episode that is truncated": is_truncated,
        }

    def state_dict(self) -> State:
        """Returns environments, observations, unreported episodes and the replay buffer.

        Further steps change only what belongs to the replay buffer.
        """
        finished = None if self._finished is None else self._finished.clone()
        return {
            "environment": self._environment.state_dict(),
            "observation": self._observation.clone(),
            "finished": finished,
            "reward_squares": self._reward_squares.clone(),
            "rewarded_steps": self._rewarded_steps.clone(),
            "replay": self._replay.state_dict(),
            "counters": {name: getattr(self, name) for name in _COUNTERS},
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        self._environment.load_state_dict(state["environment"])
        # As many environments as in the state.
        self._observation = state["observation"].to(self._device, copy=True)
        finished = state["finished"]
        if finished is not None:
            finished = finished.to(self._device, copy=True)
        self._finished = finished
        self._reward_squares.copy_(state["reward_squares"])
        self._rewarded_steps.copy_(state["rewarded_steps"])
        self._all_reward_squares = None
        self._replay.load_state_dict(state["replay"])
        self._has_enough = False
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])
