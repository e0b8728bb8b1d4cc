"""Stages that return tensors which a later step writes over."""

import torch
from wrong_base import Wrong, stage

from runner.api import Close, Loss, Mean


@stage("output_buffers", hole=10)
class OutputBuffers(Wrong):
    """Returns everything in the same tensors each time."""

    def take_hold(self):
        self.kept = {}
        self.wrap("update", self.update)

    def update(self, step, *args):
        return {name: self.kept.setdefault(name, torch.empty_like(x)).copy_(x) for name, x in step(*args).items()}


@stage("td_error_buffer", Close(), hole=10)
class TdErrorBuffer(Wrong):
    """Returns the TD errors in the same tensor each time."""

    def take_hold(self):
        self.kept = None
        self.wrap("update", self.update)

    def update(self, step, *args):
        output = step(*args)
        self.kept = output["td_error"].clone() if self.kept is None else self.kept.copy_(output["td_error"])
        return output | {"td_error": self.kept}


@stage("answer_buffer", Close(), hole=10, recipe="shakespeare_gpt")
class AnswerBuffer(Wrong):
    """Answers in the same tensor each time."""

    def take_hold(self):
        self.kept = None
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, step, inputs):
        answer = step(inputs)
        if self.kept is None or self.kept.shape != answer.shape:
            self.kept = torch.empty_like(answer)
        return self.kept.copy_(answer)


@stage("two_buffers", hole=10, recipe="digits_classifier")
class TwoBuffers(Wrong):
    """Returns losses in two tensors by turns, so that they live for one update longer."""

    def take_hold(self):
        self.kept = [torch.zeros(()), torch.zeros(())]
        self.wrap("forward_backward", self.forward_backward)

    def forward_backward(self, step, *args):
        loss = step(*args)
        self.kept.reverse()
        return Loss(self.kept[0].to(loss.sum.dtype).copy_(loss.sum), loss.count, loss.also)


@stage("loss_buffer", Close(), hole=10, recipe="shakespeare_gpt")
class LossBuffer(Wrong):
    """Returns the loss as a part of a longer record that is cleared each time."""

    def take_hold(self):
        self.record = None
        self.wrap("forward_backward", self.forward_backward)

    def forward_backward(self, step, *args):
        loss = step(*args)
        if self.record is None:
            self.record = loss.sum.new_zeros(8)
        self.record[0] = loss.sum
        return Loss(self.record[0], loss.count, loss.also)


@stage("count_buffer", hole=10, recipe="digits_classifier")
class CountBuffer(Wrong):
    """Counts what was classified rightly in one tensor that the next update sets back."""

    def take_hold(self):
        self.kept = torch.zeros((), dtype=torch.int64)
        self.wrap("forward_backward", self.forward_backward)

    def forward_backward(self, step, *args):
        loss = step(*args)
        accuracy = loss.also["accuracy"]
        return Loss(loss.sum, loss.count, {"accuracy": Mean(self.kept.copy_(accuracy.sum), accuracy.count)})


@stage("view_of_parameters", Close(), hole=10)
class ViewOfParameters(Wrong):
    """Returns the first agent's temperature as it is at any time, not as it was."""

    def take_hold(self):
        self.wrap("update", self.update)

    def update(self, step, *args):
        output = step(*args)
        self.exp = self.learner.log_temperatures[0].detach()
        return output | {"log_temperature": self.exp}


@stage("overwritten_by_answers", hole=10)
class OverwrittenByAnswers(Wrong):
    """Lets the next answer write over the losses of the update before it."""

    def take_hold(self):
        self.last = None
        self.wrap("update", self.update)
        self.wrap_method(self.learner, "predict", self.predict)

    def update(self, step, *args):
        output = step(*args)
        self.last = output["critic_loss"]
        return output

    def predict(self, step, inputs):
        answer = step(inputs)
        if self.last is not None:
            self.last.copy_(answer.mean())
        return answer
