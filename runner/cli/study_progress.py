"""Display of a running study: the used part of its budget and the state of its trials."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from runner.cli.live import SILENT_SECONDS, LiveBar
from runner.system.console import Console
from runner.system.text_lines import figures

if TYPE_CHECKING:
    from runner.study.config import StudyConfig


class _TrialState(NamedTuple):
    """Phase and progress of a trial, and when one of them has changed last."""

    doing: str
    figures: str
    change_time: float


class TrialsBar(LiveBar):
    """Shows how many trials are finished, the seconds of the budget, every trial that is trained, and the best values.

    Between trials, and until a study is ``opened``, it shows the phase.
    """

    def __init__(self, console: Console, verb: str) -> None:
        super().__init__(console, f"runner {verb}", doing="reading the study")
        self.most = 0
        """Trials of the budget."""
        self.seconds = 0.0
        """Seconds of the budget; zero means no limit of time."""
        self.finished = 0
        self.spent = 0.0
        self.report_time = self.started
        self.best: Mapping[str, float] = {}
        self.trials: dict[int, _TrialState] = {}

    def opened(self, config: "StudyConfig") -> None:
        """Stores name and budget of the study."""
        self.most = config.budget.trials
        self.seconds = config.budget.seconds or 0.0
        self.name = config.name
        self.total = 1.0

    def standing(self, trials: int, seconds: float, best: Mapping[str, float]) -> None:
        """Updates the number of finished trials, the seconds of the budget, and the best values."""
        self.finished = trials
        self.spent = seconds
        self.best = best
        self.report_time = time.monotonic()

    def trial(self, number: int, doing: str, figures: str = "") -> None:
        """Updates phase and progress of a trial; an empty phase removes the trial."""
        previous = self.trials.get(number)
        if not doing:
            self.trials.pop(number, None)
        elif previous is None or previous[:2] != (doing, figures):
            self.trials[number] = _TrialState(doing, figures, time.monotonic())

    def completed(self) -> float:
        """The share of the budget that is spent, of trials or of seconds."""
        # Before the study is opened, its budget is unknown.
        if not self.most:
            return super().completed()
        share_of_trials = self.finished / self.most
        share_of_seconds = self._spent() / self.seconds if self.seconds else 0.0
        return max(share_of_trials, share_of_seconds)

    def counted(self) -> str:
        """Trials and seconds of the budget."""
        if not self.most:
            return super().counted()
        limit = f"/{self.seconds:.0f}" if self.seconds else ""
        return f"{self.finished}/{self.most} trials, {self._spent():.0f}{limit} s"

    def lines(self) -> list[str]:
        """The trials that are trained, or the phase if there are none; then the best values so far."""
        current_time = time.monotonic()
        lines = []
        # A copy, because another thread changes it.
        for number, trial in sorted(self.trials.copy().items()):
            silent = current_time - trial.change_time
            doing = f"{trial.doing} ({silent:.0f} s)" if silent >= SILENT_SECONDS else trial.doing
            lines.append(", ".join(filter(None, (f"trial {number}: {doing}", trial.figures))))
        if not lines:
            lines.append(self.doing(self.report_time))
        best = figures(self.best)
        if best:
            lines.append(f"best so far: {best}")
        return lines

    def _spent(self) -> float:
        """Returns the seconds of the trials: the last reported number plus the time since then."""
        if not self.trials:
            return self.spent
        return self.spent + time.monotonic() - self.report_time
