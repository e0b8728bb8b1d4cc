"""Schedules of a user, in one plugin file."""

from typing import Annotated, ClassVar

from pydantic import Field

from runner.api import ScheduleConfig, ScheduleState


class TriangleConfig(ScheduleConfig):
    """Falls linearly, and rises again."""

    kind: ClassVar[str] = "triangle"

    lowest: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the learning rate in the middle."""

    def after_warmup(self, fraction):
        return self.lowest + (1 - self.lowest) * abs(1 - 2 * fraction)


class PatientConfig(ScheduleConfig):
    """Falls after each evaluation that is worse than the last."""

    kind: ClassVar[str] = "patient"
    implementation = "Patient"

    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The factor of the learning rate after a worse evaluation."""


class Patient(ScheduleState):
    def __init__(self, config, objective):
        super().__init__(config, objective)
        self.last = float("inf")
        self.count = 0

    def observe(self, metrics, progress):
        value = metrics[self.objective.name]
        # In these tests, little better counts as worse.
        self.count += value > self.last - 0.3
        self.last = value

    def rate(self, base_rate):
        return base_rate * self.config.factor**self.count

    def state_dict(self):
        return {"last": self.last, "count": self.count}

    def load_state_dict(self, state):
        self.last = state["last"]
        self.count = state["count"]


class WrongConfig(ScheduleConfig):
    """Returns rates that are not valid."""

    kind: ClassVar[str] = "wrong"
    implementation = "Wrong"

    returned: float = -1.0
    """The rate."""


class Wrong(Patient):
    def rate(self, base_rate):
        return self.config.returned


class IncompleteConfig(ScheduleConfig):
    """Has a state that cannot be resumed."""

    kind: ClassVar[str] = "incomplete"
    implementation = "Incomplete"


class Incomplete(ScheduleState):
    def observe(self, metrics, progress):
        pass

    def rate(self, base_rate):
        return base_rate

    def state_dict(self):
        return {}
