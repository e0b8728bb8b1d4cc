"""Lessons of a student: batches of the run's training, with the teacher's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import GradientLearner, Loss, Pipeline, Progress, UsageError, tensors

from .network import ForwardCall, forward_replaced

if TYPE_CHECKING:
    from runner.api import Batch

PROGRESS = Progress("updates", 1, updates=1)
"""That of a finished training, at which every loss is computed."""


class Lesson(NamedTuple):
    """A batch, its noise, and the calls of the network by the run's loss for it.

    The outputs of the calls are the teacher's.
    """

    batch: Batch
    noise: Batch
    calls: Sequence[ForwardCall]


def lessons(
    learner: GradientLearner, teacher: nn.Module, pipeline: Pipeline
) -> Iterator[Lesson]:
    """Yields a lesson for one batch after the other, without end."""
    for batch, noise in pipeline.batches():
        calls: list[ForwardCall] = []

        def answer(*inputs: Any, calls: list[ForwardCall] = calls) -> Any:
            calls.append(ForwardCall(inputs, teacher(*inputs)))
            return calls[-1].output

        with torch.no_grad(), forward_replaced(learner, answer):
            learner.slots.loss(batch, noise, PROGRESS)
        yield Lesson(batch, noise, calls)


def weights_outside_forward(
    learner: GradientLearner, lesson: Lesson
) -> dict[str, Tensor]:
    """Returns the parameters of the learner's network that its loss depends on, and the outputs of
    the slot ``forward`` do not, by name: those that lessons do not train.
    """
    module = learner.module
    parameters = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }

    def names(results: list[Tensor]) -> set[str]:
        total = torch.stack([result.sum() for result in results]).sum()
        gradients = torch.autograd.grad(
            total, list(parameters.values()), allow_unused=True
        )
        pairs = zip(parameters, gradients, strict=True)
        return {name for name, gradient in pairs if gradient is not None}

    with torch.enable_grad():
        loss: Loss = learner.slots.loss(lesson.batch, lesson.noise, PROGRESS)
        outputs = [
            output for call in lesson.calls for output in tensors(module(*call.inputs))
        ]
        outside = names([loss.sum]) - names(outputs)
    return {name: parameters[name] for name in sorted(outside)}


def copy_weights(weights: Mapping[str, Tensor], student: nn.Module) -> None:
    """Copies weights of the teacher to the student's parameters of the same names.

    Raises:
        UsageError: The student has none of that name, or one of another shape.
    """
    parameters = dict(student.named_parameters())
    for name, weight in weights.items():
        shape = tuple(weight.shape)
        if name not in parameters or tuple(parameters[name].shape) != shape:
            raise UsageError(
                f"distil: student: '{name}' is not trained by outputs of the network, so that the "
                f"student needs the teacher's, with the shape {shape}: remove what changes it"
            )
        with torch.no_grad():
            parameters[name].copy_(weight)


def squared_error(student: nn.Module, lesson: Lesson) -> Tensor:
    """Returns the sum of the mean squared differences of all outputs."""
    errors = []
    for call in lesson.calls:
        predictions = tensors(student(*call.inputs))
        for prediction, target in zip(predictions, tensors(call.output), strict=True):
            errors.append((prediction - target).square().mean())
    return torch.stack(errors).sum()


def size(lesson: Lesson) -> Tensor:
    """Returns the squared error of outputs that are zero."""
    outputs = [output for call in lesson.calls for output in tensors(call.output)]
    return torch.stack([output.square().mean() for output in outputs]).sum()


def softened_loss(
    learner: GradientLearner, lesson: Lesson, temperature: float, labels: float
) -> Tensor:
    """Returns the loss of Hinton et al. 2015 (arXiv 1503.02531, section 2) for the network.

    It is ``(1 - labels) * soft + labels * hard``: ``soft`` is ``softened_divergence`` from the
    teacher's logits, and ``hard`` is the run's loss, which compares with the labels of the batch.
    """
    student = learner.module
    answers: list[Tensor] = []

    def answer(*inputs: Any) -> Tensor:
        logits: Tensor = student(*inputs)
        answers.append(logits)
        return logits

    with forward_replaced(learner, answer):
        loss: Loss = learner.slots.loss(lesson.batch, lesson.noise, PROGRESS)
    pairs = zip(answers, lesson.calls, strict=True)
    divergences = [
        softened_divergence(logits, call.output, temperature) for logits, call in pairs
    ]
    soft = torch.stack(divergences).sum()
    hard: Tensor = loss.sum / loss.count
    return (1 - labels) * soft + labels * hard


def softened_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Returns ``T^2 KL(softmax(teacher / T) || softmax(student / T))``, the mean over all rows.

    The gradient of the divergence shrinks with ``1 / T^2``; the factor keeps its share in the
    loss at any temperature (Hinton et al. 2015, arXiv 1503.02531, section 2).

    Args:
        student: Logits, [..., classes].
        teacher: Logits of the same shape.
        temperature: ``T``, by which both are divided.
    """
    classes = student.shape[-1]
    student_logs = F.log_softmax(student.reshape(-1, classes) / temperature, -1)
    teacher_logs = F.log_softmax(teacher.reshape(-1, classes) / temperature, -1)
    divergence: Tensor = F.kl_div(
        student_logs, teacher_logs, reduction="batchmean", log_target=True
    )
    return temperature**2 * divergence


def check_outputs(student: nn.Module, lesson: Lesson) -> None:
    """Raises a UsageError if the student's outputs have other shapes than the teacher's."""
    for call in lesson.calls:
        with torch.no_grad():
            outputs = tensors(student(*call.inputs))
        shapes = [tuple(output.shape) for output in outputs]
        expected = [tuple(output.shape) for output in tensors(call.output)]
        if shapes != expected:
            raise UsageError(
                f"distil: student: outputs have the shapes {shapes}, and the teacher's "
                f"{expected}: remove what changes the outputs"
            )
