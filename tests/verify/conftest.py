from collections.abc import Iterator

import pytest

from runner.verify.checks.trainings import TrainingsCheck
from runner.verify.checks.updates import UpdatesCheck


@pytest.fixture
def changed_process() -> Iterator[None]:
    """For tests whose stage changes the whole process, and that undo it: later tests can compare again."""
    yield
    from runner.verify.process_effects import forget_effects

    forget_effects()


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates compare updates and trainings alone: for tests of what surrounds the checks."""
    monkeypatch.setattr("runner.verify.gate.checks_of", lambda _, plan: [UpdatesCheck(), TrainingsCheck(plan)])
