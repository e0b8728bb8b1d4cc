"""Times of attempts do not depend on changes of the system's clock."""

from types import SimpleNamespace

import optuna
import pytest

from runner.study import attempts as attempts_module
from runner.study.attempts import ATTEMPTS, CLOCK_CHANGED, Attempts, Used


@pytest.mark.parametrize(
    ("jump", "is_noticed"), [(0.0, False), (0.5, False), (-3600.0, True), (3600.0, True), (2.0, True)]
)
def test_a_clock_that_is_set_changes_no_duration_and_is_noticed(jump, is_noticed, monkeypatch):
    now = SimpleNamespace(monotonic=100.0, clock=1e9)
    times = SimpleNamespace(monotonic=lambda: now.monotonic, time=lambda: now.clock)
    monkeypatch.setattr(attempts_module, "time", times)
    study = optuna.create_study()
    trial = study.ask()
    never = SimpleNamespace(is_set=lambda: False)
    with Attempts(trial, 0.0, never).at(7) as attempt:
        now.monotonic += 5.0
        now.clock += 5.0 + jump
        attempt["cause"] = "done"
    (stored,) = study.trials[0].user_attrs[ATTEMPTS]
    assert stored["end"] - stored["begin"] == 5.0
    assert (CLOCK_CHANGED in stored) == is_noticed
    assert Used.by(study.trials).device_seconds == 5.0
