"""Several and moving obstacles of the UAV environment."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runner.plugins.marl.uav.config import ObstaclesConfig, UavConfig
from runner.plugins.marl.uav.environment import UavEnvironment
from runner.plugins.marl.uav.obstacles import REGION, Obstacles

CPU = torch.device("cpu")
LOW, HIGH = torch.tensor(REGION)
MOVING = {"count": 5, "speed": 12.0, "turn": 0.2}
settings_of_obstacles = st.fixed_dictionaries(
    {
        "count": st.integers(1, 16),
        "speed": st.sampled_from([0.0, 0.5, 10.0, 40.0]),
        "turn": st.sampled_from([0.0, 0.3, 1.0]),
        "observed": st.integers(1, 5),
    }
).filter(lambda settings: settings["count"] > 1 or settings["speed"])


def make(envs=16, seed=0, obstacles=MOVING, **settings):
    config = UavConfig(obstacles=ObstaclesConfig(**obstacles), **settings)
    return UavEnvironment(config, envs, CPU, torch.Generator().manual_seed(seed))


def actions(steps, envs=16, agents=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(steps, envs, agents, 2, generator=generator) * 2 - 1


def same_steps(left, right, states=True):
    for name in ("observation", "next_observation", "reward", "terminated", "truncated", "episodes"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name


@pytest.mark.parametrize("legacy", [False, True])
def test_an_explicit_single_obstacle_that_does_not_move_is_the_default(legacy):
    explicit = make(seed=3, obstacles={"count": 1, "speed": 0}, legacy_timing=legacy, episode_limit=9)
    config = UavConfig(legacy_timing=legacy, episode_limit=9)
    default = UavEnvironment(config, 16, CPU, torch.Generator().manual_seed(3))
    for environment in (explicit, default):
        environment.repeat_failures(0.5)
    assert explicit.observation_size == default.observation_size == 7
    for action in actions(30):
        same_steps(explicit.step(action), default.step(action))
    state = explicit.state_dict()
    assert state.keys() == default.state_dict().keys() == {"bodies", "scene", "sums", "failed_starts"}
    assert state["failed_starts"]["stored"].shape == (65, 5, 4)


@given(settings=settings_of_obstacles, seed=st.integers(0, 2**31))
def test_obstacles_stay_in_their_region_with_constant_speed(settings, seed):
    generator = torch.Generator().manual_seed(seed)
    obstacles = Obstacles(ObstaclesConfig(**settings), (0.001, 0.03), CPU, generator)
    rows = obstacles.start(torch.rand(6, settings["count"], 4, generator=generator))
    for _ in range(25):
        position, velocity = rows.split(2, -1)
        assert torch.all((position >= LOW) & (position <= HIGH))
        speed = torch.linalg.vector_norm(velocity, dim=-1)
        torch.testing.assert_close(speed, torch.full_like(speed, settings["speed"]), rtol=1e-5, atol=1e-5)
        moved = obstacles.move(rows)
        step = (moved[..., :2] - position).abs()
        is_straight = moved[..., 2:] == velocity
        if not settings["turn"]:
            torch.testing.assert_close(moved[..., 2:].abs(), velocity.abs(), rtol=0, atol=0)
            torch.testing.assert_close(step[is_straight], velocity.abs()[is_straight], rtol=1e-3, atol=1e-3)
        rows = moved


@pytest.mark.parametrize("turn", [0.0, 0.1, 1.0])
def test_the_share_of_turns_is_the_configured_one(turn):
    config = ObstaclesConfig(count=16, speed=1.0, turn=turn)
    obstacles = Obstacles(config, (0.001, 0.03), CPU, torch.Generator().manual_seed(0))
    middle = (LOW + HIGH) / 2
    rows = torch.cat([middle.expand(500, 16, 2), torch.ones(500, 16, 2)], -1)
    moved = obstacles.move(rows)
    turned = (moved[..., 2:] != rows[..., 2:]).any(-1).float().mean()
    assert float(turned) == pytest.approx(turn, abs=0.01)
    if turn == 1:
        # Directions are uniformly distributed.
        assert moved[..., 2:].mean((0, 1)).abs().max() < 0.03


def test_an_obstacle_at_the_border_is_reflected():
    config = ObstaclesConfig(count=4, speed=10.0)
    obstacles = Obstacles(config, (0.001, 0.03), CPU, torch.Generator())
    rows = torch.tensor([[54.0, 300, -10, 0], [748, 300, 6, 8], [300, 242, 0, -10], [747, 455, 6, 8]])
    expected = torch.tensor([[56.0, 300, 10, 0], [746, 308, -6, 8], [300, 248, 0, 10], [747, 457, -6, -8]])
    torch.testing.assert_close(obstacles.move(rows[None])[0], expected)


@given(settings=settings_of_obstacles, seed=st.integers(0, 2**31))
def test_starts_and_goals_are_at_least_forty_away(settings, seed):
    environment = make(64, seed, settings)
    state = environment.state_dict()
    places = torch.cat([state["bodies"][..., :2], state["scene"][:, None, 2:]], 1)
    distance = torch.cdist(places, state["obstacles"][..., :2])
    assert distance.min() >= 40 - 1e-3
    assert len(state["obstacles"][..., 0].unique()) > 50


@given(settings=settings_of_obstacles, seed=st.integers(0, 2**31), legacy=st.booleans())
def test_a_collision_is_a_distance_below_the_radius_after_the_step(settings, seed, legacy):
    environment = make(64, seed, settings, legacy_timing=legacy)
    state = environment.state_dict()
    # Leaders start around an obstacle.
    generator = torch.Generator().manual_seed(seed)
    offset = torch.rand(64, 2, generator=generator) * 120 - 60
    bodies = state["bodies"].clone()
    bodies[:, 0, :2] = state["obstacles"][:, 0, :2] + offset
    environment.load_state_dict({**state, "bodies": bodies})
    step = environment.step(actions(1, 64, seed=seed)[0])

    after = environment.state_dict()
    leader = step.next_observation[:, 0, :2] * 1000
    obstacles = state["obstacles"] if legacy else after["obstacles"]
    running = ~(step.terminated | step.truncated)
    distance = torch.cdist(leader[:, None], environment.obstacle_positions)[:, 0].amin(1)
    certain = (distance - 20).abs() > 1e-2
    assert torch.equal(step.episodes[certain, 2] > 0, distance[certain] < 20)
    assert torch.equal(environment.obstacle_positions[running], obstacles[running][..., :2])
    assert torch.equal(step.next_observation[:, 0, 6] > 0, distance < 40) or not certain.all()


@given(settings=settings_of_obstacles, followers=st.integers(1, 4))
def test_agents_observe_their_nearest_obstacles(settings, followers):
    environment = make(8, 1, settings, followers=followers)
    observed = min(settings["count"], settings["observed"])
    config = UavConfig(followers=followers, obstacles=ObstaclesConfig(**settings))
    assert environment.observation_size == config.observation_size == 7 + 4 * observed
    outline = config.outline(5).batch
    assert outline["observation"].shape == (5, 1 + followers, 7 + 4 * observed)
    step = environment.step(actions(1, 8, 1 + followers)[0])
    state = environment.state_dict()
    for env in range(8):
        for agent in range(1 + followers):
            x, y = state["bodies"][env, agent, :2].tolist()
            rows = [(px - x, py - y, vx, vy) for px, py, vx, vy in state["obstacles"][env].tolist()]
            rows.sort(key=lambda row: math.hypot(row[0], row[1]))
            expected = [[dx / 1000, dy / 1000, vx / 30, vy / 30] for dx, dy, vx, vy in rows[:observed]]
            seen = step.observation[env, agent, 7:].view(observed, 4)
            torch.testing.assert_close(seen, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_the_seed_decides_every_motion():
    runs = []
    for seed in (4, 4, 5):
        environment = make(seed=seed, episode_limit=10)
        runs.append(torch.stack([environment.step(action).observation for action in actions(25)]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@given(seed=st.integers(0, 2**31))
def test_a_batch_is_the_same_as_single_simulations(seed):
    batch = make(6, seed, {"count": 3, "speed": 9.0})
    state = batch.state_dict()
    action = actions(1, 6, seed=seed)[0]
    together = batch.step(action)
    for env in range(6):
        single = make(1, obstacles={"count": 3, "speed": 9.0})
        single.load_state_dict({name: value[env : env + 1] for name, value in state.items()})
        alone = single.step(action[env : env + 1])
        for name in ("next_observation", "reward", "terminated", "truncated", "episodes"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(together, name)[env], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("obstacles", [MOVING, {"count": 2}, {"speed": 20.0, "turn": 1.0}])
def test_flights_continue_from_a_state_bit_for_bit(obstacles, share):
    environments = [make(seed=seed, obstacles=obstacles, episode_limit=8) for seed in (1, 2)]
    for environment in environments:
        if share:
            environment.repeat_failures(share)
    environment, resumed = environments
    for action in actions(19):
        environment.step(action)
    resumed.load_state_dict(environment.state_dict())
    resumed._generator.set_state(environment._generator.get_state())
    for action in actions(30, seed=1):
        same_steps(environment.step(action), resumed.step(action))


def test_repeated_starts_have_their_obstacles():
    environment = make(8, obstacles={"count": 3}, episode_limit=4)
    environment.repeat_failures(1.0)
    first = environment.state_dict()
    # The second flights begin while the first ones are being stored; the third ones repeat them.
    for action in actions(8, 8):
        environment.step(action)
    third = environment.state_dict()
    for env in range(8):
        origin = (first["bodies"] == third["bodies"][env]).all((1, 2)).nonzero()
        assert len(origin) == 1
        assert torch.equal(first["obstacles"][origin[0, 0]], third["obstacles"][env])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"count": 0}, "count"),
        ({"count": 17}, "less than or equal to 16"),
        ({"speed": -1.0}, "greater than or equal to 0"),
        ({"speed": 41.0}, "less than or equal to 40"),
        ({"turn": 1.5}, "less than or equal to 1"),
        ({"observed": 0}, "observed"),
    ],
)
def test_impossible_obstacles_are_refused(settings, error):
    with pytest.raises(ValidationError, match=error):
        ObstaclesConfig(**settings)
