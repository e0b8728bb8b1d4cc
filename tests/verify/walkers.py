"""A simulator that uses nothing of the shipped ones, and a stage that changes how it behaves."""

from typing import ClassVar

import torch
from torch import nn

from runner.api import (
    Close,
    Exact,
    GradientLearner,
    GradientLearnerConfig,
    Loss,
    Objective,
    Ring,
    Source,
    SourceConfig,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
)


class WalkersConfig(SourceConfig):
    """Walkers on a line rest once they have reached one; an episode fails when one of them reaches minus one."""

    kind: ClassVar[str] = "walkers"
    implementation = "Walkers"
    provides: ClassVar[str] = "walks"
    objective: ClassVar[Objective | None] = Objective("reached", "maximize")

    envs: int = 4
    walkers: int = 2
    limit: int = 9
    capacity: int = 40

    def other_sizes(self, batch_size):
        yield {"envs": 3, "walkers": self.walkers + 1, "capacity": batch_size + 1, "limit": 7}
        yield {"envs": 1, "walkers": 1, "capacity": batch_size}


class Walkers(Source):
    """Stores steps in a ring buffer and samples from it."""

    def __init__(self, config, context):
        self.config, self.generator = config, context.generator("walkers", "cpu")
        count = (config.walkers,)
        self.shapes = {"place": count, "action": count, "reward": count, "following": count, "ended": ()}
        self.rows = torch.zeros(config.capacity, 4 * config.walkers + 1)
        self.written = 0
        self.last = None
        self.episodes = torch.zeros(4)
        self.place, self.resting, self.steps = self.start(config.envs)
        context.slots.define(walk=self.walk, begin=self.begin, store=self.store)
        self.slots = context.slots

    def start(self, envs):
        shape = (envs, self.config.walkers)
        place = 0.6 * torch.rand(shape, generator=self.generator) - 0.3
        return place, torch.zeros(shape, dtype=torch.bool), torch.zeros(envs)

    def bind(self, learner):
        self.learner = learner

    def walk(self, place, resting, action):
        """Returns the next places, and which walkers rest from then on."""
        following = torch.where(resting, place, place + 0.5 * action)
        return following, resting | (following >= 1)

    def begin(self, over, place, resting, steps):
        """Returns the state after new episodes have started where old ones are over."""
        fresh = self.start(len(over))
        row = over[:, None]
        return torch.where(row, fresh[0], place), resting & ~row, steps * ~over

    def store(self, rows):
        """Writes rows over the oldest ones."""
        index = torch.arange(self.written, self.written + len(rows)) % self.config.capacity
        self.rows[index] = rows
        self.written += len(rows)

    @staticmethod
    def outcomes(following, resting, steps, limit):
        """Returns which episodes end by success, failure and timeout, [3, E]."""
        failure = (following <= -1).any(1)
        success = resting.all(1) & ~failure
        timeout = (steps >= limit) & ~success & ~failure
        return torch.stack([success, failure, timeout])

    def draw(self, batch_size, progress):
        noise = torch.randn(self.place.shape, generator=self.generator)
        with torch.no_grad():
            action = (self.learner.predict(self.place) + 0.5 * noise).tanh()
        following, resting = self.slots.walk(self.place, self.resting, action)
        steps = self.steps + 1
        ends = self.outcomes(following, resting, steps, self.config.limit)
        reward = (following - self.place) * ~self.resting
        ended = (ends[0] | ends[1]).float()[:, None]
        self.slots.store(torch.cat([self.place, action, reward, following, ended], 1))
        self.last = torch.cat([ends.any(1), (resting & ~ends.any(0)[:, None]).any()[None]])
        self.episodes = self.episodes + torch.cat([ends.sum(1), ends.sum()[None]]).float()
        self.place, self.resting, self.steps = self.slots.begin(ends.any(0), following, resting, steps)
        if self.written < batch_size:
            return None
        stored = min(self.written, self.config.capacity)
        chosen = self.rows[torch.randint(stored, (batch_size,), generator=self.generator)]
        parts = chosen.split([self.config.walkers] * 4 + [1], 1)
        names = ("place", "action", "reward", "following", "ended")
        return {name: part.clone() for name, part in zip(names, parts, strict=True)}

    def events(self):
        occurred = [False] * 4 if self.last is None else self.last.tolist()
        names = ("a success", "a failure", "a timeout", "a walker that rests before the others")
        return dict(zip(names, occurred, strict=True))

    def evaluate(self, learner):
        place = torch.linspace(-0.2, 0.4, 3)[:, None].expand(3, self.config.walkers)
        resting, running = torch.zeros_like(place, dtype=torch.bool), torch.ones(3, dtype=torch.bool)
        reached = torch.zeros(())
        for step in range(1, self.config.limit + 1):
            place, resting = self.slots.walk(place, resting, learner.predict(place))
            ends = self.outcomes(place, resting, torch.full((3,), float(step)), self.config.limit)
            reached = reached + (place.sum(1) * running).sum() + (ends[0] & running).sum()
            running = running & ~ends.any(0)
        return {"reached": reached.item()}

    def statistics(self):
        counts, self.episodes = self.episodes, torch.zeros(4)
        return {"episodes": counts[3].item(), "successes": counts[0].item()}

    def state_dict(self):
        ring = Ring(self.config.capacity, self.written, lambda first, last: self.rows[self.numbers(first, last)])
        names = ("place", "resting", "steps", "episodes")
        return {"ring": ring, **{name: getattr(self, name) for name in names}}

    def numbers(self, first, last):
        return torch.arange(first, last) % self.config.capacity

    def load_state_dict(self, state):
        for name in ("place", "resting", "steps", "episodes"):
            setattr(self, name, state[name].clone())
        ring = state["ring"]
        for first, rows in ring.pieces():
            self.rows[self.numbers(first, first + len(rows))] = rows.clone()
        self.written = ring.written


