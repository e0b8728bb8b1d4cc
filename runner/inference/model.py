"""A trained model as it answers: the weights of a run, and the stages that make it faster or smaller."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from runner.plugin.learner import Learner
from runner.system.tree import tensors
from runner.train.assemble import Assembly
from runner.train.trained import Trained

WORK = "inference"
"""The folder of a run in which stages keep what they make of its model."""


@dataclass(frozen=True)
class InferenceModel:
    """A learner in evaluation mode, with what stages have made of it."""

    name: str
    """Of the run."""
    pipeline: Assembly

    @property
    def learner(self) -> Learner:
        """What answers."""
        return self.pipeline.learner

    @torch.no_grad()
    def answer(self, inputs: Any) -> Any:
        """What the learner predicts for inputs on its device."""
        return self.learner.predict(inputs)

    @property
    def bytes(self) -> int:
        """Of the parameters and buffers that answer, or of what the last stage has put in their place."""
        told = [stage.bytes for stage in self.pipeline.stages.values() if stage.bytes is not None]
        modules = (role.module for role in self.learner.roles.values())
        own = (tensor.nbytes for module in modules for tensor in tensors(dict(module.state_dict())))
        return told[-1] if told else sum(own)


def build(found: Trained, stages: Collection[str] | None = None) -> InferenceModel:
    """The model with these of its recipe's stages for inference, or with all of them.

    Raises:
        UsageError: a stage cannot work with this model, or here.
        CheckpointError: the weights do not fit the recipe.
    """
    pipeline = found.pipeline()
    pipeline.folder = found.folder / WORK
    chosen = {kind: stage for kind, stage in found.recipe.inference.items() if stages is None or kind in stages}
    pipeline.attach_to_learnt(chosen)
    return InferenceModel(found.name, pipeline)
