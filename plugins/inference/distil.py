"""A smaller student that answers like its teacher."""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from runner.api import (
    LearnerConfig,
    Pipeline,
    Setting,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
)

from ..settings import Count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from runner.api import GradientLearner

    from .lessons import Lesson

LARGEST_GRADIENT = 1.0
"""Norm to which the student's gradients are clipped."""


LAYERS = 2
"""Layers of a student whose settings are not configured."""


class DistilConfig(StageConfig):
    """Trains a smaller network to predict like the complete one, and uses it instead (Hinton et al.
    2015).

    The student starts with some of its teacher's layers, evenly selected; or, with ``student``, as
    a new model, which takes over what the loss uses outside of the slot ``forward`` (an encoder of
    conditions). It is trained on the inputs of the run's training: the same
    batches, the same noise. Without ``temperature``, its loss is the squared error of its outputs
    (arXiv 1503.02531). With it, for classifiers and language models, the loss is ``(1 - labels)``
    times T^2 times the divergence of the softened probabilities of both networks, plus ``labels``
    times the run's loss on the labels. The student is stored in the run's folder, by a digest of
    teacher and settings, so that it is trained once.

    When it helps: answers that take many evaluations, and deep networks of a task that is not.
    When it hurts: the first answer waits for a training; and a student that is too small is worse
    for good.
    """

    kind: ClassVar[str] = "distil"
    implementation = "Distil"
    phase: ClassVar[int] = 1
    # Students that were stored before these settings existed stay valid.
    omitted: ClassVar[frozenset[str]] = frozenset({"student", "temperature", "labels"})

    layers: Count | None = None
    """Layers of the teacher that the student has; 2 without ``student``."""
    student: dict[str, Any] = Field(default_factory=dict)
    """Settings of the model in which the student differs, instead of ``layers``:
    ``{widths: [8]}``. It starts with random weights.
    """
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Divisor of the logits of both networks (T, for example 3); null compares outputs by their
    squared error.
    """
    labels: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of the loss on the labels, with ``temperature``; 1 trains the student alone."""
    updates: Count = 1000
    """Updates of its training."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Initial learning rate; it ends at zero."""

    @field_validator("student")
    @classmethod
    def _replaces_layers(
        cls, student: dict[str, Any], info: ValidationInfo
    ) -> dict[str, Any]:
        if student and info.data.get("layers") is not None:
            raise ValueError("set either layers or student, not both")
        return student

    @field_validator("labels")
    @classmethod
    def _needs_a_temperature(cls, labels: float, info: ValidationInfo) -> float:
        if labels and info.data.get("temperature", labels) is None:
            raise ValueError("needs temperature; set temperature: 1 to soften nothing")
        return labels

    def contract(self, setting: Setting) -> Statistical:
        """Returns ``Statistical``: the student approximates its teacher."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns None; raises a UsageError if the model cannot have such a student."""
        model = setting.model
        if self.temperature is not None and not model.classifies:
            raise UsageError(
                f"temperature: learner '{model.kind}' has no logits of classes; remove it"
            )
        if self.student:
            student_settings(model, self.student)
            return None
        layers = getattr(model, "layers", None)
        if not isinstance(layers, int):
            raise UsageError(
                f"layers: learner '{model.kind}' has no setting of that name; configure "
                "the settings that make it smaller with student"
            )
        if self.kept_layers >= layers:
            raise UsageError(
                f"layers: {self.kept_layers} should be fewer than the {layers} of the model"
            )
        return None

    @property
    def kept_layers(self) -> int:
        """Returns the layers of a student that starts with those of its teacher."""
        return LAYERS if self.layers is None else self.layers


