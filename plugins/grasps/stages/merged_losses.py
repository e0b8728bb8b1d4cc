"""Computes one squared error for all parts of a grasp."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from runner.api import Close, Pipeline, Setting, Stage, StageConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ..learner import GraspLearner


class MergedLossesConfig(StageConfig):
    """Squares the errors of translations, rotations, joints and links in one tensor instead of in
    four.

    A product with a matrix then weighs them and takes the mean of every part; as all parts share
    the network, their gradients are added up in another order.

    When it helps: GPUs, where an update of so small a network waits for its kernels to be started.
    When it hurts: never by much; on a CPU it is a small part of an update, and nothing changes.
    """

    kind: ClassVar[str] = "merged_losses"
    implementation = "MergedLosses"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"restoration"})

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra."""
        return Close()


class MergedLosses(Stage):
    """Replaces the error of grasps."""

    def attach(self, pipeline: Pipeline) -> None:
        """Keeps the parts' weights as a matrix, [25 + 3 * links, 4]."""
        import torch

        from ..learner import KEYPOINT_SCALE
        from ..network import NUMBERS, PARTS

        learner = cast("GraspLearner", pipeline.learner)
        hand = learner.module.hand
        links = 3 * len(hand.keypoints)
        weights = torch.zeros(
            NUMBERS + links, len(PARTS) + 1, device=learner.device
        )
        # A column has the mean over a part's numbers, times the part's weight.
        for column, (numbers, weight) in enumerate(PARTS.values()):
            weights[numbers, column] = weight / (numbers.stop - numbers.start)
        weights[NUMBERS:, -1] = KEYPOINT_SCALE**2 / links

        def stacked(grasp: Tensor) -> Tensor:
            keypoints = hand.keypoints_of(learner.module.metric(grasp))
            return torch.cat([grasp, keypoints.flatten(-2)], -1)

        def restoration(answer: Tensor, grasp: Tensor) -> dict[str, Tensor]:
            squared = (stacked(answer) - stacked(grasp)).square().mean(1)
            columns = (squared @ weights).unbind(1)
            errors = dict(zip((*PARTS, "keypoints"), columns, strict=True))
            return {**errors, **learner.chamfer_errors(answer, grasp)}

        pipeline.slots.replace("restoration", restoration)
