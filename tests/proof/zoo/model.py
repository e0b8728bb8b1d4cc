"""A training step that is as it should be, and the ways in which any such step can be rewritten."""

import inspect
from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.proof import Subject

OPTIMIZER = ("foreach", "fused", "rate in a tensor")
"""Ways to compute the same optimizer."""
BACKWARD = (
    "autograd.grad", "zeroed gradients", "forgotten gradients", "flat gradients", "flat parameters", "scaled loss"
)  # fmt: skip
"""Ways to come to the same gradients from the same loss."""
FORWARD = ("aot_eager", "checkpoint", "func.grad", "micro-batches", "other order of rows")
"""Ways to come to the same loss, for a step that has one loss."""
TOGETHER = (
    ("flat gradients", "fused", "checkpoint"),
    ("checkpoint", "foreach", "forgotten gradients"),
    ("flat parameters", "foreach", "micro-batches"),
    ("scaled loss", "autograd.grad", "other order of rows"),
)
SCALE = 1024.0  # a power of two, which rounds nothing
MODELS = {}
"""By name."""


class Model(nn.Module, ABC):
    """Called with a batch it gives its loss. ``way`` names what is rewritten: nothing in the baseline."""

    optimizer = partial(torch.optim.SGD, lr=0.1)
    own = ()
    """The ways that this model alone can be written in."""
    without = ()
    """Common ways that compute something else here, or that do not exist."""
    rows = False
    """Whether the loss is the mean over the rows of a batch, each by itself."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        MODELS[cls.__name__] = cls

    def __init__(self, way):
        super().__init__()
        self.way = way

    @classmethod
    def rewrites(cls):
        """The ways in which it can be written, one at a time and some together."""
        known = inspect.signature(cls.optimizer.func).parameters
        common = [way for way in OPTIMIZER if way in known or way == "rate in a tensor"] + [*BACKWARD]
        if cls.step is Model.step:
            common += [way for way in FORWARD if cls.rows or way not in ("micro-batches", "other order of rows")]
        common = [way for way in common if way not in cls.without]
        together = [ways for ways in TOGETHER if {*ways} <= {*common}]
        return [frozenset(ways) for ways in [*((way,) for way in (*cls.own, *common)), *together]]

    @staticmethod
    @abstractmethod
    def batch(draw):
        """A batch, drawn from this generator."""

    def trained(self):
        """What each optimizer trains, by the optimizer's name."""
        return {"optimizer": list(self.parameters())}

    def step(self, loop, batch):
        """One update; returns what a training would log."""
        return loop.descend(batch)

    def adjust(self, loop):
        """Between the gradients and the optimizer."""

    def finish(self, loop):
        """After the optimizer."""

    def more_state(self, loop):
        """What a step changes besides the model and the optimizers."""
        return {}


class Loop:
    """A model in training."""

    def __init__(self, kind, way=frozenset(), seed=0):
        torch.manual_seed(seed)
        self.way, self.model = way, kind(way)
        compiler = next((each for each in ("aot_eager", "inductor") if each in way), None)
        self.loss = torch.compile(self.model, backend=compiler) if compiler else self.model
        if "flat parameters" in way:
            share_memory(
                self.model.parameters(), lambda parameter, part: setattr(parameter, "data", part.copy_(parameter))
            )
        if "flat gradients" in way:
            self.flat = share_memory(self.model.parameters(), lambda parameter, part: setattr(parameter, "grad", part))
        options = {name: True for name in ("foreach", "fused") if name in way}
        if "rate in a tensor" in way:
            options["lr"] = torch.tensor(kind.optimizer.keywords["lr"], dtype=torch.get_default_dtype())
        self.optimizers = {name: kind.optimizer(each, **options) for name, each in self.model.trained().items()}
        self.more = self.model.more_state(self)

    def subject(self):
        return Subject(partial(self.model.step, self), {"model": self.loss, **self.optimizers, **self.more})

    def descend(self, batch):
        """An update with one loss and one optimizer."""
        (optimizer,) = self.optimizers.values()
        if "func.grad" in self.way:
            loss = self.by_transform(batch)
        else:
            self.forget(optimizer)
            loss = sum(self.backward(self.evaluate(part), optimizer, share) for part, share in self.parts(batch))
        self.apply(optimizer)
        self.model.finish(self)
        return loss

    def parts(self, batch):
        if "other order of rows" in self.way:
            batch = {name: rows.flip(0) for name, rows in batch.items()}
        if "micro-batches" not in self.way:
            return [(batch, 1.0)]
        count = len(next(iter(batch.values())))
        ends = [(0, count // 4), (count // 4, count)]
        return [({name: rows[a:b] for name, rows in batch.items()}, (b - a) / count) for a, b in ends]

    def evaluate(self, batch):
        if "checkpoint" in self.way:
            return checkpoint(self.loss, batch, use_reentrant=False)
        return self.loss(batch)

    def backward(self, loss, optimizer, share=1.0, retain_graph=None):
        """Adds the gradients of a share of a loss to those of an optimizer's parameters."""
        if share != 1.0:
            loss = loss * share
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        objective = loss * SCALE if "scaled loss" in self.way else loss
        if "autograd.grad" in self.way:
            gradients = torch.autograd.grad(objective, parameters, retain_graph=retain_graph, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        else:
            objective.backward(inputs=parameters, retain_graph=retain_graph)
        return loss.detach()

    def by_transform(self, batch):
        """The gradients from ``torch.func``."""
        parameters = dict(self.model.named_parameters())

        def loss_of(values):
            return torch.func.functional_call(self.model, values, (batch,))

        gradients, loss = torch.func.grad_and_value(loss_of)({k: each.detach() for k, each in parameters.items()})
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        return loss

    def forget(self, optimizer):
        if "flat gradients" in self.way:
            self.flat.zero_()
        elif "forgotten gradients" not in self.way:
            optimizer.zero_grad(set_to_none="zeroed gradients" not in self.way)

    def apply(self, optimizer):
        if "scaled loss" in self.way:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if parameter.grad is not None:
                    parameter.grad /= SCALE
        self.model.adjust(self)
        optimizer.step()
        if "forgotten gradients" in self.way:
            optimizer.zero_grad()


def share_memory(parameters, assign):
    """Gives every parameter a part of one tensor, which is returned."""
    parameters = list(parameters)
    flat = torch.zeros(sum(each.numel() for each in parameters), dtype=parameters[0].dtype)
    with torch.no_grad():
        for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
            assign(parameter, part.view_as(parameter))
    return flat
