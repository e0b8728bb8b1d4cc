"""Stages of classifiers and of folders of images: batches, steps, statistics and decoding."""

import torch
from torch.utils.checkpoint import checkpoint
from wrong_base import Wrong, stage

from runner.api import Close, Loss, Statistical

CONV = "conv_classifier"
MLP = "mlp"
FOLDER = "image_folder"
BATCH_NORM = ("model.norm=batch",)


@stage("rate_of_the_step_before", hole=5, recipe=CONV)
class RateOfTheStepBefore(Wrong):
    """Steps with the learning rate of the step before, which it copies too late."""

    def take_hold(self):
        self.rate = None
        self.wrap("optimizer_step", self.optimizer_step)

    def optimizer_step(self, optimizer_step, optimizer):
        (group,) = optimizer.param_groups
        rate = group["lr"]
        group["lr"] = rate if self.rate is None else self.rate
        optimizer_step(optimizer)
        group["lr"] = self.rate = rate


@stage("statistics_of_the_batch", Close(), hole=4, recipe=CONV, sets=BATCH_NORM)
class StatisticsOfTheBatch(Wrong):
    """Normalises by the statistics of the batch in evaluation, too."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, forward, image):
        layers = [layer for layer in self.learner.module.modules() if hasattr(layer, "momentum")]
        modes = [layer.training for layer in layers]
        for layer in layers:
            layer.training = layer.training or len(image) > 1
        output = forward(image)
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
        return output


@stage("statistics_moved_twice", hole=0, recipe=CONV, sets=BATCH_NORM)
class StatisticsMovedTwice(Wrong):
    """Computes the forward pass again for the backward, and so moves the statistics twice."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, forward, image):
        return checkpoint(forward, image, use_reentrant=False)


@stage("statistics_not_restored", hole=8, recipe=CONV, sets=BATCH_NORM)
class StatisticsNotRestored(Wrong):
    """Loads parameters and moments, and leaves running statistics as they are."""

    def take_hold(self):
        self.wrap_method(self.learner, "load_state_dict", self.load)

    def load(self, load, state):
        buffers = dict(self.learner.module.named_buffers())
        values = {name: buffer.clone() for name, buffer in buffers.items()}
        load(state)
        for name, buffer in buffers.items():
            buffer.copy_(values[name])


@stage("unwanted_decay", Close(), hole=7, recipe=CONV)
class UnwantedDecay(Wrong):
    """Multiplies weights by 1 - 1e-6 in each step, as another optimizer's default does."""

    def take_hold(self):
        self.wrap("optimizer_step", self.optimizer_step)

    @torch.no_grad()
    def optimizer_step(self, optimizer_step, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 1e-6)
        optimizer_step(optimizer)


@stage("shuffled_in_blocks", Statistical(), hole=5, recipe=CONV)
class ShuffledInBlocks(Wrong):
    """Draws batches in the order of the data, and shuffles samples within a batch only."""

    def take_hold(self):
        self.wrap_method(self.source, "_numbered", self.numbered)

    def numbered(self, numbered, size, first):
        samples = len(self.source.train)
        for number, index in numbered(size, first):
            start = number * size % (samples - size)
            yield number, start + index.argsort()


@stage("bf16_without_gradient", Close(), hole=4, recipe=CONV)
class Bf16WithoutGradient(Wrong):
    """Convolves in bf16 if no gradient is needed, as predictions need few digits."""

    def take_hold(self):
        self.wrap("conv", self.conv)

    def conv(self, conv, x, weight, *rest):
        if torch.is_grad_enabled():
            return conv(x, weight, *rest)
        return conv(x.bfloat16().to(x.dtype), weight.bfloat16().to(x.dtype), *rest)


@stage("mean_of_part_means", Close(), hole=12, recipe=MLP)
class MeanOfPartMeans(Wrong):
    """Cuts a batch into parts of 24, and gives the smaller last part the same weight."""

    def take_hold(self):
        self.wrap("forward_backward", self.forward_backward)

    def forward_backward(self, forward_backward, batch, noise, progress):
        parts = [*self.source.split(batch, 24)]
        shifts = torch.split(noise["shift"], 24)
        losses = []

        def denominator(count):
            return count * len(parts)

        for part, shift in zip(parts, shifts, strict=True):
            losses.append(forward_backward(part, {"shift": shift}, progress, denominator))
        return Loss.total(losses)


