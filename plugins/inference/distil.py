"""A student with fewer layers that answers like its teacher."""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from runner.api import (
    Pipeline,
    Progress,
    Setting,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
    tensors,
)

from ..settings import Count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from runner.api import GradientLearner

    from .network import ForwardCall

LARGEST_GRADIENT = 1.0
"""Norm to which the student's gradients are clipped."""


class DistilConfig(StageConfig):
    """Trains a network with fewer layers to predict like the complete one, and uses it instead
    (Hinton et al. 2015).

    The student starts with some of its teacher's layers, evenly selected, and learns by the squared
    error of its outputs (arXiv 1503.02531) for the inputs of the run's training: the same batches,
    the same noise. It is stored in the run's folder, by a digest of teacher and settings, so that
    it is trained once.

    When it helps: answers that take many evaluations, and deep networks of a task that is not.
    When it hurts: the first answer waits for a training; and a student that is too small is worse
    for good.
    """

    kind: ClassVar[str] = "distil"
    implementation = "Distil"
    phase: ClassVar[int] = 1

    layers: Count = 2
    """Layers of the student."""
    updates: Count = 1000
    """Updates of its training."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Initial learning rate; it ends at zero."""

    def contract(self, setting: Setting) -> Statistical:
        """Returns ``Statistical``: the student approximates its teacher."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns None; raises a UsageError if there are no layers to leave out."""
        layers = getattr(setting.model, "layers", None)
        if not isinstance(layers, int):
            raise UsageError(
                f"layers: learner '{setting.model.kind}' has no setting of that name"
            )
        if self.layers >= layers:
            raise UsageError(
                f"layers: {self.layers} should be fewer than the {layers} of the model"
            )
        return None


class Distil(Stage):
    """Replaces the network by a student."""

    def attach(self, pipeline: Pipeline) -> None:
        """Makes the student, trains or loads it, and replaces the network by it.

        Raises:
            UsageError: The learner is not one network, or its layers cannot be determined.
        """
        from .network import digest, parameters, replaced, settled, trained

        config = self.config
        learner = settled(pipeline, config.kind)
        teacher = learner.module.eval()
        key = digest(
            teacher,
            config.model_dump(),
            learner.config.model_dump(),
            learner.context.seed,
        )
        replaced(learner, self._student(learner))
        trained(
            pipeline,
            self,
            f"{config.kind}-{key}",
            learner.module,
            lambda: self._train(learner, teacher, pipeline),
        )
        # The optimizers hold the parameters of the teacher.
        learner.configure_optimizers()
        teacher_size = parameters(teacher)
        student_size = parameters(learner.module)
        example = next(_lessons(learner, teacher, pipeline))
        deviation = _error(learner.module, example).detach() / _size(example)
        pipeline.note(
            f"{config.layers} of {learner.config.layers} layers: {teacher_size:,} parameters are "
            f"{student_size:,} ({student_size / teacher_size:.2f}x); "
            f"answers are off by {float(deviation) ** 0.5:.1%} of their size"
        )

    def _student(self, learner: GradientLearner) -> nn.Module:
        """Returns a copy of the network with some of its layers, including first and last."""
        blocks = list(learner.blocks())
        layers = learner.config.layers
        containers = [
            name
            for name, module in learner.module.named_modules()
            if list(module.children()) == blocks
        ]
        if len(blocks) != layers or not containers:
            kind = learner.config.kind
            raise UsageError(
                f"distil: layers: learner '{kind}' has {layers}, and {len(blocks)} blocks "
                f"(Learner.blocks)"
            )
        last_index = layers - 1
        intervals = max(1, self.config.layers - 1)
        kept_layers = {
            round(index * last_index / intervals) for index in range(self.config.layers)
        }
        student = deepcopy(learner.module)
        container: Any = student.get_submodule(containers[0])
        # From the end, so that the remaining indices stay valid.
        for index in reversed(range(layers)):
            if index not in kept_layers:
                del container[index]
        return student

    def _train(
        self, learner: GradientLearner, teacher: nn.Module, pipeline: Pipeline
    ) -> None:
        """Moves the student's answers towards the teacher's."""
        import torch

        student = learner.module
        updates = self.config.updates
        optimizer = torch.optim.AdamW(
            student.parameters(), self.config.lr, weight_decay=0.0
        )
        lessons = _lessons(learner, teacher, pipeline)
        # The student must not change the run's sequence of random numbers.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(learner.context.seed)
            for update, call in enumerate(islice(lessons, updates)):
                optimizer.param_groups[0]["lr"] = self.config.lr * (
                    1 - update / updates
                )
                optimizer.zero_grad()
                _error(student, call).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                torch.nn.utils.clip_grad_norm_(student.parameters(), LARGEST_GRADIENT)
                optimizer.step()


def _lessons(
    learner: GradientLearner, teacher: nn.Module, pipeline: Pipeline
) -> Iterator[ForwardCall]:
    """Yields the calls of the network by the run's loss for one batch after the other,
    with the teacher's outputs.
    """
    import torch

    from .network import ForwardCall, forward_replaced

    for batch, noise in pipeline.batches():
        calls: list[ForwardCall] = []

        def answer(*inputs: Any, calls: list[ForwardCall] = calls) -> Any:
            calls.append(ForwardCall(inputs, teacher(*inputs)))
            return calls[-1].output

        with torch.no_grad(), forward_replaced(learner, answer):
            learner.slots.loss(batch, noise, Progress("updates", 1, updates=1))
        yield from calls


def _error(student: nn.Module, call: ForwardCall) -> Tensor:
    """Returns the sum of the mean squared differences of all outputs."""
    import torch

    predictions = tensors(student(*call.inputs))
    pairs = zip(predictions, tensors(call.output), strict=True)
    errors = [(prediction - target).square().mean() for prediction, target in pairs]
    return torch.stack(errors).sum()


def _size(call: ForwardCall) -> Tensor:
    """Returns the error of outputs that are zero."""
    import torch

    return torch.stack(
        [output.square().mean() for output in tensors(call.output)]
    ).sum()
