"""Searches the batch size with the highest throughput on this machine."""

from typing import Annotated, ClassVar

from pydantic import Field

from runner.api import Pipeline, Plan, Probe, Setting, Stage, StageConfig, Statistical, UsageError

BATCH_SIZE = "batch_size"
"""Key of its tuning choice."""


class BatchAutotuneConfig(StageConfig):
    """Finds the batch size with the most samples per second, by real training steps in child processes.

    Doubles the recipe's batch size until memory or throughput is exhausted, then bisects between
    the best and its neighbours. A share of the memory is kept free. The number of training samples
    is unchanged: a batch four times as large means a quarter of the updates. The choice is a part
    of the run: its lock records it, and a run of the lock does not search.

    When it helps: a large GPU and a small batch.
    When it hurts: fewer, larger updates can learn less from the same data, and each trial takes seconds of start-up.
    """

    kind: ClassVar[str] = "batch_autotune"
    implementation = "BatchAutotune"
    phase: ClassVar[int] = 3
    unplanned: ClassVar[str] = "it chooses the batch size by trial"
    prepares: ClassVar[bool] = True

    largest: Annotated[int, Field(ge=1)] = 4096
    """The largest batch size to try."""
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the memory that must stay free."""
    gain: Annotated[float, Field(ge=0)] = 0.05
    """A larger batch must bring this much more samples per second, relative, to be worth it."""

    def contract(self, setting: Setting) -> Statistical:
        """Returns ``Statistical``: fewer, larger updates learn differently."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if a larger batch would not shorten the training."""
        return "this training is counted in updates" if setting.unit == "updates" else None

    def tunes(self, setting: Setting) -> bool:
        """Returns True: the fastest batch size depends on the machine."""
        return True


class BatchAutotune(Stage):
    """Tries batch sizes in child processes."""

    def prepare(self, plan: Plan) -> None:
        """Replaces the batch size by what the trials found best, or by what the run's lock records.

        Raises:
            UsageError: Not even the recipe's batch size leaves the headroom free.
        """
        start = plan.batch_size
        recorded = plan.choices.get(BATCH_SIZE)
        if recorded is not None:
            plan.batch_size = self._checked(recorded, start)
            plan.note(f"batch size {start} -> {recorded}, as recorded in the lock")
            return
        self.tried: dict[int, Probe | None] = {}
        best = self._bisect(plan, self._double(plan, start))
        plan.choices.record(BATCH_SIZE, best)
        if best == start:
            plan.note(f"batch size {start} is the best found")
            return
        plan.note(
            f"batch size {start} -> {best} at {self._speed(plan, best):,.0f} samples/s instead of "
            f"{self._speed(plan, start):,.0f}, and {start / best:.3g} times the updates"
        )
        plan.batch_size = best

    def _checked(self, recorded: object, start: int) -> int:
        """Returns a recorded batch size.

        Raises:
            UsageError: It is none that the search can select.
        """
        largest = max(start, self.config.largest)
        if type(recorded) is not int or not start <= recorded <= largest:
            expected = f"a batch size from {start} to {largest}"
            message = f"the lock records {recorded!r:.40}, should be {expected}"
            raise UsageError(f"batch_autotune: {message}: search again with --retune")
        return recorded

    def attach(self, pipeline: Pipeline) -> None:
        """Changes nothing: the batch size is set before the pipeline is built."""

    def _double(self, plan: Plan, start: int) -> int:
        """Returns the best of the batch sizes that result from doubling the first one."""
        if self._speed(plan, start) == 0:
            raise UsageError(
                f"a batch of {start} does not leave {self.config.headroom:.0%} of the memory free; lower it"
            )
        best = start
        while best * 2 <= self.config.largest and self._is_better(plan, best * 2, best):
            best *= 2
        return best

    def _bisect(self, plan: Plan, best: int) -> int:
        """Searches between the best and its neighbours, twice."""
        width = best // 2
        for _ in range(2):
            # The distance to the smaller neighbour is half of that to the larger one.
            for size in (best + width, best - width // 2):
                is_allowed = plan.batch_size < size <= self.config.largest
                if is_allowed and self._is_better(plan, size, best):
                    best = size
                    break
            width //= 2
        return best

    def _is_better(self, plan: Plan, size: int, best: int) -> bool:
        required = self._speed(plan, best) * (1 + self.config.gain)
        return bool(self._speed(plan, size) > required)

    def _speed(self, plan: Plan, batch_size: int) -> float:
        """Returns samples per second; 0 if the memory is not sufficient."""
        # A trial starts a process, and the search compares a size several times.
        if batch_size not in self.tried:
            self.tried[batch_size] = plan.probe(batch_size)
        probe = self.tried[batch_size]
        if probe is None:
            return 0.0
        if probe.peak_bytes > (1 - self.config.headroom) * probe.limit_bytes:
            return 0.0
        return probe.samples_per_second
