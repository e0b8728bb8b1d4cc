from collections.abc import Iterator

import pytest


@pytest.fixture
def changed_process() -> Iterator[None]:
    """For tests whose stage changes the whole process, and that undo it: later tests can compare again."""
    yield
    from runner.verify.process_effects import forget_effects

    forget_effects()
