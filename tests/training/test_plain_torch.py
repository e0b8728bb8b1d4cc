"""Parameter groups, averages and every schedule of a recipe pass the gate against a loop in plain torch."""

from pathlib import Path

import pytest
import tiny_learners
import torch
from torch.nn import functional

from runner.plugin.registry import Registry
from runner.proof import Exact, Outcome, Subject, verify
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.training.step import Step

UPDATES = 12
DECAY = 0.8
SETS = (
    f"train.updates={UPDATES}",
    f"train.ema={DECAY}",
    "train.evaluate_every=4",
    "optimizer={kind: adamw, lr: 0.01, weight_decay: 0.1, max_grad_norm: null, spare: [],"
    " groups: {head: {lr: 0.03, weight_decay: 0}}}",
)
KINDS = sorted(Registry().kinds("lr_scheduler"))


class Count:
    """The number of updates, as a part of the state."""

    def __init__(self, read, write):
        self.read, self.write = read, write

    def state_dict(self):
        return {"updates": self.read()}

    def load_state_dict(self, state):
        self.write(state["updates"])


def moments_of(optimizer, module):
    """Returns the state of an optimizer by the names of parameters."""
    return {name: dict(optimizer.state[value]) for name, value in module.named_parameters() if value in optimizer.state}


def load_moments(optimizer, module, moments):
    for name, value in module.named_parameters():
        if name in moments:
            optimizer.state[value] = {key: number.clone() for key, number in moments[name].items()}


def recipe_of(folder, kind):
    path = folder / "recipe.yaml"
    head = "name: tiny\nseed: 3\ndevice: cpu\ntracking: {system_metrics: false}\n"
    path.write_text(head + tiny_learners.RECIPES["images"])
    registry = Registry([Path(tiny_learners.__file__)])
    return load(path, [*SETS, f"lr_scheduler={{kind: {kind}, warmup: 0.25}}"], registry)


class FromRecipe:
    """The training of the recipe."""

    def __init__(self, recipe):
        self.pipeline = assemble(recipe, [Path(tiny_learners.__file__)])
        self.step = Step(self.pipeline)
        self.state = {
            "learner": self,
            "updates": Count(lambda: self.pipeline.progress.updates, self.set_updates),
        }

    def state_dict(self):
        learner = self.pipeline.learner
        (optimizer,) = [each for _, each in learner.optimizers()]
        averages = {name.removeprefix("model."): value for name, value in learner.averages.state_dict().items()}
        moments = moments_of(optimizer, learner.module)
        return {"model": learner.module.state_dict(), "moments": moments, "averages": averages}

    def load_state_dict(self, state):
        learner = self.pipeline.learner
        learner.module.load_state_dict(state["model"])
        (optimizer,) = [each for _, each in learner.optimizers()]
        load_moments(optimizer, learner.module, state["moments"])
        learner.averages.load_state_dict({f"model.{name}": value for name, value in state["averages"].items()})

    def set_updates(self, updates):
        self.pipeline.progress.updates = updates

    def update(self, drawn):
        output = self.step(drawn)
        return {"loss": output["loss"].sum / output["loss"].count}


class ByHand:
    """The same as a loop in plain torch."""

    def __init__(self, recipe, initial, wrong=None):
        self.model = tiny_learners.Convolutions()
        self.model.load_state_dict(initial)
        head = list(self.model.head.parameters())
        rest = [parameter for name, parameter in self.model.named_parameters() if not name.startswith("head")]
        self.optimizer = torch.optim.AdamW([{"params": rest}, {"params": head, "weight_decay": 0.0}], lr=0.01)
        for group in self.optimizer.param_groups[:1]:
            group["weight_decay"] = 0.1
        self.rates = (0.01, 0.03)
        self.averages = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.schedule = recipe.lr_scheduler
        self.updates = 0
        self.decay = DECAY if wrong != "decay" else DECAY + 0.01
        self.is_late = wrong == "late"
        self.state = {"learner": self, "updates": Count(lambda: self.updates, self.set_updates)}

    def set_updates(self, updates):
        self.updates = updates

    def state_dict(self):
        moments = moments_of(self.optimizer, self.model)
        return {"model": self.model.state_dict(), "moments": moments, "averages": dict(self.averages)}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        load_moments(self.optimizer, self.model, state["moments"])
        for name, value in state["averages"].items():
            self.averages[name].copy_(value)

    def update(self, drawn):
        factor = self.schedule.multiplier((self.updates + self.is_late) / UPDATES)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad()
        logits = self.model(drawn.batch["image"] + drawn.noise["blur"])
        loss = functional.cross_entropy(logits, drawn.batch["label"], reduction="sum") / len(logits)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                self.averages[name].lerp_(value, 1 - self.decay)
        self.updates += 1
        return {"loss": loss.detach()}


def subjects(folder, kind, wrong=None):
    """Returns both trainings and the batches."""
    recipe = recipe_of(folder, kind)
    first = FromRecipe(recipe)
    initial = {name: value.clone() for name, value in first.pipeline.learner.module.state_dict().items()}
    batches = [first.step.next() for _ in range(10)]

    def by_hand():
        training = ByHand(recipe, initial, wrong)
        return Subject(training.update, training.state)

    def from_recipe():
        training = FromRecipe(recipe)
        training.pipeline.learner.module.load_state_dict(initial)
        return Subject(training.update, training.state)

    return by_hand, from_recipe, batches


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_passes_as_exact_against_plain_torch(tmp_path, kind):
    by_hand, from_recipe, batches = subjects(tmp_path, kind)
    verdict = verify(by_hand, from_recipe, batches, Exact())
    assert verdict.outcome is Outcome.PASS, verdict


@pytest.mark.parametrize("wrong", ["decay", "late"])
def test_another_average_or_schedule_fails(tmp_path, wrong):
    by_hand, from_recipe, batches = subjects(tmp_path, "cosine", wrong)
    assert verify(by_hand, from_recipe, batches, Exact()).outcome is Outcome.FAIL
