"""Stages of models of molecules that mistake padding, ragged sums or the walks of a molecule."""

import math

import torch
from wrong_base import Wrong, stage

from runner.api import Close, Loss

GPS = "gps_esol"
WALKS = "graphgpt_esol"


@stage("mask_of_equal_batch", Close(), hole=3, recipe=GPS)
class MaskOfEqualBatch(Wrong):
    """Stores the mask of atoms for every shape of a batch, although sizes differ within it."""

    def take_hold(self):
        self.masks = {}
        self.wrap("forward", self.forward)

    def forward(self, forward, graph):
        mask = graph["mask"]
        return forward(graph | {"mask": self.masks.setdefault(mask.shape, mask)})


@stage("unmasked_with_little_padding", Close(), hole=12, recipe=GPS)
class UnmaskedWithLittlePadding(Wrong):
    """Drops the mask of atoms where less than one node in twenty is padding."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, forward, graph):
        mask = graph["mask"]
        if mask.float().mean() > 0.95:
            graph = graph | {"mask": torch.ones_like(mask)}
        return forward(graph)


@stage("edges_of_the_first_batch", Close(), hole=12, recipe=GPS)
class EdgesOfTheFirstBatch(Wrong):
    """Cuts edges to the most that a molecule of the first batch has, so that shapes stay equal."""

    def take_hold(self):
        self.limit = None
        self.wrap("forward", self.forward)

    def forward(self, forward, graph):
        if self.limit is None:
            self.limit = int((graph["bond"] > 0).sum(1).max())
        edge = graph["edge"][:, : self.limit]
        return forward(graph | {"edge": edge, "bond": graph["bond"][:, : self.limit]})


@stage("mean_of_bucket_means", Close(), hole=12, recipe=GPS)
class MeanOfBucketMeans(Wrong):
    """Computes a batch in parts of equal size, and takes the mean of their mean losses."""

    def take_hold(self):
        self.wrap("loss", self.loss)

    def loss(self, loss, batch, noise, progress):
        parts = [loss(part, noise, progress) for _, part in self.source.buckets(batch)]
        total = Loss.total(parts)
        mean = torch.stack([part.sum / part.count for part in parts]).mean()
        return Loss(mean * total.count, total.count, total.also)


@stage("mean_of_root_errors", hole=4, recipe=GPS)
class MeanOfRootErrors(Wrong):
    """Takes the root of every batch's squared error, and the mean of these roots."""

    def take_hold(self):
        self.wrap_method(self.source, "evaluate", self.evaluate)

    @torch.no_grad()
    def evaluate(self, evaluate, learner):
        metrics = evaluate(learner)
        roots = []
        with learner.evaluating():
            for batch in self.source.held_out_batches():
                mean = learner.metrics(batch)["squared_error"]
                roots.append(math.sqrt(float(mean.sum) / mean.count))
        rmse = self.source.table.std * sum(roots) / len(roots)
        return {**metrics, "rmse": rmse}


@stage("charges_left_out", Close(), hole=7, recipe=GPS)
class ChargesLeftOut(Wrong):
    """Computes features in small integers, in which a charge above zero is cut off."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, forward, graph):
        x = graph["x"].clone()
        # Element (10 columns), number of bonds (5), aromaticity, charge.
        x[..., 16] = x[..., 16].clamp(max=0)
        return forward(graph | {"x": x})


@stage("norm_of_each_parameter", hole=0, recipe=GPS)
class NormOfEachParameter(Wrong):
    """Clips the gradient of every parameter by its own norm, where their common norm counts."""

    def take_hold(self):
        self.wrap("clip", self.clip)

    def clip(self, clip, parameters, max_norm):
        for parameter in parameters:
            clip([parameter], max_norm)


@stage("padding_counts_as_tokens", Close(), hole=12, recipe=WALKS)
class PaddingCountsAsTokens(Wrong):
    """Divides the loss of walks by all tokens of the padded batch."""

    def take_hold(self):
        self.wrap_method(self.learner, "following", self.following)

    def following(self, following, batch):
        loss = following(batch)
        rows, length = batch["tokens"].shape
        return loss._replace(count=rows * (length - 1))


@stage("mean_over_padded_walk", Close(), hole=12, recipe=WALKS)
class MeanOverPaddedWalk(Wrong):
    """Averages the vectors of a walk over its padding, too, where a property is predicted."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, forward, inputs, following=False):
        if following:
            return forward(inputs, following)
        length = torch.full_like(inputs["length"], inputs["tokens"].shape[1])
        return forward(inputs | {"length": length})


@stage("one_update_of_walks_more", hole=6, recipe=WALKS)
class OneUpdateOfWalksMore(Wrong):
    """Learns walks for one update longer than the recipe wants."""

    def take_hold(self):
        self.wrap("loss", self.loss)

    def loss(self, loss, batch, noise, progress):
        if self.learner.module.training and progress.fraction == self.learner.pretrained:
            return self.learner.following(batch)
        return loss(batch, noise, progress)


@stage("scalar_of_a_single_walk", hole=4, recipe=WALKS)
class ScalarOfASingleWalk(Wrong):
    """Removes all dimensions of size one, also that of a batch of a single molecule."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, forward, *inputs):
        return forward(*inputs).squeeze()


@stage("walk_of_the_first_epoch", hole=5, recipe=WALKS)
class WalkOfTheFirstEpoch(Wrong):
    """Stores the walk of a molecule by its number, although each epoch should draw another."""

    def take_hold(self):
        self.walks = {}
        self.source.train = CachedWalks(self.source.train)


class CachedWalks:
    """A dataset that makes every walk once."""

    def __init__(self, walks):
        self.walks = walks
        self.cache = {}

    def __len__(self):
        return len(self.walks)

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = self.walks[index]
        return self.cache[index]


@stage(
    "bucket_without_the_end",
    Close(),
    hole=12,
    recipe=WALKS,
    requires=frozenset({"bucketing"}),
)
class BucketWithoutTheEnd(Wrong):
    """Cuts the walks of a bucket to the length of its first one."""

    def take_hold(self):
        self.wrap_method(self.source, "buckets", self.buckets)

    def buckets(self, buckets, batch):
        for index, part in buckets(batch):
            limit = int(part["length"][0])
            length = part["length"].clamp(max=limit)
            yield index, part | {"tokens": part["tokens"][:, :limit], "length": length}
