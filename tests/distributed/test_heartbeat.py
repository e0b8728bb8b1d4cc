"""Signs of life of a process."""

import subprocess
import sys
import time

from torch.distributed import HashStore

from runner.distributed.heartbeat import Heartbeat


def test_a_process_shows_signs_of_life_until_it_ends():
    store = HashStore()
    heartbeat = Heartbeat(store, 3)
    while not store.add("beats/3", 0):
        time.sleep(0.01)
    heartbeat._end()
    assert not heartbeat._thread.is_alive()


def test_a_process_that_ends_does_so_while_its_heart_beats(tmp_path):
    """A thread in the store of torch must not return to an interpreter that has ended."""
    code = (
        "import sys, torch.distributed as dist\n"
        "from runner.distributed import heartbeat\n"
        "heartbeat._BEAT_SECONDS = 0.0\n"
        "heartbeat.Heartbeat(dist.FileStore(sys.argv[1], 1), 0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=True, timeout=60)
