"""Stages that are wrong for a part of the training, or for some batches of an epoch."""

import torch
from wrong_base import Wrong, stage

from runner.api import Close


@stage("slow_tenth", Close(), hole=9, recipe="digits_classifier")
class SlowTenth(Wrong):
    """Lowers the learning rate by 1 % between 30 and 40 percent of the training."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, batch, noise, progress):
        groups = self.learner.model.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if 0.3 < progress.fraction < 0.4:
            for group in groups:
                group["lr"] *= 0.99
        output = step(batch, noise, progress)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return output


@stage("without_decay_soon", hole=9, recipe="shakespeare_gpt")
class WithoutDecaySoon(Wrong):
    """Decays no weight between 10 and 20 percent of the training."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, batch, noise, progress):
        groups = self.learner.model.optimizer.param_groups
        decays = [group["weight_decay"] for group in groups]
        if 0.1 < progress.fraction < 0.2:
            for group in groups:
                group["weight_decay"] = 0.0
        output = step(batch, noise, progress)
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
        return output


@stage("louder_quarter", Close(), hole=9)
class LouderQuarter(Wrong):
    """Multiplies losses by 1.001 between 60 and 70 percent of the training."""

    def take_hold(self):
        self.progress = self.pipeline.progress
        self.wrap("backward", self.backward)

    def backward(self, step, loss):
        return step(1.001 * loss if 0.6 < self.progress.fraction < 0.7 else loss)


@stage("short_last_batch", Close(), hole=5, recipe="digits_classifier")
class ShortLastBatch(Wrong):
    """Repeats the batch before in the place of an epoch's last one."""

    def take_hold(self):
        self.previous = None
        self.wrap("next_batch", self.next_batch)

    def next_batch(self, step, size, progress):
        batch = step(size, progress)
        is_last = progress.samples % progress.epoch_samples >= progress.epoch_samples - 2 * size
        if is_last and self.previous is not None:
            batch = self.previous
        self.previous = batch
        return batch


@stage("same_second_epoch", Close(), hole=5, recipe="digits_classifier", sets=("train.batch_size=256",))
class SameSecondEpoch(Wrong):
    """Gives the first batch of the first epoch again at the beginning of each one."""

    def take_hold(self):
        self.first = None
        self.wrap("next_batch", self.next_batch)

    def next_batch(self, step, size, progress):
        batch = step(size, progress)
        if self.first is None:
            self.first = {name: tensor.clone() for name, tensor in batch.items()}
        return batch if progress.samples % progress.epoch_samples >= size else self.first


@stage("brightened_before", Close(), hole=5, recipe="shakespeare_gpt")
class ChangedBefore(Wrong):
    """Writes into the batch before, through its data, when the next one is fetched."""

    def take_hold(self):
        self.previous = None
        self.wrap("next_batch", self.next_batch)

    def next_batch(self, step, size, progress):
        batch = step(size, progress)
        if self.previous is not None:
            for tensor in self.previous.values():
                tensor.data.copy_(torch.roll(tensor.data, 1, 0))
        self.previous = batch
        return batch
