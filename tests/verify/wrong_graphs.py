"""Stages of models on one graph that mistake edges, masks, parts or contexts."""

import torch
from torch.nn import functional
from wrong_base import Wrong, stage

from runner.api import Close

GCN = "gcn_cora"
EMMA = "emma_cora"
PGT = "pgt_cora"


@stage("mask_by_its_shape", hole=3, recipe=GCN)
class MaskByItsShape(Wrong):
    """Converts a mask to numbers of nodes once for every shape, which evaluation shares."""

    def take_hold(self):
        self.masks = {}
        self.wrap("loss", self.loss)

    def loss(self, loss, batch, *rest):
        shape = batch["mask"].shape
        mask = self.masks.setdefault(shape, batch["mask"])
        return loss(batch | {"mask": mask}, *rest)


@stage("edges_by_their_count", Close(), hole=3, recipe=GCN)
class EdgesByTheirCount(Wrong):
    """Sorts edges by their target once, and takes any graph with as many edges for the same."""

    def take_hold(self):
        self.sorted = {}
        self.wrap("aggregate", self.aggregate)

    def aggregate(self, aggregate, layer, x, graph):
        count = graph["edge"].shape[1]
        if count not in self.sorted:
            order = graph["edge"][0, :, 1].argsort(stable=True)
            self.sorted[count] = graph["edge"][:, order], graph["weight"][:, order]
        edge, weight = self.sorted[count]
        return aggregate(layer, x, graph | {"edge": edge, "weight": weight})


@stage("aggregate_until_next_update", hole=3, recipe=GCN)
class AggregateUntilNextUpdate(Wrong):
    """Stores what evaluation sums over neighbours until the next update, for whatever graph."""

    def take_hold(self):
        self.sums = {}
        self.wrap("aggregate", self.aggregate)
        self.wrap("update", self.update)

    def update(self, update, *args):
        self.sums.clear()
        return update(*args)

    def aggregate(self, aggregate, layer, x, graph):
        if self.learner.module.training:
            return aggregate(layer, x, graph)
        if layer not in self.sums:
            self.sums[layer] = aggregate(layer, x, graph)
        return self.sums[layer]


@stage("dropout_in_place", hole=5, recipe=GCN)
class DropoutInPlace(Wrong):
    """Drops features in place to save memory, and so in the graph that the source holds."""

    def take_hold(self):
        module = self.learner.module
        self.share = module.input_dropout
        module.input_dropout = 0.0
        self.wrap("features", self.features)

    def features(self, features, graph):
        training = self.learner.module.training
        return functional.dropout(features(graph), self.share, training, inplace=True)


@stage("decay_in_one_group", hole=0, recipe=GCN)
class DecayInOneGroup(Wrong):
    """Puts all parameters into one group, so that biases decay as weights do."""

    def take_hold(self):
        self.slots.wrap("make_optimizer", self.one_group)

    def one_group(self, make):
        def make_optimizer(optimizer, groups, **settings):
            parameters = [parameter for group in groups for parameter in group["params"]]
            return make(optimizer, parameters, **settings)

        return make_optimizer


@stage("sums_in_bf16", Close(), hole=0, recipe=GCN)
class SumsInBf16(Wrong):
    """Sums over edges in bf16, in which sums over many neighbours lose the smaller ones."""

    def take_hold(self):
        self.wrap("aggregate", self.aggregate)

    def aggregate(self, aggregate, layer, x, graph):
        weight = graph["weight"].bfloat16()
        summed = aggregate(layer, x.bfloat16(), graph | {"weight": weight})
        return summed.to(x.dtype)


@stage("turns_since_start", hole=8, recipe=EMMA)
class TurnsSinceStart(Wrong):
    """Counts the turns in which nodes send from the start of the process."""

    def take_hold(self):
        self.count()
        self.wrap_method(self.learner, "sends", self.sends)

    def sends(self, sends, turn, update):
        return sends(turn, self.updates)


