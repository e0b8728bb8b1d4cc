from collections.abc import Iterator

import pytest

from runner.plugins.sequences.text import help_texts
from runner.verify.checks.trainings import TrainingsCheck
from runner.verify.checks.updates import UpdatesCheck

CHARACTERS = 100_000
"""Characters of a synthetic text."""


@pytest.fixture(scope="module")
def short_texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Synthetic texts of this process are a seventh of Python's help texts: evaluations are as much shorter."""
    path = tmp_path_factory.mktemp("texts") / "topics.txt"
    path.write_text(help_texts().read_text(encoding="utf-8")[:CHARACTERS], encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.plugins.sequences.text.help_texts", lambda: path)
        yield


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
