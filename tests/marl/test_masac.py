import math

import pytest
import torch
from builders import build_masac, parameters, random_batch, train
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Progress, UsageError
from runner.plugins.marl.networks import Mlp, TwinCritic, squash


def size(module):
    return sum(p.numel() for p in module.parameters())


def test_networks_have_the_published_numbers_of_parameters():
    generator = torch.Generator()
    assert size(Mlp(7, [256, 256], 4, generator)) == 69_892
    assert size(TwinCritic(2 * (7 + 2), [256, 256], generator)) == 143_874


@given(st.integers(0, 10_000))
def test_the_log_probability_is_that_of_a_squashed_gaussian(seed):
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(6, 4, generator=generator, dtype=torch.float64).clamp(-2, 2)
    noise = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    action, log_prob = squash(head, noise)
    mean, log_std = head.chunk(2, -1)
    expected = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), torch.distributions.TanhTransform(cache_size=1)
    )
    unbounded = mean + log_std.exp() * noise
    assert torch.allclose(action, unbounded.tanh())
    jacobian = 2 * (math.log(2) - unbounded - torch.nn.functional.softplus(-2 * unbounded))
    assert torch.allclose(log_prob, (expected.base_dist.log_prob(unbounded) - jacobian).sum(-1))


def test_nothing_is_bootstrapped_through_the_end_of_an_episode():
    learner = build_masac()
    batch = random_batch(0)
    batch["terminated"].fill_(1.0)
    y = learner.targets(batch, learner.noise(batch, torch.Generator()))
    assert torch.equal(y, batch["reward"].T)


def test_targets_are_reward_and_discounted_soft_value():
    learner = build_masac()
    batch = random_batch(0)
    noise = learner.noise(batch, torch.Generator().manual_seed(0))
    actions, log_prob = learner.next_actions(batch, noise)
    joint = torch.cat([batch["next_observation"].flatten(1), actions.transpose(0, 1).flatten(1)], -1)
    for i, critic in enumerate(learner.target_critics):
        q = torch.minimum(*(m.head(m.trunk(joint))[:, 0] for m in (critic.q1, critic.q2)))
        value = q - learner.log_temperatures[i].exp() * log_prob[i]
        expected = batch["reward"][:, i] + learner.gamma * (1 - batch["terminated"]) * value
        assert torch.allclose(learner.targets(batch, noise)[i], expected)


@pytest.mark.parametrize(
    ("gamma", "factors"),
    [
        ([0.9], [0.9, 0.9, 0.9]),
        ([0.98, 0.5], [0.98, 0.5, 0.5]),
        ([1.0, 0.0, 0.25], [1.0, 0.0, 0.25]),
    ],
)
@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_agents_may_discount_differently(gamma, factors, order):
    learner = build_masac(gamma=gamma, update_order=order)
    batch = random_batch(0)
    noise = learner.noise(batch, torch.Generator().manual_seed(0))
    for agent, factor in enumerate(factors):
        alone = build_masac(gamma=factor, update_order=order)
        agents = slice(agent, agent + 1)
        assert torch.allclose(learner.target(batch, noise, agents), alone.target(batch, noise, agents))


def test_more_discount_factors_than_agents_are_refused():
    with pytest.raises(UsageError, match=r"model\.gamma: 4 discount factors exceed the 3 agents of the data"):
        build_masac(gamma=[0.9, 0.9, 0.9, 0.9])


def test_an_actor_loss_reaches_its_own_actor_only():
    learner = build_masac()
    batch = random_batch(0)
    loss, _ = learner.actor_loss(batch, learner.noise(batch, torch.Generator()), slice(1, 2))
    loss.sum().backward()
    touched = {name.split(".")[1] for name, g in learner.gradients().items() if g is not None and "actors" in name}
    assert touched == {"1"}


def test_weights_scale_the_critic_loss():
    learner = build_masac()
    batch = random_batch(0)
    y = torch.zeros(3, 32)
    loss, td_error = learner.critic_loss(batch, y, slice(None))
    batch["weight"] = batch["weight"] * 2
    doubled, same = learner.critic_loss(batch, y, slice(None))
    assert torch.allclose(doubled, 2 * loss)
    assert torch.equal(td_error, same)


def test_the_sequential_order_differs_unless_there_is_one_agent():
    for agents in (1, 3):
        first, second = build_masac(agents=agents), build_masac(agents=agents, update_order="sequential")
        train(first, 3, agents)
        train(second, 3, agents)
        one, other = parameters(first), parameters(second)
        assert all(torch.equal(one[name], other[name]) for name in one) == (agents == 1)


def test_relabelled_agents_learn_the_same_in_the_simultaneous_order():
    torch.set_default_dtype(torch.float64)
    try:
        first, second = build_masac(), build_masac()
        order = [2, 0, 1]
        permute_critic_inputs(first, second, order)
        batch = random_batch(0)
        noise = first.noise(batch, torch.Generator().manual_seed(0))
        relabelled = {name: tensor[:, order] if tensor.dim() > 1 else tensor for name, tensor in batch.items()}
        one = first.update(batch, noise, Progress("updates", 1))
        reordered = {name: tensor[order] for name, tensor in noise.items()}
        other = second.update(relabelled, reordered, Progress("updates", 1))
    finally:
        torch.set_default_dtype(torch.float32)
    for name in one:
        assert torch.allclose(one[name], other[name], atol=1e-9)


def permute_critic_inputs(first, second, order):
    """Makes ``second`` the same learner with its agents in another order."""
    agents, action, observation = first.agents, first.action, 5
    columns = [i * observation + k for i in order for k in range(observation)]
    columns += [agents * observation + i * action + k for i in order for k in range(action)]
    for new, old in enumerate(order):
        second.model["actors"][new].load_state_dict(first.model["actors"][old].state_dict())
        for mine, theirs in (
            (second.model["critics"], first.model["critics"]),
            (second.target_critics, first.target_critics),
        ):
            state = theirs[old].state_dict()
            for head in ("q1", "q2"):
                state[f"{head}.trunk.0.weight"] = state[f"{head}.trunk.0.weight"][:, columns]
            mine[new].load_state_dict(state)


def test_acting_depends_on_the_generator_alone():
    learner = build_masac()
    seen = torch.rand(4, 3, 5)
    first = learner.act(seen, torch.Generator().manual_seed(3))
    assert torch.equal(first, learner.act(seen, torch.Generator().manual_seed(3)))
    assert not torch.equal(first, learner.act(seen, torch.Generator().manual_seed(4)))
    assert torch.equal(learner.predict(seen), learner.predict(seen))
    assert first.shape == (4, 3, 2)
    assert first.abs().max() <= 1


@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_targets_follow_by_polyak_averaging(order):
    learner = build_masac(update_order=order, tau=0.25)
    before = [p.clone() for p in learner.target_critics.parameters()]
    train(learner, 1)
    for old, target, online in zip(
        before, learner.target_critics.parameters(), learner.model["critics"].parameters(), strict=True
    ):
        assert torch.allclose(target, 0.75 * old + 0.25 * online, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.05, 3.0])
def test_temperatures_begin_where_the_recipe_has_them(temperature):
    learner = build_masac(initial_temperature=temperature)
    assert [float(value.detach().exp()) for value in learner.log_temperatures] == pytest.approx([temperature] * 3)
