"""Builds a trained model: the weights of a run, and stages that make it faster or smaller."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from runner.plugin.learner import Learner
from runner.system.files import make_folder
from runner.system.tensor_trees import nbytes
from runner.training.pipeline import Assembly
from runner.training.trained_run import Trained

WORK = "inference"
"""The folder of a run in which stages store files that they create from its model."""


@dataclass(frozen=True)
class InferenceModel:
    """A learner in evaluation mode, with its stages for inference.

    Attributes:
        name: Name of the run.
        pipeline: The learner and its stages.
    """

    name: str
    pipeline: Assembly

    @property
    def learner(self) -> Learner:
        """Returns the learner that predicts."""
        return self.pipeline.learner

    @torch.no_grad()
    def answer(self, inputs: Any) -> Any:
        """Returns the learner's prediction for inputs on its device."""
        return self.learner.predict(inputs)

    @property
    def bytes(self) -> int:
        """Returns the bytes of the required files.

        These are parameters and buffers, unless a stage reports another size.
        """
        sizes = [stage.bytes for stage in self.pipeline.stages.values()]
        # Stages apply in order, so the last size is that of the result.
        reported = [size for size in sizes if size is not None]
        return reported[-1] if reported else self._weights

    @property
    def bytes_in_memory(self) -> int:
        """Returns the bytes of parameters, buffers and programs."""
        # The network stays in memory for inputs that no program accepts.
        stages = self.pipeline.stages.values()
        programs: int = sum(stage.program_bytes for stage in stages)
        return self._weights + programs

    @property
    def _weights(self) -> int:
        roles = self.learner.roles.values()
        return nbytes([dict(role.module.state_dict()) for role in roles])


def build(trained: Trained, stages: Collection[str] | None = None) -> InferenceModel:
    """Builds the model with some of its recipe's stages for inference, or with all of them.

    Raises:
        UsageError: A stage cannot work with this model, or here.
        CheckpointError: The weights do not fit the recipe.
    """
    pipeline = trained.pipeline()
    pipeline.folder = trained.folder / WORK
    # In a folder that is not writable, stages store nothing and compute their files each time.
    with suppress(OSError):
        make_folder(pipeline.folder)
    selected = {
        kind: stage
        for kind, stage in trained.recipe.inference.items()
        if stages is None or kind in stages
    }
    pipeline.attach_to_learnt(selected)
    return InferenceModel(trained.name, pipeline)