@stage("last_batch_filled_up", hole=4, recipe=MLP)
class LastBatchFilledUp(Wrong):
    """Fills the last held-out batch up with its first samples, and counts them again."""

    def take_hold(self):
        self.wrap_method(self.source, "held_out_batches", self.batches)

    def batches(self, batches):
        size = self.pipeline.batch_size
        for batch in batches():
            index = torch.arange(size) % self.source.size(batch)
            yield self.source.take(batch, index)


@stage("packed_every_tenth", Close(), hole=4, recipe=MLP)
class PackedEveryTenth(Wrong):
    """Predicts with packed copies of the weights that it renews in every tenth update."""

    def take_hold(self):
        self.count()
        self.copies = {}
        self.packed = -1
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, predict, inputs):
        if self.packed != self.updates // 10:
            self.packed = self.updates // 10
            state = self.learner.module.state_dict()
            self.copies = {name: tensor.clone() for name, tensor in state.items()}
        with torch.no_grad(), self.learner.evaluating():
            return torch.func.functional_call(self.learner.module, self.copies, inputs)


@stage("shifts_of_the_first_epoch", hole=5, recipe=MLP)
class ShiftsOfTheFirstEpoch(Wrong):
    """Moves the images of a batch as those with the same number in the first epoch."""

    def take_hold(self):
        self.noise = {}
        self.wrap("update", self.update)

    def update(self, update, batch, noise, progress):
        position = progress.samples % (progress.epoch_samples or 1)
        return update(batch, self.noise.setdefault(position, noise), progress)


@stage("inputs_centred_in_place", hole=4, recipe=MLP)
class InputsCentredInPlace(Wrong):
    """Leaves the images of a prediction centred, in the memory of the caller."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, predict, inputs):
        answer = predict(inputs)
        inputs.sub_(inputs.mean())
        return answer


class CachedImages:
    """A dataset that keeps decoded images in a table."""

    places = 10**6

    def __init__(self, images):
        self.images = images
        self.files = images.files
        self.table = {}

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        place = index % self.places
        if place not in self.table:
            self.table[place] = self.images[index]
        return self.table[place]


class SmallTable(CachedImages):
    """A table with fewer places than images."""

    places = 128


class ImagesByName(CachedImages):
    """Decoded images by the name of their file."""

    def __getitem__(self, index):
        path, label = self.files[index]
        if path.name not in self.table:
            self.table[path.name] = self.images[index][0]
        return self.table[path.name], label


@stage("decoded_by_name", hole=3, recipe=FOLDER)
class DecodedByName(Wrong):
    """Stores decoded images by the name of their file, which files of other folders have, too."""

    def take_hold(self):
        self.source.train = ImagesByName(self.source.train)
        self.source.held_out = ImagesByName(self.source.held_out)


@stage("table_of_128_images", hole=3, recipe=FOLDER)
class TableOf128Images(Wrong):
    """Stores decoded images in a table of 128 places, by their number modulo 128."""

    def take_hold(self):
        self.source.train = SmallTable(self.source.train)


@stage("images_of_both_parts", hole=3, recipe=FOLDER)
class ImagesOfBothParts(Wrong):
    """Stores decoded images of training and evaluation in one table, by their number."""

    def take_hold(self):
        self.source.train = CachedImages(self.source.train)
        self.source.held_out = CachedImages(self.source.held_out)
        self.source.held_out.table = self.source.train.table


@stage("levels_as_small_integers", Close(), hole=5, recipe=FOLDER)
class LevelsAsSmallIntegers(Wrong):
    """Divides levels by 256 with a shift, where 255 is the largest."""

    def take_hold(self):
        self.wrap_method(self.source, "collate", self.collate)

    def collate(self, collate, samples):
        batch = collate(samples)
        return batch | {"image": batch["image"] * (255 / 256)}


@stage("labels_of_the_batch_before", hole=7, recipe=FOLDER)
class LabelsOfTheBatchBefore(Wrong):
    """Prepares labels ahead, and mixes up two batches at the end of an epoch."""

    def take_hold(self):
        self.label = None
        self.wrap("next_batch", self.next_batch)

    def next_batch(self, next_batch, *args):
        batch = next_batch(*args)
        batches = self.source.epoch_samples(16) // 16
        last, self.label = self.label, batch["label"]
        is_last = self.source.consumed % batches == batches - 1
        return batch | {"label": last} if is_last and last is not None else batch
