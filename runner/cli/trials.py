"""Display of a running study: the used part of its budget and the state of its trials."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from runner.cli.live import SILENT_SECONDS, LiveBar
from runner.system.console import Console
from runner.system.lines import figures

if TYPE_CHECKING:
    from runner.study.config import StudyConfig


class _Stand(NamedTuple):
    """Phase and progress of a trial, and since when both are unchanged."""

    doing: str
    figures: str
    since: float


class TrialsBar(LiveBar):
    """Shows how many trials are finished, the seconds of the budget, every trial that is trained, and the best values.

    Between trials, and until a study is ``opened``, it shows the phase.
    """

    def __init__(self, console: Console, verb: str) -> None:
        super().__init__(console, f"runner {verb}", doing="reading the study")
        self.most, self.seconds = 0, 0.0
        """The budget; zero seconds mean no limit of time."""
        self.finished, self.spent, self.told = 0, 0.0, self.started
        self.best: Mapping[str, float] = {}
        self.trials: dict[int, _Stand] = {}

    def opened(self, config: "StudyConfig") -> None:
        """The study is known."""
        self.most, self.seconds = config.budget.trials, config.budget.seconds or 0.0
        self.name, self.total = config.name, 1.0

    def standing(self, trials: int, seconds: float, best: Mapping[str, float]) -> None:
        """Updates the number of finished trials, the seconds of the budget, and the best values."""
        self.finished, self.spent, self.best, self.told = trials, seconds, best, time.monotonic()

    def trial(self, number: int, doing: str, figures: str = "") -> None:
        """Updates phase and progress of a trial; an empty phase removes the trial."""
        before = self.trials.get(number)
        if not doing:
            self.trials.pop(number, None)
        elif before is None or before[:2] != (doing, figures):
            self.trials[number] = _Stand(doing, figures, time.monotonic())

    def completed(self) -> float:
        """The share of the budget that is spent, of trials or of seconds."""
        if not self.most:
            return super().completed()
        return max(self.finished / self.most, self._spent() / self.seconds if self.seconds else 0.0)

    def counted(self) -> str:
        """Trials and seconds of the budget."""
        if not self.most:
            return super().counted()
        return f"{self.finished}/{self.most} trials, {self._spent():.0f}{f'/{self.seconds:.0f}' * bool(self.seconds)} s"

    def lines(self) -> list[str]:
        """The trials that are trained, or the phase if there are none; then the best values so far."""
        now, found = time.monotonic(), list[str]()
        for number, trial in sorted(self.trials.copy().items()):  # which another thread changes
            silent = now - trial.since
            doing = f"{trial.doing} ({silent:.0f} s)" if silent >= SILENT_SECONDS else trial.doing
            found.append(", ".join(filter(None, (f"trial {number}: {doing}", trial.figures))))
        best = figures(self.best)
        return [*(found or [self.doing(self.told)]), *([f"best so far: {best}"] if best else [])]

    def _spent(self) -> float:
        """Returns the seconds of the trials: the last reported number plus the time since then."""
        return self.spent + (time.monotonic() - self.told if self.trials else 0.0)
