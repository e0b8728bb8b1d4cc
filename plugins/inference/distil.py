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

    from .network import Question

LARGEST_GRADIENT = 1.0
"""To whose norm the student's are clipped."""


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
    phase: ClassVar[int] = 1

    layers: Count = 2
    """Of the student."""
    updates: Count = 1000
    """Of its training."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Initial learning rate; it ends at zero."""

    def contract(self, setting: Setting) -> Statistical:
        """The student errs."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """A UsageError without layers to leave out."""
        whole = getattr(setting.model, "layers", None)
        if not isinstance(whole, int):
            raise UsageError(
                f"layers: learner '{setting.model.kind}' has no setting of that name"
            )
        if self.layers >= whole:
            raise UsageError(
                f"layers: {self.layers} should be fewer than the {whole} of the model"
            )
        return None

    def implementation(self) -> type[Stage]:
        """Teacher and student."""
        return Distil


class Distil(Stage):
    """Puts a student in the place of the network."""

    def attach(self, pipeline: Pipeline) -> None:
        """Makes the student, trains it or finds it, and lets the learner answer by it.

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
        learner.configure_optimizers()
        before = parameters(teacher)
        left = parameters(learner.module)
        asked = next(_lessons(learner, teacher, pipeline))
        off = _error(learner.module, asked).detach() / _size(asked)
        pipeline.note(
            f"{config.layers} of {learner.config.layers} layers: {before:,} parameters are "
            f"{left:,} "
            f"({left / before:.2f}x); answers are off by {float(off) ** 0.5:.1%} of their size"
        )

    def _student(self, learner: GradientLearner) -> nn.Module:
        """A copy of the network with some of its layers, among them the first and the last."""
        blocks = list(learner.blocks())
        whole = learner.config.layers
        homes = [
            name
            for name, module in learner.module.named_modules()
            if list(module.children()) == blocks
        ]
        if len(blocks) != whole or not homes:
            kind = learner.config.kind
            raise UsageError(
                f"distil: layers: learner '{kind}' has {whole}, and {len(blocks)} blocks "
                f"(Learner.blocks)"
            )
        last = whole - 1
        of = max(1, self.config.layers - 1)
        kept = {round(place * last / of) for place in range(self.config.layers)}
        student = deepcopy(learner.module)
        home: Any = student.get_submodule(homes[0])
        for place in reversed(range(whole)):
            if place not in kept:
                del home[place]
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
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(learner.context.seed)
            for done, asked in enumerate(islice(lessons, updates)):
                optimizer.param_groups[0]["lr"] = self.config.lr * (1 - done / updates)
                optimizer.zero_grad()
                _error(student, asked).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                torch.nn.utils.clip_grad_norm_(student.parameters(), LARGEST_GRADIENT)
                optimizer.step()


def _lessons(
    learner: GradientLearner, teacher: nn.Module, pipeline: Pipeline
) -> Iterator[Question]:
    """Yields the calls of the network by the run's loss for one batch after the other,
    with the teacher's outputs.
    """
    import torch

    from .network import Question, asking

    for batch, noise in pipeline.batches():
        calls: list[Question] = []

        def answer(*inputs: Any, calls: list[Question] = calls) -> Any:
            calls.append(Question(inputs, teacher(*inputs)))
            return calls[-1].output

        with torch.no_grad(), asking(learner, answer):
            learner.slots.loss(batch, noise, Progress("updates", 1, updates=1))
        yield from calls


def _error(student: nn.Module, asked: Question) -> Tensor:
    """The mean squared difference of every output, added up."""
    import torch

    pairs = zip(tensors(student(*asked.inputs)), tensors(asked.output), strict=True)
    return torch.stack([(one - other).square().mean() for one, other in pairs]).sum()


def _size(asked: Question) -> Tensor:
    """Returns the error of outputs that are zero."""
    import torch

    return torch.stack(
        [output.square().mean() for output in tensors(asked.output)]
    ).sum()
