"""Stages that go wrong at a certain update, for tests of the sentinel."""

import torch

from runner.api import Close, Exact, Stage, StageConfig, Statistical


class Late(Stage):
    """Counts updates, and does something wrong from one of them on."""

    def attach(self, pipeline):
        self.pipeline = pipeline
        self.updates = 0
        self.fault, self.factor, self.first = self.config.fault, self.config.scale, self.config.first
        pipeline.slots.wrap("backward", lambda step: lambda loss: self.backward(step, loss))
        pipeline.slots.wrap("update", lambda step: lambda *given: self.update(step, *given))

    @property
    def is_wrong(self):
        return self.updates >= self.first

    def backward(self, step, loss):
        return step(loss * self.factor if self.is_wrong and self.fault == "scale" else loss)

    def update(self, step, batch, noise, progress):
        output = step(batch, noise, progress)
        if self.is_wrong:
            getattr(self, self.fault, lambda: None)()
        self.updates += 1
        return output

    def parameters(self):
        return next(iter(self.pipeline.learner.modules().values())).parameters()

    def decay(self):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1 - 1e-4)

    def moment(self):
        _, optimizer = next(iter(self.pipeline.learner.optimizers()))
        for state in optimizer.state.values():
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor) and tensor.dim():
                    tensor.mul_(0.9)

    def sign(self):
        with torch.no_grad():
            parameter = next(self.parameters())
            parameter.view(-1)[0].neg_()


class LateConfig(StageConfig):
    """Is wrong from an update on."""

    kind = "late"
    implementation = "Late"
    phase = 1
    wraps = frozenset({"backward", "update"})

    first: int = 20
    """The first wrong update."""
    fault: str = "scale"
    """What is wrong: scale, decay, moment, sign or none."""
    scale: float = 1.01
    """Of the loss."""
    promise: str = "exact"
    """What is promised."""

    def contract(self, setting):
        return {"exact": Exact, "close": Close, "statistical": Statistical}[self.promise]()
