"""Handwritten digits: a learner, its data and one stage. Nothing is imported here but the runner's api."""

from runner.api import DatasetConfig, Exact, GradientLearnerConfig, Setting, StageConfig


class MlpConfig(GradientLearnerConfig):
    """Classifies images with one hidden layer."""

    kind = "example_mlp"
    implementation = ".works:Mlp"
    learns_from = "example_images"
    hidden: int = 64
    """Width of the hidden layer."""


class DigitsConfig(DatasetConfig):
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

    kind = "example_digits"
    implementation = ".works:Digits"
    provides = "example_images"
    headline = ("accuracy",)
    in_memory = True
    held_out: int = 360
    """How many images only evaluation sees."""


class RecomputeActivations(StageConfig):
    """Forgets the activations of the forward pass and computes them again for the backward pass.

    When it helps: activations fill the memory (deep networks, large batches).
    When it hurts: always in time, by one more forward pass in every update.
    """

    kind = "recompute_activations"
    implementation = ".works:Recompute"
    phase = 2
    wraps = frozenset({"forward"})

    def contract(self, setting: Setting) -> Exact:
        return Exact()
