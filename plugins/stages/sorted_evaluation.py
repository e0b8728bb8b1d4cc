"""Evaluates held-out samples in the order of their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from runner.api import Close, DatasetConfig, Pipeline, RunnerError, Setting, Stage, StageConfig, nbytes

from .bucketing import nothing_is_padded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from runner.api import Batch, DatasetSource, Learner, Mean


class SortedEvaluationConfig(StageConfig):
    """Evaluates held-out samples in the order of their sizes: a batch has samples of about one size,
    and little padding.

    Updates are the same. Metrics are sums over all samples, so they are the same, too, except for
    their rounding. A sample's size is the bytes of a batch that has it alone. Sizes are read once,
    before the training.

    Random numbers of an evaluation follow the number of the batch, so that samples would get
    others. A learner with ``noise``, or held-out samples that are random, make the stage inactive;
    ``metrics`` that use random numbers are refused.

    When it helps: sizes differ much, and held-out data have many batches.
    When it hurts: one held-out batch, whose padding is that of its largest sample in any order; or
    samples that take long to make, because each is made once more.
    """

    kind: ClassVar[str] = "sorted_evaluation"
    implementation = "SortedEvaluation"
    phase: ClassVar[int] = 1

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: updates are the same, and sums of an evaluation have another order."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if samples are of one size, or may not be read before a training."""
        data = setting.data
        if not isinstance(data, DatasetConfig):
            return f"'{data.kind}' is not a dataset: nothing is held out"
        if not data.shapes_vary:
            return nothing_is_padded(data)
        if data.workers:
            return "data.workers read the samples, and this process would have to read them first"
        return None


class SortedEvaluation(Stage):
    """Sorts the held-out and the test samples."""

    def attach(self, pipeline: Pipeline) -> None:
        """Selects the samples in another order."""
        from runner.api import Learner, has_numbers

        source = cast("DatasetSource", pipeline.source)
        if not has_numbers(source.held_out):
            kind = type(source.held_out).__name__
            pipeline.deactivate(f"{kind} is a stream, whose samples have no numbers")
            return
        learner = pipeline.learner
        name = type(learner).__name__
        for method in ("noise", "held_out_noise"):
            if getattr(type(learner), method) is not getattr(Learner, method):
                pipeline.deactivate(f"{name}.{method} gives each sample random numbers by its place in a batch")
                return
        source.replace_data(source.train, source.held_out)
        order = _order(source)
        test_order = None
        if has_numbers(source.test):
            with source.testing():
                test_order = _order(source)
        if order is None or (test_order is None and has_numbers(source.test)):
            reason = f"held-out samples of '{source.config.kind}' use random numbers, which follow their batch"
            pipeline.deactivate(reason)
            return
        source.select(held_out=order, test=test_order)
        _Refusal(learner)


class _Refusal:
    """Raises a RunnerError if metrics of held-out batches use random numbers.

    Args:
        learner: A learner without noise, whose ``metrics`` are wrapped.
    """

    def __init__(self, learner: Learner) -> None:
        import torch

        from runner.api import find_generators

        self.learner = learner
        self.step = learner.metrics
        self.generators = find_generators(learner)
        if learner.device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[learner.device.index or 0])
        learner.metrics = self.metrics  # type: ignore[method-assign]
        learner.held_out_noise = self.held_out_noise  # type: ignore[method-assign]

    def held_out_noise(self, batch: Batch) -> Batch:
        """Returns no noise, without drawing a seed of it, which would be a use of random numbers."""
        return {}

    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Returns the metrics of a held-out batch."""
        from runner.api import HostGeneratorStates

        created = self.learner.context.generators
        names = set(created)
        states = HostGeneratorStates([*self.generators, *created.values()])
        metrics = self.step(batch)
        if states.have_changed() or names != created.keys():
            problem = f"{type(self.learner).__name__}.metrics uses random numbers"
            raise RunnerError(
                f"sorted_evaluation: {problem}, which a held-out sample gets by its place in a batch, "
                "and another order would change them; switch the stage off"
            )
        return metrics


def _order(source: DatasetSource) -> Tensor | None:
    """Returns the numbers of the held-out samples, the smallest first; None if they are random."""
    import torch

    from runner.api import HostGeneratorStates, find_generators

    data: Any = source.held_out
    states = HostGeneratorStates(find_generators(data, source.collate))
    sizes = [nbytes(source.collate([data[number]])) for number in range(len(data))]
    if states.have_changed():
        states.restore()
        return None
    # Samples of one size keep their order.
    return torch.tensor(sizes).argsort(stable=True)
