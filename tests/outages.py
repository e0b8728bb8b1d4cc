"""A training that lasts until a test has seen enough, and what became of its metrics."""

import json
import sqlite3
import time
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path

from children import running, start
from interrupted import arguments

PATIENCE_SECONDS = 120.0
"""For whatever a test waits for."""
PACING = Path(__file__).with_name("pacing.py")


class Training:
    """A run in a process of its own that trains slowly until ``hurry`` is called."""

    def __init__(self, folder, workspace, child, hurry):
        self.folder, self.child = folder, child
        self._hurry = hurry
        self.until(lambda: list(workspace.glob("runs/*/spool.jsonl")))
        (self.run_dir,) = workspace.glob("runs/*")
        self.until(lambda: self.step > 0)

    @property
    def record(self):
        """What is known of it from outside."""
        return json.loads((self.run_dir / "run.json").read_text())

    @property
    def size(self):
        """Bytes of its spool."""
        return (self.run_dir / "spool.jsonl").stat().st_size

    @property
    def step(self):
        """The newest step at which it logged."""
        return max((record.get("step", 0) for record in records(self.run_dir)), default=0)

    def until(self, condition):
        """Waits until something is true while it trains."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.child.running, self.child.stderr
            assert time.monotonic() < deadline, self.child.stderr
            time.sleep(0.02)

    def until_said(self, text):
        """Waits until it has said something on stderr."""
        self.until(lambda: text in self.child.stderr)

    def goes_on(self, steps=20):
        """Waits until it has trained that much further."""
        goal = self.step + steps
        self.until(lambda: self.step >= goal)

    def hurry(self):
        """Lets it train as fast as it can."""
        self._hurry.touch()

    def end(self):
        """Lets it train to its end; returns its exit code."""
        self.hurry()
        return self.child.wait()


@contextmanager
def training(folder, workspace, *sets, seconds=0.1, **variables):
    """Starts a training of some 300 updates that has begun to log when the block begins."""
    hurry = folder / "hurry"
    pace = (f"optimization.paced.until={hurry}", f"optimization.paced.seconds={seconds}")
    command = arguments("marl_baseline", "train.env_steps=400", "train.log_every=4", *pace, *sets)
    with running(start(folder, *command, "--plugin", str(PACING), **variables)) as child:
        yield Training(folder, workspace, child, hurry)


def records(run_dir):
    """All whole records of a run's spool."""
    return [json.loads(line) for line in (run_dir / "spool.jsonl").read_bytes().split(b"\n")[:-1]]


def points(spool):
    """How often every point of a metric is in these records: name, step, time in milliseconds."""
    return Counter((name, record["step"], record["t"]) for record in spool for name in record.get("metrics", ()))


def rows(database, run_name):
    """How often every point of a metric is in MLflow's database, and the run's status there."""
    with closing(sqlite3.connect(database)) as connection:
        ((run_id, status),) = connection.execute("SELECT run_uuid, status FROM runs WHERE name = ?", (run_name,))
        found = connection.execute("SELECT key, step, timestamp FROM metrics WHERE run_uuid = ?", (run_id,))
        return Counter(found), status
