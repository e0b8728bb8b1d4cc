"""A graph whose parts are in processes of their own, which send each other the nodes at their borders."""

from types import MethodType

import torch
import torch.distributed as dist

from runner.distributed.data_parallel import DataParallel
from runner.plugin.gradient_bucket import GradientBucket
from runner.plugin.registry import Registry
from runner.plugins.graphs.layers import gathered, summed
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.training.step import Step


class Wire:
    """Sends rows of nodes to other processes, and counts the bytes.

    Attributes:
        forward: Bytes of values that this process has sent.
        backward: Bytes of gradients that this process has sent.
    """

    def __init__(self, group):
        self.group = group
        self.forward = 0
        self.backward = 0

    def exchange(self, values, outgoing, incoming):
        """Sends the outgoing rows [N, D] to each process, and returns those that arrive, zeros elsewhere."""
        arrived = torch.zeros_like(values)
        operations, buffers, sent = [], [], 0
        for peer in range(self.group.count):
            if outgoing[peer].numel():
                rows = values[outgoing[peer]].contiguous()
                sent += rows.nbytes
                operations.append(dist.P2POp(dist.isend, rows, peer))
            if incoming[peer].numel():
                buffer = values.new_empty(len(incoming[peer]), values.shape[1])
                operations.append(dist.P2POp(dist.irecv, buffer, peer))
                buffers.append((peer, buffer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for peer, buffer in buffers:
            # A node may be read, and its gradients sent, by several processes.
            arrived[incoming[peer]] += buffer
        return arrived, sent


class Exchange(torch.autograd.Function):
    """Values of border nodes to their readers; their gradients back."""

    @staticmethod
    def forward(ctx, values, wire, outgoing, incoming):
        ctx.wire, ctx.outgoing, ctx.incoming = wire, outgoing, incoming
        arrived, sent = wire.exchange(values, outgoing, incoming)
        wire.forward += sent
        return arrived

    @staticmethod
    def backward(ctx, gradients):
        arrived, sent = ctx.wire.exchange(gradients, ctx.incoming, ctx.outgoing)
        ctx.wire.backward += sent
        return arrived, None, None, None


def exchanged(network, layer, x, graph):
    """Does what ``PartitionedNetwork.exchanged`` does, with the nodes of this process alone."""
    wire, rank = network.wire, network.wire.group.rank
    part = graph["part"][0]
    is_own = (part == rank)[None, :, None]
    # What other processes have computed is not read here.
    own = torch.where(is_own, x, torch.zeros_like(x))
    origin, target = graph["edge"].unbind(-1)
    outgoing, incoming = [], []
    for peer in range(wire.group.count):
        outgoing.append(_read(graph, part, origin, target, sender=rank, reader=peer))
        incoming.append(_read(graph, part, origin, target, sender=peer, reader=rank))
    arrived = Exchange.apply(own[0], wire, outgoing, incoming)[None]
    has_arrived = torch.zeros_like(part, dtype=torch.bool)
    has_arrived[torch.cat(incoming)] = True
    table = getattr(network, f"sent{layer}")
    remote = torch.where(has_arrived[None, :, None], arrived, table.to(x.dtype))
    table.copy_(remote.detach())
    crosses = (part[origin] != part[target])[..., None]
    messages = torch.where(crosses, gathered(remote, origin), gathered(own, origin))
    arrives_here = (part[target] == rank)[..., None]
    return summed(messages * graph["weight"][..., None] * arrives_here, target, x.shape[1])


def _read(graph, part, origin, target, sender, reader):
    """Returns the numbers of nodes that one process sends another one in this update, sorted."""
    if sender == reader:
        return torch.zeros(0, dtype=torch.int64)
    is_read = (part[origin] == sender) & (part[target] == reader)
    nodes = torch.unique(origin[is_read])
    return nodes[graph["fresh"][0][nodes]]


class DividedGraph(DataParallel):
    """Gives every process the labels of its part of the graph."""

    def update(self, step, batch, noise, progress):
        self._begin(batch)
        is_own = batch["part"] == self.group.rank
        self.share = 1 / self.group.count
        output = step({**batch, "mask": batch["mask"] & is_own}, noise, progress)
        return self._added_up(output)


def trained(group, sets, updates):
    """Trains the graph of ``emma_cora`` in one process, or its parts in several.

    Returns:
        The losses, the counted bytes of every update, the bytes that all processes have sent, and the parameters.
    """
    sets = ("device=cpu", "optimization.fused_optimizer=off", "optimization.heap_retention=off", *sets)
    pipeline = assemble(load("emma_cora", sets, Registry()))
    network = pipeline.learner.module
    if group is not None:
        network.wire = Wire(group)
        network.exchanged = MethodType(exchanged, network)
        network.aggregate = network.exchanged
        pipeline.slots.define(sum_gradients=GradientBucket.sum)
        DividedGraph(group, pipeline).attach()
    step = Step(pipeline)
    losses, counted, sent = [], [], []
    for _ in range(updates):
        before = network.wire.forward if group else 0
        output = step()
        losses.append(float(output["loss"].sum))
        counted.append(float(output["bytes_sent"].sum / output["bytes_sent"].count))
        sent.append(network.wire.forward - before if group else 0)
    backward = network.wire.backward if group else 0
    parameters = {name: value.detach().clone() for name, value in network.named_parameters()}
    return {"losses": losses, "counted": counted, "sent": sent, "backward": backward, "parameters": parameters}