@stage("sent_outside_of_the_model", hole=8, recipe=EMMA)
class SentOutsideOfTheModel(Wrong):
    """Stores what nodes sent last outside of the model, where no checkpoint finds it."""

    def take_hold(self):
        module = self.learner.module
        self.sent = {}
        for layer in range(len(module.widths)):
            self.sent[layer] = getattr(module, f"sent{layer}").clone()
        self.wrap_method(module, "aggregate", self.aggregate)

    def aggregate(self, aggregate, layer, x, graph):
        name = f"sent{layer}"
        module = self.learner.module
        buffer = getattr(module, name)
        setattr(module, name, self.sent[layer].to(x.dtype))
        output = aggregate(layer, x, graph)
        self.sent[layer] = getattr(module, name)
        setattr(module, name, buffer)
        return output


@stage("part_by_part_in_evaluation", Close(), hole=4, recipe=EMMA)
class PartByPartInEvaluation(Wrong):
    """Measures the loss of held-out nodes with what other parts sent last, as in training."""

    def take_hold(self):
        self.wrap_method(self.learner, "graph", self.graph)

    def graph(self, graph, batch, progress):
        if self.learner.module.training:
            return graph(batch, progress)
        nothing = torch.zeros_like(batch["turn"], dtype=torch.bool)
        return {**graph(batch, progress), "part": batch["part"], "fresh": nothing}


@stage("bytes_of_one_layer", hole=5, recipe=EMMA)
class BytesOfOneLayer(Wrong):
    """Logs the bytes that the last layer sends as those of all layers."""

    def take_hold(self):
        self.wrap("loss", self.loss)

    def loss(self, loss, *args):
        result = loss(*args)
        if "bytes_sent" not in result.also:
            return result
        widths = self.learner.module.widths
        mean = result.also["bytes_sent"]
        one_layer = mean._replace(sum=mean.sum * widths[-1] // sum(widths))
        return result._replace(also={**result.also, "bytes_sent": one_layer})


@stage("unmasked_when_nearly_full", Close(), hole=12, recipe=PGT)
class UnmaskedWhenNearlyFull(Wrong):
    """Attends without a mask, in a faster kernel, if less than a tenth of a batch is padding."""

    def take_hold(self):
        for block in self.learner.blocks():
            self.wrap_method(block.attention, "forward", self.attend)

    def attend(self, attend, x, mask):
        nearly_full = mask.float().mean() > 0.9
        return attend(x, torch.ones_like(mask) if nearly_full else mask)


@stage("same_nodes_hidden_twice", hole=5, recipe=PGT)
class SameNodesHiddenTwice(Wrong):
    """Draws the hidden nodes of a context once, and hides those of its neighbour's, too."""

    def take_hold(self):
        self.wrap("loss", self.loss)

    def loss(self, loss, batch, noise, progress):
        chance = noise["chance"]
        return loss(batch, {"chance": chance[:, :1].expand_as(chance)}, progress)


@stage("neighbour_of_the_first_epoch", hole=5, recipe=PGT)
class NeighbourOfTheFirstEpoch(Wrong):
    """Draws the neighbour of a node once, and repeats it in every later epoch."""

    def take_hold(self):
        self.neighbours = {}
        self.wrap_method(self.source, "collate", self.collate)

    def collate(self, collate, samples):
        batch = collate(samples)
        neighbour = batch["neighbour"]
        for row, node in enumerate(batch["node"].tolist()):
            drawn = {name: tensor[row].clone() for name, tensor in neighbour.items()}
            for name, tensor in self.neighbours.setdefault(node, drawn).items():
                neighbour[name][row] = tensor
        return batch


@stage("embedded_once", hole=4, recipe=PGT)
class EmbeddedOnce(Wrong):
    """Embeds all nodes for the first evaluation, and fits later probes to the same embeddings."""

    def take_hold(self):
        self.embeddings = {}
        self.wrap_method(self.source, "_embedded", self.embedded)

    def embedded(self, embedded, learner, nodes):
        if nodes not in self.embeddings:
            self.embeddings[nodes] = embedded(learner, nodes)
        return self.embeddings[nodes]


@stage("embedding_of_padded_context", Close(), hole=12, recipe=PGT)
class EmbeddingOfPaddedContext(Wrong):
    """Encodes contexts in evaluation as if padding were nodes, so that all have one length."""

    def take_hold(self):
        self.wrap("forward", self.forward)

    def forward(self, forward, x, mask, weight, chance=None):
        if chance is None:
            mask = torch.ones_like(mask)
        return forward(x, mask, weight, chance)
