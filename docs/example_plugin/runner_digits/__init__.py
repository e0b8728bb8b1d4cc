"""Handwritten digits: a learner, its data and one stage. Nothing is imported here but the runner's api."""

from runner.api import DatasetConfig, Exact, GradientLearnerConfig, Setting, StageConfig


class MlpConfig(GradientLearnerConfig):
    """Classifies images with one hidden layer."""

    kind = "example_mlp"
    learns_from = "example_images"
    hidden: int = 64
    """Width of the hidden layer."""

    def implementation(self) -> type:
        from .works import Mlp

        return Mlp


class DigitsConfig(DatasetConfig):
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

    kind = "example_digits"
    provides = "example_images"
    headline = ("accuracy",)
    in_memory = True
    held_out: int = 360
    """How many images only evaluation sees."""

    def implementation(self) -> type:
        from .works import Digits

        return Digits


class RecomputeActivations(StageConfig):
    """Forgets the activations of the forward pass and computes them again for the backward pass.

    When it helps: activations fill the memory (deep networks, large batches).
    When it hurts: always in time, by one more forward pass in every update.
    """

    kind = "recompute_activations"
    phase = 2
    wraps = frozenset({"forward"})

    def contract(self, setting: Setting) -> Exact:
        return Exact()

    def implementation(self) -> type:
        from .works import Recompute

        return Recompute
