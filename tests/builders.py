"""Small learners and batches for tests."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runner.api import Batch, Context, LearnerConfig, Progress, Slots, Source, Stage, StageConfig
from runner.plugin.implementation import implementation_of
from runner.plugin.optimizer import OptimizerSettings
from runner.plugin.registry import Registry
from runner.plugins.marl.config import MasacConfig
from runner.plugins.marl.masac import Masac
from runner.recipe.optimizers import optimizers
from runner.recipe.yaml_nodes import parse

OBSERVATION, ACTION = 5, 2


class Holder:
    """What a stage is attached to, without a loop around it."""

    def __init__(self, learner: Any, batch_size: int, source: Source | None = None) -> None:
        self.learner, self.slots, self.device, self.batch_size = learner, learner.slots, learner.device, batch_size
        self.source = source
        self.shapes_vary = False
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def optimizers_of(config: LearnerConfig, section: Mapping[str, Any] | None = None) -> dict[str, OptimizerSettings]:
    """The optimizers of a learner's roles, as a recipe with that section ``optimizer`` would have them."""
    problems: list[Any] = []
    found = optimizers(parse(json.dumps({"optimizer": section or {}}), "test", problems), config, Registry(), problems)
    assert not problems, problems
    return found


def works(stage: StageConfig | Stage) -> Stage:
    """What a stage's settings stand for."""
    return implementation_of(type(stage))(stage) if isinstance(stage, StageConfig) else stage


def build_masac(
    stages: Sequence[StageConfig | Stage] = (),
    agents: int = 3,
    device: str = "cpu",
    seed: int = 1,
    optimizer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Masac:
    """MASAC with these stages attached and optimizers made; ``optimizer`` is a recipe's section."""
    config = MasacConfig(**{"hidden": [16, 24], **settings})
    context = Context(torch.device(device), Slots(), seed, optimizers=optimizers_of(config, optimizer))
    learner = Masac(config, {"observation": (agents, OBSERVATION), "action": (agents, ACTION)}, context)
    context.slots.define(update=learner.update)
    for stage in stages:
        works(stage).attach(Holder(learner, 8))
    learner.configure_optimizers()
    return learner


def random_batch(seed: int, agents: int = 3, size: int = 32, device: str = "cpu") -> Batch:
    """Transitions of the default float type with rewards of some tens and a few terminal ones."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    batch = {
        "observation": uniform(size, agents, OBSERVATION),
        "action": uniform(size, agents, ACTION) * 2 - 1,
        "reward": -30 * uniform(size, agents),
        "next_observation": uniform(size, agents, OBSERVATION),
        "terminated": (uniform(size) < 0.1).to(torch.get_default_dtype()),
        "weight": uniform(size),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def train(learner: Masac, updates: int, agents: int = 3, seed: int = 0) -> list[Batch]:
    """Updates on given batches and noise; returns what every update returned."""
    device = str(learner.device)
    generator = torch.Generator(device).manual_seed(seed)
    progress, outputs = Progress("updates", updates), []
    for i in range(updates):
        batch = random_batch(seed + i, agents, device=device)
        outputs.append(learner.slots.update(batch, learner.noise(batch, generator), progress))
        progress.advance({"updates": 1})
    return outputs


def parameters(learner: Masac) -> dict[str, torch.Tensor]:
    """Parameters and target parameters by name."""
    targets = {f"target.{name}": value for name, value in learner.target_critics.named_parameters()}
    return {name: value.detach().clone() for name, value in [*learner.named_parameters(), *targets.items()]}


def moments(learner: Masac) -> dict[str, torch.Tensor]:
    """Adam's moments by role, network, layer and name, whatever the layout of the optimizers."""
    found = {}
    for role, networks in learner.networks().items():
        agents = learner.roles[role].state_dict()["optimizers"]
        each = len(networks) // len(agents)
        for m, network in enumerate(networks):
            for k in range(len(network)):
                state = agents[m // each]["state"][m % each * len(network) + k]
                found |= {f"{role}.{m}.{k}.{name}": state[name] for name in ("exp_avg", "exp_avg_sq")}
    return found


def copy_state(source: Masac, target: Masac) -> None:
    """Puts parameters, moments and step counts of one learner into another, also of another type or layout."""
    with torch.no_grad():
        for wanted, value in zip(parameters_in_place(target), parameters_in_place(source), strict=True):
            wanted.copy_(value)
        for name, value in moments(target).items():
            value.copy_(moments(source)[name])
        steps = next(iter(source.roles["critic"].optimizers[0].state.values()))["step"]
        for role in target.roles.values():
            for optimizer in role.optimizers:
                for state in optimizer.state.values():
                    state["step"].copy_(steps)


def parameters_in_place(learner: Masac) -> list[torch.Tensor]:
    """The very tensors, in one order for every layout."""
    return [*dict(learner.named_parameters()).values(), *learner.target_critics.parameters()]
