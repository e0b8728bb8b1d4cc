"""The batch size that this machine likes best."""

from typing import Annotated, ClassVar

from pydantic import Field

from runner.api import Config, Pipeline, Plan, Probe, Stage, Statistical


class BatchAutotune(Stage):
    """Finds the batch size with the most samples per second, by real training steps in child processes.

    Doubles the recipe's batch size until memory or throughput says stop, then bisects between the best and its
    neighbours. A share of the memory is kept free. The number of samples replayed for every environment step is kept:
    a batch four times as large means a quarter of the updates.

    When it helps: a large GPU and a small batch.
    When it hurts: fewer, larger updates can learn less from the same data, and each trial takes seconds of start-up.
    """

    kind: ClassVar[str] = "batch_autotune"
    phase: ClassVar[int] = 3
    contract = Statistical("return", 0.05)

    class Config(Config):
        """Where to stop."""

        largest: Annotated[int, Field(ge=1)] = 4096
        """The largest batch size to try."""
        headroom: Annotated[float, Field(ge=0, lt=1)] = 0.2
        """Share of the memory that must stay free."""
        gain: Annotated[float, Field(ge=0)] = 0.05
        """A larger batch must bring this much more samples per second, relative, to be worth it."""

    config: Config

    def prepare(self, plan: Plan) -> None:
        """Replaces batch size and update ratio by what the trials found best."""
        start = plan.batch_size
        best = self._search(plan, start)
        if best == start:
            plan.note(f"batch size {start} is the best found")
            return
        ratio = plan.updates_per_step * start / best
        plan.note(
            f"batch size {start} -> {best} at {self._speed(best):,.0f} instead of {self._speed(start):,.0f} samples/s; "
            f"updates per step {plan.updates_per_step:g} -> {ratio:g}, so that each step is replayed as often"
        )
        plan.batch_size, plan.updates_per_step = best, ratio

    def attach(self, pipeline: Pipeline) -> None:
        """Holds no slot: its work is done before anything is built."""

    def _search(self, plan: Plan, start: int) -> int:
        self.tried: dict[int, Probe | None] = {}
        best = size = start
        self._try(plan, start)
        while size * 2 <= self.config.largest:
            size *= 2
            self._try(plan, size)
            if self._speed(size) <= self._speed(best) * (1 + self.config.gain):
                break
            best = size
        for middle in (best * 3 // 4, best * 3 // 2):
            if start < middle <= self.config.largest:
                self._try(plan, middle)
                if self._speed(middle) > self._speed(best) * (1 + self.config.gain):
                    best = middle
        return best

    def _try(self, plan: Plan, batch_size: int) -> None:
        if batch_size not in self.tried:
            self.tried[batch_size] = plan.probe(batch_size)

    def _speed(self, batch_size: int) -> float:
        """Samples per second, 0 where memory does not suffice."""
        probe = self.tried[batch_size]
        if probe is None or probe.peak_bytes > (1 - self.config.headroom) * probe.limit_bytes:
            return 0.0
        return probe.samples_per_second
