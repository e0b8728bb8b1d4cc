"""What a person is told after a signal has interrupted code that does not return."""

import signal
from types import SimpleNamespace

import pytest

from runner.training.interruption import interruptible
from runner.training.signals import StopNow


@pytest.mark.parametrize(
    ("names", "state"),
    [
        ((), "there is no checkpoint yet, it starts again by: runner resume this"),
        (("step-000000000002",), "the newest checkpoint is resumed by: runner resume this"),
        (("damaged-step-000000000002",), "there is no checkpoint yet"),
    ],
)
def test_the_warning_says_whether_a_checkpoint_is_there(tmp_path, caplog, names, state):
    for name in names:
        (tmp_path / name).mkdir()
    loop = SimpleNamespace(writer=SimpleNamespace(folder=tmp_path), resume_command="runner resume this")
    with interruptible(loop, SimpleNamespace(received=signal.SIGINT)):
        raise StopNow
    assert "SIGINT interrupted" in caplog.text
    assert state in caplog.text
