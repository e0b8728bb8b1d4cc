"""A plugin without a declared objective, whose learners measure different things."""

import math
from typing import Any, ClassVar

import torch
from torch import nn

from runner.api import (
    DatasetConfig,
    DatasetSource,
    GradientLearner,
    GradientLearnerConfig,
    Loss,
    Mean,
    Objective,
)


class LineConfig(GradientLearnerConfig):
    """A line through points."""

    kind: ClassVar[str] = "line"
    implementation = "Line"
    learns_from: ClassVar[str] = "points"
    measures: str = "loss"


class AnnealedLineConfig(LineConfig):
    """A line whose loss depends on the progress."""

    kind: ClassVar[str] = "annealed_line"
    depends_on_progress: ClassVar[bool] = True


class JudgedLineConfig(LineConfig):
    """A line that declares by what it is judged."""

    kind: ClassVar[str] = "judged_line"
    objective: ClassVar[Objective | None] = Objective("error", "minimize")


class Line(GradientLearner):
    """A linear module, with the metrics that its settings name."""

    def build(self, config: Any, shapes: Any, context: Any) -> nn.Module:
        self.measures = config.measures
        return nn.Linear(1, 1)

    def loss(self, batch: Any, noise: Any, progress: Any) -> Loss:
        error = self.slots.forward(batch["x"]) - batch["y"]
        return Loss(error.square().sum(), len(error))

    def metrics(self, batch: Any) -> dict[str, Mean]:
        metrics = dict(super().metrics(batch))
        if self.measures == "loss and error":
            metrics["error"] = metrics["loss"]
        if self.measures == "error":
            metrics = {"error": metrics["loss"]}
        if self.measures == "no number":
            metrics["loss"] = Mean(math.nan, 1)
        return metrics


class PointsConfig(DatasetConfig):
    """Points on a line."""

    kind: ClassVar[str] = "points"
    implementation = "Points"
    provides: ClassVar[str] = "points"


class Points(DatasetSource):
    """32 points, of which 8 are held out."""

    def datasets(self, config: Any) -> tuple[Any, Any]:
        x = torch.linspace(-1, 1, 32).unsqueeze(1)
        table = {"x": x, "y": 2 * x + 1}
        train = {name: column[:24] for name, column in table.items()}
        held_out = {name: column[24:] for name, column in table.items()}
        return train, held_out
