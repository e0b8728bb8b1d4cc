"""A stage that measures again only after some updates."""

from typing import Any, ClassVar

from runner.api import Exact, Stage, StageConfig


class StaleConfig(StageConfig):
    """Remembers what was measured."""

    kind: ClassVar[str] = "stale"
    implementation = "Stale"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})

    period: int = 0
    """Updates after which it measures again; never if 0."""
    is_cleared: bool = False
    """Whether it measures again after a state was loaded."""

    def contract(self, setting):
        return Exact()


class Stale(Stage):
    """Returns the metrics of an earlier evaluation."""

    def attach(self, pipeline: Any) -> None:
        self.updates = 0
        self.metrics: dict[str, float] | None = None
        self.evaluate = pipeline.source.evaluate
        pipeline.source.evaluate = self.remembered
        pipeline.slots.wrap("update", lambda update: lambda *inputs: self.count(update(*inputs)))

    def count(self, output: Any) -> Any:
        self.updates += 1
        if self.config.period and self.updates % self.config.period == 0:
            self.metrics = None
        return output

    def remembered(self, learner: Any) -> dict[str, float]:
        if self.metrics is None:
            self.metrics = self.evaluate(learner)
        return dict(self.metrics)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.config.is_cleared:
            self.metrics = None
