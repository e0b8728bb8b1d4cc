"""The end of a command on several processes: its exit code, and what is printed here."""

import itertools
import json
from dataclasses import asdict
from signal import Signals
from types import SimpleNamespace

import pytest

from runner.distributed.launch import _exit_code
from runner.distributed.membership import EXIT_FILE
from runner.distributed.process_group import FAILURE_FILE, PeerFailure

ENDED = "process 1 of 2 has ended"


def failing(**codes):
    return {int(name[1:]): SimpleNamespace(exitcode=code) for name, code in codes.items()}


@pytest.mark.parametrize(
    ("failure", "ending", "failures", "received", "code", "printed"),
    [
        (None, 0, {}, None, 0, ""),
        (None, 143, failing(r0=143, r1=143), None, 143, ""),
        (None, 75, {}, Signals.SIGTERM, 75, ""),
        (None, None, {}, Signals.SIGTERM, 143, ""),
        (None, None, {}, Signals.SIGINT, 130, ""),
        (PeerFailure(1, 6, "the loss is NaN"), None, failing(r0=6, r1=6), None, 6, ""),
        (PeerFailure(0, 1, ENDED, is_missing=True), None, failing(r1=-9), None, 1, "process 1 was killed by SIGKILL"),
        (PeerFailure(0, 1, ENDED, is_missing=True), None, failing(r0=1), None, 1, ENDED),
        (None, None, failing(r0=-11), None, 1, "process 0 was killed by SIGSEGV"),
        (None, None, failing(r0=3), None, 1, ""),
    ],
)
def test_an_ending_has_one_exit_code_and_at_most_one_message(
    tmp_path, capsys, failure, ending, failures, received, code, printed
):
    if failure is not None:
        (tmp_path / FAILURE_FILE).write_text(json.dumps(asdict(failure)))
    if ending is not None:
        (tmp_path / EXIT_FILE).write_text(str(ending))
    assert _exit_code(tmp_path, failures, received) == code
    assert capsys.readouterr().err.strip() == printed


def test_a_killed_process_is_named_whatever_the_others_do(tmp_path, capsys):
    for killed, count, number in itertools.product(range(4), (2, 3, 4), (6, 9, 11, 15)):
        if killed >= count:
            continue
        failures = {rank: SimpleNamespace(exitcode=1) for rank in range(count)}
        failures[killed] = SimpleNamespace(exitcode=-number)
        assert _exit_code(tmp_path, failures, None) == 1
        assert capsys.readouterr().err == f"process {killed} was killed by {Signals(number).name}\n"