def student_settings(model: LearnerConfig, changes: Mapping[str, Any]) -> LearnerConfig:
    """Returns the settings of a model with changes.

    Raises:
        UsageError: The model has no such setting, or a value is not allowed.
    """
    try:
        return type(model).model_validate({**model.model_dump(), **changes})
    except ValidationError as error:
        problem = error.errors()[0]
        path = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        message = f"{message[0].lower()}{message[1:]}"
        if problem["type"] == "extra_forbidden":
            message = f"learner '{model.kind}' has no setting of that name"
        raise UsageError(f"student.{path}: {message}") from None


class Distil(Stage):
    """Replaces the network by a student."""

    def attach(self, pipeline: Pipeline) -> None:
        """Makes the student, trains or loads it, and replaces the network by it.

        Raises:
            UsageError: The learner is not one network, or its layers cannot be determined.
        """
        from .lessons import (
            check_outputs,
            copy_weights,
            lessons,
            size,
            squared_error,
            weights_outside_forward,
        )
        from .network import digest, parameters, replaced, settled, trained

        config = self.config
        learner = settled(pipeline, config.kind)
        teacher = learner.module.eval()
        teacher_settings = learner.config
        key = digest(
            teacher,
            config.model_dump(),
            teacher_settings.model_dump(),
            learner.context.seed,
        )
        if config.student:
            example = next(lessons(learner, teacher, pipeline))
            outside = weights_outside_forward(learner, example)
            student = self._new_student(learner, pipeline)
            copy_weights(outside, student)
        else:
            student = self._shallower_student(learner)
        replaced(learner, student)
        if config.student:
            check_outputs(learner.module, next(lessons(learner, teacher, pipeline)))
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
        example = next(lessons(learner, teacher, pipeline))
        error = squared_error(learner.module, example).detach()
        deviation = float(error / size(example)) ** 0.5
        layers = (
            ""
            if config.student
            else f"{config.kept_layers} of {teacher_settings.layers} layers: "
        )
        pipeline.note(
            f"{layers}{teacher_size:,} parameters are "
            f"{student_size:,} ({student_size / teacher_size:.2f}x); "
            f"answers are off by {deviation:.1%} of their size"
        )

    def _new_student(self, learner: GradientLearner, pipeline: Pipeline) -> nn.Module:
        """Returns a network of the configured settings, with weights that follow from the seed.

        The learner has these settings afterwards.
        """
        import torch

        from .network import parameters

        teacher_size = parameters(learner.module)
        settings = student_settings(learner.config, self.config.student)
        seed = learner.context.generator("parameters", "cpu").initial_seed()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            student = learner.build(settings, pipeline.source.shapes, learner.context)
        student_size = parameters(student)
        if student_size >= teacher_size:
            raise UsageError(
                f"distil: student: {student_size:,} parameters should be fewer than the "
                f"{teacher_size:,} of the teacher"
            )
        learner.config = settings
        return student

    def _shallower_student(self, learner: GradientLearner) -> nn.Module:
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
        intervals = max(1, self.config.kept_layers - 1)
        kept_layers = {
            round(index * last_index / intervals)
            for index in range(self.config.kept_layers)
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

        from .lessons import lessons

        student = learner.module
        updates = self.config.updates
        optimizer = torch.optim.AdamW(
            student.parameters(), self.config.lr, weight_decay=0.0
        )
        # The student must not change the run's sequence of random numbers.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(learner.context.seed)
            batches = lessons(learner, teacher, pipeline)
            for update, lesson in enumerate(islice(batches, updates)):
                optimizer.param_groups[0]["lr"] = self.config.lr * (
                    1 - update / updates
                )
                optimizer.zero_grad()
                self._loss(learner, lesson).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                torch.nn.utils.clip_grad_norm_(student.parameters(), LARGEST_GRADIENT)
                optimizer.step()

    def _loss(self, learner: GradientLearner, lesson: Lesson) -> Tensor:
        """Returns the configured loss of the student."""
        from .lessons import softened_loss, squared_error

        config = self.config
        if config.temperature is None:
            return squared_error(learner.module, lesson)
        return softened_loss(learner, lesson, config.temperature, config.labels)
