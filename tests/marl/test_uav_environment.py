"""The batched UAV environment against a plain reference, and its rules."""

import math

import pytest
import torch
import uav_reference as reference
from hypothesis import given
from hypothesis import strategies as st

from runner.plugins.marl.uav.config import RewardConfig, UavConfig
from runner.plugins.marl.uav.environment import UavEnvironment

CPU = torch.device("cpu")


def make(envs=16, seed=0, **settings):
    return UavEnvironment(UavConfig(**settings), envs, CPU, torch.Generator().manual_seed(seed))


def random_state(envs, followers, seed):
    """Scenes with agents close together and close to everything that matters, as often as far away."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return torch.rand(envs, *shape, generator=generator) * (high - low) + low

    scene = torch.stack([torch.full((envs,), 350.0), uniform(400, 450), uniform(300, 500), uniform(150, 200)], 1)
    places = torch.stack([scene[:, :2], scene[:, 2:], uniform(50, 750, 2), torch.full((envs, 2), 75.0)])
    place = places[torch.randint(4, (envs,), generator=generator), torch.arange(envs)]
    position = place.unsqueeze(1) + uniform(-60, 60, 1 + followers, 2)
    position = torch.stack([position[..., 0].clamp(50, 750), position[..., 1].clamp(50, 650)], -1)
    leader = torch.stack([uniform(10, 20), uniform(0, 2 * math.pi)], -1).unsqueeze(1)
    follower = torch.stack([uniform(10, 40, followers), uniform(0, 2 * math.pi, followers)], -1)
    close = uniform(0, 1, followers) < 0.5
    follower[..., 0] = torch.where(
        close, (leader[..., 0] + uniform(-1.5, 1.5, followers)).clamp(10, 40), follower[..., 0]
    )
    bodies = torch.cat([position, torch.cat([leader, follower], 1)], -1)
    action = uniform(-1, 1, 1 + followers, 2)
    return {"bodies": bodies, "scene": scene, "sums": torch.zeros(envs, 4)}, action


def check_against_reference(state, action, step, coefficients, legacy=False):
    compared = 0
    for env in range(len(action)):
        before, scene = state["bodies"][env].tolist(), state["scene"][env].tolist()
        judged = before if legacy else reference.move(before, action[env].tolist())
        if reference.near_threshold(judged, scene):
            continue
        compared += 1
        expected, success, collision = reference.reward(judged, scene, coefficients)
        assert step.reward[env].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert bool(step.terminated[env]) == (success or collision)
        assert bool(step.episodes[env, 1]) == success
        assert bool(step.episodes[env, 2]) == collision
        seen = torch.tensor(reference.observe(judged, scene))
        torch.testing.assert_close(step.next_observation[env], seen, rtol=1e-5, atol=1e-5)
    return compared


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("preset", ["seed", "v0_1", "v0_2"])
@given(seed=st.integers(0, 2**31), followers=st.integers(1, 6))
def test_a_step_agrees_with_the_scalar_reference(preset, legacy, seed, followers):
    state, action = random_state(32, followers, seed)
    environment = make(32, followers=followers, reward=RewardConfig(preset=preset), legacy_timing=legacy)
    environment.load_state_dict(state)
    step = environment.step(action)
    compared = check_against_reference(state, action, step, reference.COEFFICIENTS[preset], legacy)
    assert compared > 16


@pytest.mark.parametrize("term", list(reference.COEFFICIENTS["v0_2"]))
def test_every_term_of_the_reward_alone_agrees_with_the_reference(term):
    alone = dict.fromkeys(reference.COEFFICIENTS["v0_2"], 0.0) | {term: 3.0}
    state, action = random_state(512, 3, seed=7)
    environment = make(512, reward=RewardConfig(**alone))
    environment.load_state_dict(state)
    step = environment.step(action)
    check_against_reference(state, action, step, alone)
    assert step.reward.count_nonzero() > 0


def test_a_coefficient_overrides_its_preset_only():
    state, action = random_state(64, 2, seed=3)
    overridden = make(64, followers=2, reward=RewardConfig(preset="seed", step=-0.5))
    plain = make(64, followers=2, reward=RewardConfig(preset="seed"))
    for environment in (overridden, plain):
        environment.load_state_dict(state)
    torch.testing.assert_close(overridden.step(action).reward, plain.step(action).reward - 0.5)


def test_whole_trajectories_agree_with_the_reference():
    environment = make(8, seed=5, followers=2, episode_limit=60)
    coefficients = reference.COEFFICIENTS["v0_2"]
    generator = torch.Generator().manual_seed(1)
    compared = 0
    for _ in range(60):
        state = environment.state_dict()
        action = torch.rand(8, 3, 2, generator=generator) * 2 - 1
        compared += check_against_reference(state, action, environment.step(action), coefficients)
    assert compared > 400


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1.0, 100.0]))
def test_positions_speeds_and_headings_stay_within_their_limits(seed, scale):
    state, action = random_state(64, 3, seed)
    environment = make(64)
    environment.load_state_dict(state)
    for _ in range(5):
        environment.step(action * scale)
        x, y, speed, heading = environment.state_dict()["bodies"].unbind(-1)
        assert x.min() >= 50
        assert x.max() <= 750
        assert y.min() >= 50
        assert y.max() <= 650
        assert speed.min() >= 10
        assert speed[:, 0].max() <= 20
        assert speed[:, 1:].max() <= 40
        assert heading.min() >= 0
        assert heading.max() <= torch.tensor(2 * math.pi)


def test_episodes_start_where_they_should_and_differ():
    environment = make(2000, seed=1)
    observation = environment.reset()
    state = environment.state_dict()
    low = torch.tensor([[300, 500, 10, 0.0], *[[400, 500, 20, 0.0]] * 3])
    high = torch.tensor([[400, 550, 20, 2 * math.pi], *[[500, 550, 30, 2 * math.pi]] * 3])
    bodies, scene = state["bodies"], state["scene"]
    assert torch.all((bodies >= low) & (bodies <= high))
    middle = (low + high) / 2
    torch.testing.assert_close(bodies.mean(0), middle, rtol=0.02, atol=0.2)
    scene_low, scene_high = torch.tensor([350.0, 400, 300, 150]), torch.tensor([350.0, 450, 500, 200])
    assert torch.all((scene >= scene_low) & (scene <= scene_high))
    assert len(scene[:, 2].unique()) > 1900
    expected = torch.tensor([reference.observe(b.tolist(), s.tolist()) for b, s in zip(bodies, scene, strict=True)])
    torch.testing.assert_close(observation, expected, rtol=1e-5, atol=1e-6)


def test_the_limit_truncates_and_never_terminates():
    environment = make(64, episode_limit=7)
    straight = torch.zeros(64, 4, 2)
    for steps in range(1, 15):
        step = environment.step(straight)
        assert not torch.any(step.terminated & step.truncated)
        ended = step.terminated | step.truncated
        assert torch.equal(step.episodes[:, 0], ended.float())
        assert torch.equal(step.episodes[:, 3], step.truncated.float())
        if steps < 7:
            assert not step.truncated.any()
        if steps == 7:
            assert step.truncated.any()


def test_an_ended_episode_keeps_its_true_last_observation_and_starts_anew():
    environment = make(32, episode_limit=3)
    action = torch.zeros(32, 4, 2)
    for _ in range(2):
        assert not environment.step(action).truncated.any()
    before = environment.state_dict()
    step = environment.step(action)
    ended = step.terminated | step.truncated
    assert ended.all()
    state = environment.state_dict()
    for env in range(32):
        moved = reference.move(before["bodies"][env].tolist(), action[env].tolist())
        last = torch.tensor(reference.observe(moved, before["scene"][env].tolist()))
        torch.testing.assert_close(step.next_observation[env], last, rtol=1e-5, atol=1e-5)
        fresh = torch.tensor(reference.observe(state["bodies"][env].tolist(), state["scene"][env].tolist()))
        torch.testing.assert_close(step.observation[env], fresh, rtol=1e-5, atol=1e-5)
    assert not state["sums"].any()
    assert not torch.equal(before["scene"], state["scene"])


def test_an_episode_that_goes_on_is_observed_once():
    environment = make(16)
    step = environment.step(torch.zeros(16, 4, 2))
    assert not step.terminated.any()
    assert torch.equal(step.observation, step.next_observation)


def test_the_same_seed_gives_the_same_episodes_and_another_seed_others():
    runs = []
    for seed in (4, 4, 5):
        environment = make(8, seed, episode_limit=10)
        actions = torch.rand(25, 8, 4, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
        runs.append(torch.stack([environment.step(action).observation for action in actions]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@given(seed=st.integers(0, 2**31), legacy=st.booleans())
def test_a_batch_is_the_same_as_many_single_simulations(seed, legacy):
    state, action = random_state(9, 3, seed)
    batch = make(9, legacy_timing=legacy)
    batch.load_state_dict(state)
    together = batch.step(action)
    for env in range(9):
        single = make(1, legacy_timing=legacy)
        single.load_state_dict({name: value[env : env + 1] for name, value in state.items()})
        alone = single.step(action[env : env + 1])
        for name in ("next_observation", "reward", "terminated", "truncated", "episodes"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(together, name)[env], rtol=1e-6, atol=1e-6)


def test_metrics_of_an_episode_are_counted_as_documented():
    environment = make(64, seed=2, followers=2, episode_limit=40)
    generator = torch.Generator().manual_seed(3)
    returned, formed, strict, length = (torch.zeros(64) for _ in range(4))
    seen = 0
    for _ in range(120):
        step = environment.step(torch.rand(64, 3, 2, generator=generator) * 2 - 1)
        position = step.next_observation[..., :2] * 1000
        near = torch.linalg.vector_norm(position[:, 1:] - position[:, :1], dim=-1) < 50
        returned += step.reward[:, 0]
        formed += near.float().mean(1)
        strict += near.all(1)
        length += 1
        ended = step.terminated | step.truncated
        for env in ended.nonzero()[:, 0].tolist():
            success = step.episodes[env, 1]
            expected = torch.stack(
                [success * length[env], returned[env], formed[env] / length[env], strict[env] / length[env]]
            )
            torch.testing.assert_close(step.episodes[env, 4:], expected, rtol=1e-4, atol=1e-2)
            seen += 1
        for counter in (returned, formed, strict, length):
            counter[ended] = 0
    assert seen > 100


def test_the_summary_averages_over_episodes():
    environment = make(1, episode_limit=77)
    summary = environment.summarise([4.0, 3.0, 1.0, 0.0, 60.0, 400.0, 2.0, 1.0])
    assert summary == {
        "success_rate": 0.75,
        "collision_rate": 0.25,
        "timeout_rate": 0.0,
        "steps_to_goal": 20.0,
        "return": 100.0,
        "formation_rate": 0.5,
        "formation_strict": 0.25,
    }
    assert environment.summarise([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])["steps_to_goal"] == 77


def test_legacy_timing_shows_the_state_before_the_action():
    environment = make(8, legacy_timing=True)
    first = environment.reset()
    action = torch.ones(8, 4, 2)
    assert torch.equal(environment.step(action).next_observation, first)
    assert not torch.equal(environment.step(action).next_observation, first)


def test_the_state_is_all_that_decides_what_follows():
    environment = make(8, seed=1, episode_limit=5)
    action = torch.full((8, 4, 2), 0.3)
    for _ in range(3):
        environment.step(action)
    state, numbers = environment.state_dict(), environment._generator.get_state()
    rest = [environment.step(action) for _ in range(10)]
    other = make(8, seed=9, episode_limit=5)
    other.load_state_dict(state)
    other._generator.set_state(numbers)
    for step in rest:
        again = other.step(action)
        assert torch.equal(step.observation, again.observation)
        assert torch.equal(step.episodes, again.episodes)
