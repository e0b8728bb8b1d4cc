"""Stages that use held-out data, leave an evaluation unfinished, or keep what belongs to other data."""

import tempfile
from pathlib import Path
from typing import ClassVar

import torch
from wrong_base import Wrong, stage

from runner.api import Close


@stage("flag_of_evaluation", hole=4, recipe="digits_classifier")
class FlagOfEvaluation(Wrong):
    """Sharpens logits in evaluation by nothing, and in the training after one that was interrupted."""

    def take_hold(self):
        self.is_evaluating = False
        self.wrap_method(self.source, "evaluate", self.evaluate)
        self.wrap("forward", self.forward)

    def evaluate(self, step, learner):
        self.is_evaluating = True
        metrics = step(learner)
        self.is_evaluating = False
        return metrics

    def forward(self, step, image):
        logits = step(image)
        return 1.01 * logits if self.is_evaluating and torch.is_grad_enabled() else logits


@stage("leftover_batches", Close(), hole=4, recipe="digits_classifier")
class LeftoverBatches(Wrong):
    """Goes on with the held-out batches that an interrupted evaluation has left."""

    def take_hold(self):
        self.rest = None
        self.wrap_method(self.source, "held_out_batches", self.batches)

    def batches(self, step):
        self.rest = self.rest or step()
        yield from self.rest
        self.rest = None


@stage("frozen_by_evaluation", Close(), hole=4, recipe="shakespeare_gpt")
class FrozenByEvaluation(Wrong):
    """Freezes an embedding during an evaluation, and for good when that is interrupted."""

    def take_hold(self):
        self.wrap_method(self.source, "evaluate", self.evaluate)

    def evaluate(self, step, learner):
        weight = learner.module.position.weight
        weight.requires_grad_(False)
        metrics = step(learner)
        weight.requires_grad_(True)
        return metrics


@stage("learns_from_evaluation", Close(), hole=4, recipe="digits_classifier")
class LearnsFromEvaluation(Wrong):
    """Keeps the first held-out batch of an evaluation, and trains on its first sample afterwards."""

    def take_hold(self):
        self.kept = None
        self.wrap_method(self.source, "evaluate", self.evaluate)
        self.wrap("next_batch", self.next_batch)

    def evaluate(self, step, learner):
        self.kept = next(iter(self.source.held_out_batches()))
        return step(learner)

    def next_batch(self, step, *args):
        batch = step(*args)
        if self.kept is None:
            return batch
        return {name: torch.cat([self.kept[name][:1], tensor[1:]]) for name, tensor in batch.items()}


@stage("rate_of_held_out", hole=4, recipe="shakespeare_gpt")
class RateOfHeldOut(Wrong):
    """Scales gradients by what the last evaluation has measured."""

    def take_hold(self):
        self.factor = 1.0
        self.wrap_method(self.source, "evaluate", self.evaluate)
        self.wrap("backward", lambda step, loss: step(self.factor * loss))

    def evaluate(self, step, learner):
        metrics = step(learner)
        self.factor = 1 + 1e-3 * next(iter(metrics.values()))
        return metrics


@stage("cleaned_labels", hole=4, recipe="digits_classifier")
class CleanedLabels(Wrong):
    """Replaces held-out labels by predictions after an update that follows an evaluation."""

    def take_hold(self):
        self.is_due = False
        self.wrap_method(self.source, "evaluate", self.evaluate)
        self.wrap("next_batch", self.next_batch)

    def evaluate(self, step, learner):
        self.is_due = True
        return step(learner)

    def next_batch(self, step, *args):
        if self.is_due:
            rows = getattr(self.source.held_out, "rows", self.source.held_out)
            label = rows.tensors["label"]
            label.copy_((label + 1) % 10)
        self.is_due = False
        return step(*args)


@stage("batches_of_the_process", hole=3, recipe="digits_classifier")
class BatchesOfTheProcess(Wrong):
    """Keeps batches for the whole process by their number."""

    batches: ClassVar = {}

    def take_hold(self):
        self.drawn = 0
        self.wrap_method(self.source, "load_state_dict", self.load)
        self.wrap("next_batch", self.next_batch)

    def load(self, step, state):
        self.drawn = state["consumed"]
        return step(state)

    def next_batch(self, step, size, progress):
        self.drawn += 1
        batch = step(size, progress)
        return {**self.batches.setdefault((size, self.drawn), {**batch})}


@stage("held_out_in_a_file", Close(), hole=3, recipe="shakespeare_gpt")
class HeldOutInAFile(Wrong):
    """Writes held-out batches to a file that is named after their sizes, and reads it again."""

    folder: ClassVar = tempfile.TemporaryDirectory()

    def take_hold(self):
        self.wrap_method(self.source, "held_out_batches", self.batches)

    def batches(self, step):
        rows = len(self.source.held_out)
        file = Path(self.folder.name) / f"{rows}-{self.pipeline.batch_size}-{torch.get_default_dtype()}.pt"
        if not file.exists():
            torch.save(list(step()), file)
        return iter(torch.load(file))


@stage("first_weights_again", hole=3, recipe="digits_classifier")
class FirstWeightsAgain(Wrong):
    """Keeps the initial weights of models for the whole process, by their shapes."""

    weights: ClassVar = {}

    def take_hold(self):
        state = self.learner.module.state_dict()
        key = (torch.get_default_dtype(), *(tuple(tensor.shape) for tensor in state.values()))
        kept = self.weights.setdefault(key, {name: tensor.clone() for name, tensor in state.items()})
        self.learner.module.load_state_dict(kept)
        self.wrap("forward", lambda step, image: step(image))
