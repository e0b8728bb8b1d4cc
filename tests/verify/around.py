"""Stages that leave the update alone and harm what is around it."""

from functools import cache
from typing import Any, ClassVar

import torch

from runner.api import Close, Exact, Stage, StageConfig
from runner.system.tensor_trees import map_tensors


class AroundConfig(StageConfig):
    """Takes hold of the forward, the transfer and the drawing."""

    kind: ClassVar[str] = "around"
    implementation = "Around"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"forward", "next_batch", "transfer"})

    harm: str = ""
    """What it does beyond calling them."""
    promise: str = "exact"
    """What it says."""

    def contract(self, setting):
        return Exact() if self.promise == "exact" else Close()


class Around(Stage):
    """Harms."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.harm, self.drawn, self.ahead = config.harm, 0, []

    def attach(self, pipeline: Any) -> None:
        source, learner, harm = pipeline.source, pipeline.learner, self.config.harm
        for name in ("forward", "next_batch", "transfer"):
            pipeline.slots.wrap(name, lambda step, name=name: lambda *given: self.changed(name, step(*given)))
        self.module, self.stream = learner.module, source._batches(pipeline.batch_size, 0, epochs_count=False)
        if harm == "unbuilt":
            raise AttributeError("nothing there")
        if harm == "shorter":
            pipeline.progress.length //= 2
        if harm == "remembered":
            remembered = cache(source.evaluate)
            source.evaluate = lambda learner: dict(remembered(learner))
        if harm == "ahead":
            pipeline.slots.wrap("next_batch", lambda step: lambda *given: self.prefetched(step, *given))
        if harm == "third_evaluation":
            source.evaluate = LateEvaluation(source.evaluate)
        if harm in ("single_left_out", "padded"):
            batches = source.held_out_batches
            source.held_out_batches = lambda: self.wrong_batches(source, batches())
        if harm == "held_out_changed":
            source.evaluate = ChangedSamples(source)
        if harm == "evaluation":
            evaluate = source.evaluate
            source.evaluate = lambda learner: {name: 0.99 * value for name, value in evaluate(learner).items()}
        if harm == "unevaluable":
            source.evaluate = lambda learner: {}["nothing"]
        if harm == "statistics":
            source.statistics = lambda: {"seen": float(self.drawn)}
        if harm == "counts":
            counts = source.counts
            source.counts = lambda batch: {unit: 2 * number for unit, number in counts(batch).items()}
        if harm == "stuck":
            own = source.counts
            source.counts = lambda batch: own(batch) if self.drawn <= 3 else {}
        if harm == "noise":
            noise = learner.noise
            learner.noise = lambda batch, generator: {**noise(batch, generator), "more": torch.zeros(1)}
        if harm == "draws_more":
            generator = pipeline.learner.context.generator("noise")
            noise = learner.noise
            learner.noise = lambda batch, given: (torch.rand(1, generator=generator), noise(batch, given))[1]

    def changed(self, name: str, output: Any) -> Any:
        if name == "forward" and not torch.is_grad_enabled():
            wrong = self.harm == "alone" and len(output) == 1
            wrong |= self.harm == "when_evaluated" and not self.module.training
            wrong |= self.harm == "while_training" and self.module.training
            return 1.01 * output if wrong else output
        self.drawn += name == "next_batch"
        if name == "next_batch" and self.harm == "late" and self.drawn > 12:
            return map_tensors(lambda tensor: tensor.flip(0), output)
        if name == "next_batch" and self.harm == "from_start":
            return next(self.stream)
        if name == "next_batch" and self.harm == "fewer":
            return map_tensors(lambda tensor: tensor[:-1], output)
        if name == "transfer" and self.harm == "moved":
            return map_tensors(lambda tensor: (tensor + 1) % 3, output)
        return output

    def wrong_batches(self, source: Any, batches: Any) -> Any:
        for batch in batches:
            rows = source.size(batch)
            if self.harm == "padded" and rows < source.context.batch_size:
                yield source.take(batch, torch.arange(source.context.batch_size) % rows)
            elif self.harm == "padded" or rows > 1:
                yield batch

    def prefetched(self, step: Any, *given: Any) -> Any:
        while len(self.ahead) < 2:
            self.ahead.append(step(*given))
        return self.ahead.pop(0)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": slice(1)} if self.harm == "unkept" else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ahead.clear()

    def closing_notes(self) -> list[str]:
        return [f"{1 / (self.harm != 'notes')}"]


class LateEvaluation:
    """Returns the second evaluation again from the third on."""

    def __init__(self, evaluate: Any) -> None:
        self.evaluate, self.metrics, self.count = evaluate, {}, 0

    def __call__(self, learner: Any) -> dict[str, float]:
        self.count += 1
        if self.count <= 2:
            self.metrics = self.evaluate(learner)
        return dict(self.metrics)


class ChangedSamples:
    """Changes a label that is held out after the second evaluation."""

    def __init__(self, source: Any) -> None:
        self.source, self.evaluate, self.count = source, source.evaluate, 0

    def __call__(self, learner: Any) -> dict[str, float]:
        metrics = self.evaluate(learner)
        self.count += 1
        if self.count == 2:
            batch = next(iter(self.source.held_out_batches()))
            self.source.held_out_batches = lambda: iter([{**batch, "label": (batch["label"] + 1) % 3}])
        return metrics
