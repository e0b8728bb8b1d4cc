"""The end of a process while torch exchanges data."""

import subprocess
import sys

import pytest

CONNECT = """
import sys, time, torch, torch.distributed as dist
from runner.distributed import process_group
process_group._END_SECONDS = {seconds}
group = process_group.ProcessGroup(dist.FileStore(sys.argv[1], 1), 0, 1)
group.connect("cpu", 60)
work = dist.all_reduce(torch.ones(3), async_op=True)
"""
CALL_PYTHON = """
def late(future):
    time.sleep(0.3)
    print("called")
    return future.value()

future = work.get_future().then(late)
"""
DESTROY = "dist.destroy_process_group()\n"
BLOCK = "dist.destroy_process_group = lambda: time.sleep(600)\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("last", "seconds", "output"),
    [(CALL_PYTHON, 60, "called"), (CALL_PYTHON + DESTROY, 60, "called"), (BLOCK, 0.1, "")],
    ids=["Python is called", "the program destroys the group", "an operation never ends"],
)
def test_a_process_ends_without_an_abort(tmp_path, last, seconds, output):
    command = [sys.executable, "-c", CONNECT.format(seconds=seconds) + last, str(tmp_path / "store")]
    child = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert child.stdout.strip() == output
