"""Handwritten digits: a learner, its data and one stage. Nothing is imported here but the runner's api."""

from runner.api import Exact, LearnerConfig, Pipeline, SourceConfig, Stage


class MlpConfig(LearnerConfig):
    """Classifies images with one hidden layer."""

    kind = "digits_mlp"
    learns_from = "labelled_images"
    hidden: int = 64
    """Width of the hidden layer."""
    lr: float = 1e-3
    """Learning rate of Adam."""

    def implementation(self) -> type:
        from .works import Mlp

        return Mlp

    def slots(self) -> frozenset[str]:
        return frozenset({"forward", "loss"})


class DigitsConfig(SourceConfig):
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

    kind = "digits"
    provides = "labelled_images"
    headline = ("accuracy",)
    held_out: int = 360
    """How many images only evaluation sees."""

    def implementation(self) -> type:
        from .works import Digits

        return Digits


class RecomputeActivations(Stage):
    """Forgets the activations of the forward pass and computes them again for the backward pass.

    When it helps: activations fill the memory (deep networks, large batches).
    When it hurts: always in time, by one more forward pass in every update.
    """

    kind = "recompute_activations"
    phase = 2
    contract = Exact()
    wraps = frozenset({"forward"})

    def attach(self, pipeline: Pipeline) -> None:
        from torch.utils.checkpoint import checkpoint

        pipeline.slots.wrap("forward", lambda step: lambda image: checkpoint(step, image, use_reentrant=False))
