"""Stages that change what surrounds the update, and do not declare it: what is drawn, counted and fed back."""

from functools import partial

import torch
from wrong_base import Wrong, stage

from runner.api import Close, map_tensors
from runner.plugins.marl.replay.uniform import UniformReplay


@stage("uniform_draws", Close(), hole=5)
class UniformDraws(Wrong):
    """Draws all transitions with the same probability, whatever their priority."""

    def take_hold(self):
        replay = self.source._replay
        replay.draw = partial(UniformReplay.draw, replay)
        replay.fetch = partial(UniformReplay.fetch, replay)


@stage("no_feedback", Close(), hole=5)
class NoFeedback(Wrong):
    """Does not send the TD errors to the replay buffer."""

    def take_hold(self):
        self.source.feedback = lambda batch, output: None


@stage("smaller_batch", Close(), hole=5, recipe="digits_classifier")
class SmallerBatch(Wrong):
    """Trains with half the batch size."""

    def take_hold(self):
        self.pipeline.batch_size //= 2


@stage("repeated_noise", Close(), hole=5, recipe="digits_classifier")
class RepeatedNoise(Wrong):
    """Moves the images of every batch as those of the first."""

    def take_hold(self):
        self.kept = None
        self.wrap_method(self.learner, "noise", self.noise)

    def noise(self, step, *args):
        self.kept = self.kept or step(*args)
        return self.kept


@stage("beta_not_annealed", Close(), hole=5)
class BetaNotAnnealed(Wrong):
    """Leaves the strength of the importance weights at its initial value."""

    def take_hold(self):
        self.source._replay.beta = (0.4, 0.4)


@stage("unshuffled", Close(), hole=5, recipe="shakespeare_gpt")
class Unshuffled(Wrong):
    """Draws the windows in the order of the text."""

    def take_hold(self):
        def numbered(size, first):
            while True:
                yield first, torch.arange(first * size, (first + 1) * size) % len(self.source.train)
                first += 1

        self.source._numbered = numbered


@stage("counted_twice", Close(), hole=5, recipe="digits_classifier")
class CountedTwice(Wrong):
    """Counts every sample twice, so that the learning rate falls in half the time."""

    def take_hold(self):
        double = lambda step, batch: {name: 2 * count for name, count in step(batch).items()}  # noqa: E731
        self.wrap_method(self.source, "counts", double)


@stage("rounded_on_the_way", Close(), hole=5)
class RoundedOnTheWay(Wrong):
    """Moves batches to the device in bf16."""

    def take_hold(self):
        self.wrap("transfer", lambda step, batch: map_tensors(self.rounded, step(batch)))

    @staticmethod
    def rounded(tensor):
        return tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor


@stage("no_warm_up", Close(), hole=5)
class NoWarmUp(Wrong):
    """Never acts at random before it learns."""

    def take_hold(self):
        self.source.config = self.source.config.model_copy(update={"warmup": 0})


@stage("half_the_updates", Close(), hole=5)
class HalfTheUpdates(Wrong):
    """Takes half as many updates for every environment step."""

    def take_hold(self):
        self.source._nominal_batch_size /= 2


@stage("drawn_twice", Close(), hole=5, recipe="shakespeare_gpt")
class DrawnTwice(Wrong):
    """Hands every batch out twice."""

    def take_hold(self):
        self.kept = []
        self.wrap("draw", self.draw)

    def draw(self, step, *args):
        if not self.kept:
            self.kept = [step(*args)] * 2
        return self.kept.pop()