class WalkerConfig(GradientLearnerConfig):
    """Repeats actions that were followed by a reward."""

    kind: ClassVar[str] = "walker"
    implementation = "Walker"
    learns_from: ClassVar[str] = "walks"


class Walker(GradientLearner):
    def build(self, config, shapes, context):
        return nn.Linear(*shapes["place"], *shapes["action"])

    def loss(self, batch, noise, progress):
        error = self.slots.forward(batch["place"]) - batch["action"]
        return Loss((error.square() * batch["reward"].clamp(min=0)).sum(), error.numel())

    def predict(self, inputs):
        return self.module(inputs)


class MeddlingConfig(StageConfig):
    """Wraps the steps of the walkers."""

    kind: ClassVar[str] = "meddling"
    implementation = "Meddling"
    phase: ClassVar[int] = 1
    fault: str = "none"
    promise: str = "exact"

    def contract(self, setting):
        if self.promise == "statistical":
            return Statistical()
        return Exact() if self.promise == "exact" else Close()


class Meddling(Stage):
    """Makes the fault of its settings; the usual number of environments is that of the recipe."""

    def attach(self, pipeline):
        self.source, self.slots = pipeline.source, pipeline.slots
        self.learner = pipeline.learner
        fault = self.config.fault
        if fault == "refuses one copy" and self.source.config.envs == 1:
            raise UsageError("meddling: one copy is too few")
        steps = {"walk": self.walk, "begin": self.begin, "store": self.store}
        for name, step in steps.items():
            self.slots.wrap(name, lambda inner, step=step: lambda *inputs: step(inner, *inputs))
        if fault == "acts alike":
            predict = self.learner.predict
            self.learner.predict = lambda inputs: predict(inputs) if len(inputs) != 3 else predict(inputs) * 1.1
        if fault == "masked evaluation":
            self.is_evaluating = False
            outcomes, evaluate = self.source.outcomes, self.source.evaluate
            self.source.outcomes = lambda *inputs: outcomes(*inputs) & (not self.is_evaluating)
            self.source.evaluate = lambda learner: self.evaluate(evaluate, learner)

    def evaluate(self, inner, learner):
        self.is_evaluating = True
        metrics = inner(learner)
        self.is_evaluating = False
        return metrics

    def walk(self, inner, place, resting, action):
        fault = self.config.fault
        if fault == "ignored mask":
            resting = torch.zeros_like(resting)
        if fault == "usual number" and len(place) != 4:
            action = torch.cat([action[:-1], action[-1:] * 0.5])
        following, resting = inner(place, resting, action)
        if fault == "failure missed":
            following = following.clamp(min=-0.99)
        if fault == "rounding":
            following = torch.nextafter(following, following.sign() * 9)
        return following, resting

    def begin(self, inner, over, place, resting, steps):
        fault = self.config.fault
        started = inner(over, place, resting, steps)
        if fault == "stale observation":
            return place, *started[1:]
        if fault == "still resting":
            return started[0], resting, started[2]
        if fault == "late timeout":
            return *started[:2], started[2] - (over & (steps >= self.source.config.limit)).float()
        return started

    def store(self, inner, rows):
        fault = self.config.fault
        first, capacity = self.source.written, self.source.config.capacity
        if fault == "timeout ends":
            timeouts = self.source.steps + 1 >= self.source.config.limit
            rows = torch.cat([rows[:, :-1], rows[:, -1:].maximum(timeouts.float()[:, None])], 1)
        inner(rows)
        if fault == "rows lost" and first % capacity + len(rows) >= capacity:
            self.source.rows[0] = 0
        if fault == "second round" and first >= 2 * capacity:
            self.source.rows[0] = 0


FAULTS = (
    "stale observation", "still resting", "late timeout", "timeout ends", "ignored mask", "usual number",
    "failure missed", "rows lost", "second round", "acts alike", "masked evaluation",
)  # fmt: skip
"""All ways in which the stage is wrong."""
