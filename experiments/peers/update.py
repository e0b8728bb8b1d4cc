"""One update of multi-agent SAC: ours without and with its stages, and TorchRL's ``SACLoss`` with the same shapes."""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from session import keep, take_turns
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import MultiAgentMLP, NormalParamExtractor, ProbabilisticActor, TanhNormal
from torchrl.objectives import SACLoss, SoftUpdate, ValueEstimators

from runner.ablation.variant_process import Measured
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble

BATCH, WIDTH, OBSERVATION, ACTION = 128, 256, 7, 2
POOL = 8
OURS = {
    "baseline": "marl_baseline",
    "all stages, float32": "marl_phase3 optimization.amp=off",
    "all stages, bf16": "marl_phase3",
}


def ours(agents: int, recipe: str) -> Callable[[], object]:
    """An update of a recipe that ships."""
    name, *sets = recipe.split()
    shape = (f"data.followers={agents - 1}", f"model.hidden={[WIDTH, WIDTH]}")
    settings = [*shape, "data.replay.capacity=20_000", "device=cpu", *sets]
    measured = Measured(assemble(load(name, settings, Registry()), []))
    pool, turn = measured.pool(), iter(range(10**9))
    return lambda: measured.step.update(pool[next(turn) % len(pool)])


class JointInput(nn.Module):
    """Observation and action of every agent side by side."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.network(torch.cat([observation, action], dim=-1))


def torchrl(agents: int, normalised: bool) -> Callable[[], object]:
    """TorchRL's loss over networks that are not shared, its target updater, and Adam's fused kernel."""
    norm = {"norm_class": nn.LayerNorm, "norm_kwargs": {"normalized_shape": WIDTH}} if normalised else {}
    layers = {"n_agents": agents, "share_params": False, "depth": 2, "num_cells": WIDTH, "activation_class": nn.ReLU}
    policy = MultiAgentMLP(OBSERVATION, 2 * ACTION, centralised=False, **layers, **norm)
    actor = ProbabilisticActor(
        TensorDictSequential(
            TensorDictModule(policy, [("agents", "observation")], [("agents", "logits")]),
            TensorDictModule(NormalParamExtractor(), [("agents", "logits")], [("agents", "loc"), ("agents", "scale")]),
        ),
        in_keys=[("agents", "loc"), ("agents", "scale")],
        out_keys=[("agents", "action")],
        distribution_class=TanhNormal,
        return_log_prob=True,
        log_prob_key=("agents", "log_prob"),
    )
    critic = TensorDictModule(
        JointInput(MultiAgentMLP(OBSERVATION + ACTION, 1, centralised=True, **layers, **norm)),
        [("agents", "observation"), ("agents", "action")],
        [("agents", "state_action_value")],
    )
    loss = SACLoss(actor, critic, num_qvalue_nets=2, loss_function="l2", target_entropy=-float(ACTION))
    loss.set_keys(
        state_action_value=("agents", "state_action_value"),
        action=("agents", "action"),
        reward=("agents", "reward"),
        priority=("agents", "td_error"),
        done=("agents", "done"),
        terminated=("agents", "terminated"),
        log_prob=("agents", "log_prob"),
    )
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.99)
    targets = SoftUpdate(loss, tau=0.01)
    actor_parameters = list(loss.actor_network_params.flatten_keys().values())
    critic_parameters = list(loss.qvalue_network_params.flatten_keys().values())
    optimizer = torch.optim.Adam(
        [
            {"params": actor_parameters, "lr": 1e-3},
            {"params": critic_parameters, "lr": 3e-3},
            {"params": [loss.log_alpha], "lr": 3e-4},
        ],
        fused=True,
    )
    pool, turn = [transitions(agents) for _ in range(POOL)], iter(range(10**9))

    def update() -> None:
        values = loss(pool[next(turn) % POOL].clone(recurse=False))
        optimizer.zero_grad()
        (values["loss_actor"] + values["loss_qvalue"] + values["loss_alpha"]).backward()
        nn.utils.clip_grad_norm_(critic_parameters, 5.0)
        nn.utils.clip_grad_norm_(actor_parameters, 5.0)
        optimizer.step()
        targets.step()

    return update


def transitions(agents: int) -> TensorDict:
    """A batch of random transitions."""
    shape = (BATCH, agents)
    following = {
        "observation": torch.randn(*shape, OBSERVATION),
        "reward": torch.randn(*shape, 1),
        "done": torch.zeros(*shape, 1, dtype=torch.bool),
        "terminated": torch.zeros(*shape, 1, dtype=torch.bool),
    }
    now = {"observation": torch.randn(*shape, OBSERVATION), "action": torch.rand(*shape, ACTION) * 1.8 - 0.9}
    nested = {
        "agents": TensorDict(now, batch_size=shape),
        "next": TensorDict({"agents": TensorDict(following, batch_size=shape)}, batch_size=[BATCH]),
    }
    return TensorDict(nested, batch_size=[BATCH])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    figures = {}
    for agents in arguments.agents:
        builds = {name: partial(ours, agents, recipe) for name, recipe in OURS.items()}
        builds["TorchRL, the same layers"] = partial(torchrl, agents, normalised=True)
        builds["TorchRL, no layer norm"] = partial(torchrl, agents, normalised=False)
        figures[f"{agents} agents"] = take_turns(builds, "TorchRL, the same layers", arguments.rounds, 0.25)
        print(f"{agents} agents, batch {BATCH}")
        for name, each in figures[f"{agents} agents"].items():
            low, high = each["ci95"]
            print(f"  {name:26} {each['ms']:7.2f} ms   {each['ratio']:.2f} [{low:.2f}, {high:.2f}]", flush=True)
    keep("update", f"python experiments/peers/update.py --rounds {arguments.rounds}", figures)


if __name__ == "__main__":
    main()
