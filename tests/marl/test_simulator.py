"""The source around a simulator: collecting, replay, evaluation, statistics, state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.api import Context, Progress, Slots, UsageError
from runner.plugins.marl.replay.config import PrioritizedConfig, UniformConfig
from runner.plugins.marl.simulator_config import EvaluationConfig
from runner.plugins.marl.uav.config import ObstaclesConfig, RewardConfig, UavConfig
from runner.plugins.marl.uav.environment import UavEnvironment
from runner.plugins.marl.uav.source import UavSource

CPU = torch.device("cpu")


def make(seed=0, **settings):
    defaults = {
        "envs": 4,
        "followers": 2,
        "episode_limit": 30,
        "replay": UniformConfig(capacity=1000),
        "evaluation": EvaluationConfig(episodes=12, seed=3),
    }
    context = Context(CPU, Slots(), seed, batch_size=8)
    return UavSource(UavConfig(**{**defaults, **settings}), context), context


def sampled(source, size, fraction=0.0):
    """A batch of what has been collected, without another step."""
    return source._replay.sample(size, fraction)


class StraightOn:
    """A policy that neither accelerates nor turns."""

    def predict(self, observation):
        return torch.zeros(*observation.shape[:-1], 2)


class Homing:
    """A policy whose leader turns to the goal."""

    def predict(self, observation):
        x, y, _, heading, goal_x, goal_y, _ = observation[:, 0].unbind(-1)
        wanted = torch.atan2(y - goal_y, goal_x - x)
        turn = torch.remainder(wanted - heading * 2 * torch.pi + torch.pi, 2 * torch.pi) - torch.pi
        action = torch.zeros(*observation.shape[:-1], 2)
        action[:, 0, 1] = (turn / 0.6).clamp(-1, 1)
        return action


def test_the_face_says_what_the_batches_hold():
    source, _ = make()
    source.collect(None)
    batch = sampled(source, 8, 0.0)
    assert set(batch) == set(source.shapes)
    for name, shape in source.shapes.items():
        assert batch[name].shape == (8, *shape)
    assert source.shapes["observation"] == (3, 7)
    assert source.shapes["action"] == (3, 2)


def test_collecting_counts_every_environment_and_stores_what_the_policy_did():
    source, _ = make()
    seen = []

    def act(observation):
        seen.append(observation)
        return torch.full((4, 3, 2), 0.25)

    source.collect(act)
    source.collect(act)
    batch = sampled(source, 64, 0.0)
    assert torch.all(batch["action"] == 0.25)
    assert set(batch["terminated"].tolist()) <= {0.0, 1.0}
    first = batch["observation"][:, None].eq(seen[0]).flatten(2).all(-1)
    second = batch["observation"][:, None].eq(seen[1]).flatten(2).all(-1)
    assert torch.all(first.any(1) | second.any(1))
    # nothing ended yet, so what the first action led to is what the second one saw
    for row, env in first.nonzero().tolist():
        assert torch.equal(batch["next_observation"][row], seen[1][env])


def test_random_actions_fill_the_whole_range_and_depend_on_the_seed():
    actions = []
    for seed in (0, 0, 1):
        source, _ = make(seed)
        for _ in range(50):
            source.collect(None)
        actions.append(sampled(source, 500, 0.0)["action"])
    assert torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[0], actions[2])
    assert -1 <= actions[0].min() < -0.9
    assert 0.9 < actions[0].max() <= 1


@pytest.mark.parametrize(
    ("followers", "reward"),
    [
        (2, RewardConfig()),
        (1, RewardConfig(preset="seed", goal=1e5)),  # agents whose rewards differ by magnitudes
        (3, RewardConfig(step=-7.0)),
    ],
)
@pytest.mark.parametrize("replay", [UniformConfig(capacity=1000), PrioritizedConfig(capacity=1000)])
def test_normalized_rewards_are_divided_by_the_root_mean_square_of_each_agent(followers, reward, replay):
    settings = {"followers": followers, "reward": reward, "replay": replay, "warmup": 4 * 60, "updates_per_step": 1.0}
    (plain, _), (normalized, _) = make(**settings), make(**settings, normalize_rewards=True)
    collected = []
    environment_step = plain._environment.step

    def step(action):
        result = environment_step(action)
        collected.append(result.reward)
        return result

    plain._environment.step = step
    batches = []
    for source in (plain, normalized):
        source.bind(StraightOn())
        progress = Progress("env_steps", 1000)
        batch = None
        while batch is None:
            batch = source.draw(64, progress)
        batches.append(batch)
    scale = torch.cat(collected).double().square().mean(0).sqrt().float()
    assert torch.allclose(batches[1]["reward"], batches[0]["reward"] / scale)
    assert torch.equal(batches[1]["observation"], batches[0]["observation"])
    assert plain.statistics() == normalized.statistics()


def test_rewards_that_are_all_zero_stay_zero_when_normalized():
    nothing = dict.fromkeys(("collision", "obstacle", "border", "goal", "goal_distance"), 0.0)
    nothing |= dict.fromkeys(("formation", "speed_match", "step"), 0.0)
    source, _ = make(reward=RewardConfig(**nothing), normalize_rewards=True, warmup=0)
    source.bind(StraightOn())
    batch = None
    while batch is None:
        batch = source.draw(8, Progress("updates", 10))
    assert torch.equal(batch["reward"], torch.zeros(8, 3))


@pytest.mark.parametrize(("limit", "steps"), [(1, 1), (7, 7), (29, 29), (1000, 30)])
def test_training_episodes_may_be_shorter_than_evaluated_ones(limit, steps):
    (source, _), (plain, _) = make(training_limit=limit, envs=64), make(envs=64)
    for _ in range(steps - 1):
        source.collect(None)
    ended = source.statistics()["episodes"]
    source.collect(None)
    assert ended + source.statistics()["episodes"] >= 64
    assert ended < 64
    assert source.evaluate(StraightOn()) == plain.evaluate(StraightOn())


def test_td_errors_become_priorities():
    source, _ = make(replay=PrioritizedConfig(capacity=100))
    for _ in range(10):
        source.collect(None)
    for _ in range(20):
        batch = sampled(source, 32, 0.0)
        source.feedback(batch, {"td_error": torch.where(batch["index"] == 7, 1e9, 0.0)})
    assert torch.sum(sampled(source, 32, 0.0)["index"] == 7) > 24


def test_prioritized_replay_refuses_a_learner_without_td_errors():
    source, _ = make(replay=PrioritizedConfig(capacity=100))
    source.collect(None)
    with pytest.raises(UsageError, match="td_error"):
        source.feedback(sampled(source, 4, 0.0), {})
    source, _ = make()
    source.collect(None)
    source.feedback(sampled(source, 4, 0.0), {})


def test_evaluation_is_the_same_every_time_and_leaves_training_alone():
    source, context = make()
    source.collect(None)
    numbers = {name: generator.get_state() for name, generator in context.generators.items()}
    before = source.state_dict()
    first = source.evaluate(StraightOn())
    for _ in range(3):
        other, _ = make(seed=8)
        other.collect(None)
    assert source.evaluate(StraightOn()) == first == other.evaluate(StraightOn())
    assert all(torch.equal(context.generators[name].get_state(), state) for name, state in numbers.items())
    assert torch.equal(source.state_dict()["environment"]["bodies"], before["environment"]["bodies"])


def test_evaluation_counts_every_episode_once():
    """One by one, the same episodes give the same metrics."""
    source, _ = make(envs=1, evaluation=EvaluationConfig(episodes=40, seed=11))
    metrics = source.evaluate(Homing())
    config = UavConfig(followers=2, episode_limit=30)
    environment = UavEnvironment(config, 40, CPU, torch.Generator().manual_seed(11))
    observation = environment.reset()
    rows = {}
    while len(rows) < 40:
        step = environment.step(Homing().predict(observation))
        for env in (step.terminated | step.truncated).nonzero()[:, 0].tolist():
            rows.setdefault(env, step.episodes[env].double())
        observation = step.observation
    expected = environment.summarise(torch.stack(list(rows.values())).sum(0).tolist())
    assert metrics == pytest.approx(expected)
    assert set(metrics) == {
        "success_rate",
        "collision_rate",
        "timeout_rate",
        "steps_to_goal",
        "return",
        "formation_rate",
        "formation_strict",
    }
    assert metrics["success_rate"] + metrics["collision_rate"] + metrics["timeout_rate"] == pytest.approx(1)
    assert metrics["success_rate"] > 0.3


def test_statistics_report_every_episode_once():
    source, _ = make()
    assert source.statistics() == {"episodes": 0.0}
    episodes = 0.0
    for steps in range(1, 101):
        source.collect(None)
        if steps % 20 == 0:
            statistics = source.statistics()
            episodes += statistics["episodes"]
            assert statistics["episodes"] == 0 or "formation_rate" in statistics
    assert source.statistics() == {"episodes": 0.0}
    # 4 environments, episodes of at most 30 steps
    assert episodes >= 4 * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"replay": UniformConfig(capacity=50)},
        {"replay": PrioritizedConfig(capacity=50)},
        {
            "replay": UniformConfig(capacity=50),
            "obstacles": ObstaclesConfig(count=4, speed=9, turn=0.3),
            "repeat_failures": 0.5,
            "training_limit": 6,
        },
    ],
)
def test_a_restored_source_continues_bit_for_bit(settings):
    source, context = make(**settings)
    for _ in range(20):
        source.collect(None)
    state = source.state_dict()
    state = {**state, "replay": {k: v.clone() if torch.is_tensor(v) else v for k, v in state["replay"].items()}}
    numbers = {name: generator.get_state() for name, generator in context.generators.items()}
    expected = follow(source)

    other, context = make(seed=99, **settings)
    other.load_state_dict(state)
    for name, value in numbers.items():
        context.generators[name].set_state(value)
    actual = follow(other)
    assert torch.equal(other.reward_scale(), source.reward_scale())
    assert actual[0] == expected[0]
    assert all(torch.equal(actual[1][name], expected[1][name]) for name in expected[1])


def follow(source):
    for _ in range(40):
        source.collect(None)
    return source.statistics(), sampled(source, 64, 0.5)


class Homeward(Homing):
    """The same policy, which could explore."""

    def __init__(self):
        self.acted = 0

    def act(self, observation, generator):
        self.acted += 1
        return self.predict(observation) + 0.1 * torch.randn(len(observation), 3, 2, generator=generator)


def drawn(source, batch_size, progress, draws):
    """The counts that so many draws come to, each learnt from at once, and how many had a batch."""
    batches = 0
    for _ in range(draws):
        batch = source.draw(batch_size, progress)
        batches += batch is not None
        progress.advance(source.counts(batch))
    return batches


@pytest.mark.parametrize("learner", [Homing(), Homeward()])
def test_a_warm_up_acts_at_random_and_then_every_step_earns_its_updates(learner):
    source, _ = make(warmup=40, updates_per_step=0.75)
    source.bind(learner)
    progress = Progress("env_steps", 1000)
    assert drawn(source, 8, progress, 10) == 0
    assert (progress.env_steps, progress.samples) == (40, 0)
    assert getattr(learner, "acted", 0) == 0
    assert drawn(source, 8, progress, 30) == 30  # three updates for each step of four environments
    assert (progress.env_steps, progress.samples) == (80, 240)
    assert getattr(learner, "acted", 10) == 10


@given(st.integers(1, 64), st.sampled_from([0.125, 0.5, 2.0]))
@settings(max_examples=10)
def test_samples_per_environment_step_do_not_depend_on_the_batch_size(batch_size, rate):
    source, _ = make(warmup=100, updates_per_step=rate)
    source.bind(StraightOn())
    progress = Progress("env_steps", 1000)
    while progress.env_steps < 800:
        drawn(source, batch_size, progress, 1)
    assert progress.samples == pytest.approx((progress.env_steps - 100) * rate * 8, abs=2 * batch_size)


def test_what_may_be_drawn_ahead_is_what_is_due_and_steps_count_when_their_updates_are_over():
    source, _ = make(warmup=16, updates_per_step=0.75)
    source.bind(StraightOn())
    progress = Progress("env_steps", 1000)
    drawn(source, 8, progress, 4)
    batches = [source.draw(8, progress)]
    assert source.ahead() == 2
    batches += [source.draw(8, progress) for _ in range(2)]
    assert source.ahead() == 0
    counted = [dict(source.counts(batch)) for batch in batches]
    assert counted == [{"samples": 8}, {"samples": 8}, {"samples": 8, "env_steps": 4}]


@pytest.mark.parametrize(
    ("obstacles", "unread"),
    [
        (ObstaclesConfig(count=2, speed=5), []),
        (ObstaclesConfig(), ["obstacles.turn", "obstacles.observed"]),
    ],
    ids=["obstacles that move", "an obstacle that does not move"],
)
def test_every_setting_is_read(obstacles, unread):
    config = UavConfig(envs=2, replay=PrioritizedConfig(capacity=100), warmup=0, obstacles=obstacles).recorded()
    source = UavSource(config, Context(CPU, Slots(), 0))
    source.bind(StraightOn())
    source.feedback(source.draw(1, Progress("updates", 1)), {"td_error": torch.ones(1)})
    assert config.unread() == unread
