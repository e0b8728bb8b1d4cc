"""Clouds of points on cubes, without an evaluation of grasps."""

from __future__ import annotations

from runner.api import DatasetSource, Learner

from .cube import CubeGrasps


class CubeClouds(CubeGrasps):
    """The scenes of ``CubeGrasps``, evaluated by the metrics of the learner alone."""

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Returns the learner's metrics on held-out scenes."""
        return DatasetSource.evaluate(self, learner)
