"""Data, evaluations and episodes without an end: a signal or a limit ends the run with its status."""

import signal
import time
from pathlib import Path

import pytest
from children import running, start
from toy_runs import written

from runner.tracking import Workspace
from runner.tracking.lookup import folders

PLUGIN = Path(__file__).with_name("endless_data.py")
PATIENCE_SECONDS = 60
"""Time for a run to end after a signal; generous, because other tests use the processor."""
EPISODES = (
    "model={kind: masac, hidden: [8]}",
    "train={env_steps: 40, batch_size: 8, evaluate_every: 20}",
    "optimizer={}",
)

pytestmark = pytest.mark.usefixtures("migrated_workspace")


def command(folder, where, workers, *sets):
    begun = folder / "begun"
    if where == "episode":
        data = f"data={{kind: endless_episodes, envs: 4, warmup: 8, begun: {begun}}}"
        replay = "data.replay={kind: uniform, capacity: 100}"
        sets = (*EPISODES, data, replay, "data.evaluation.longest=1_000_000_000", *sets)
    else:
        data = f"data={{kind: endless_words, where: {where}, begun: {begun}}}"
        sets = (f"data.workers={workers}", *sets) if where == "sample" else sets
        sets = ("train.updates=20", "train.checkpoint_every=1", "train.evaluate_every=2", data, *sets)
    return [*written(folder, *sets), "--plugin", str(PLUGIN)], begun


def wait_for(begun, child):
    while not begun.exists():
        assert child.running, child.stderr
        time.sleep(0.02)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("where", "workers", "number", "code"),
    [
        ("draw", 0, signal.SIGTERM, 143),
        ("sample", 0, signal.SIGINT, 130),
        ("sample", 1, signal.SIGTERM, 143),
        ("evaluate", 0, signal.SIGHUP, 129),
        ("episode", 0, signal.SIGTERM, 143),
    ],
)
def test_a_signal_ends_a_run_whose_data_have_no_end(tmp_path, where, workers, number, code):
    words, begun = command(tmp_path, where, workers)
    with running(start(tmp_path, *words)) as child:
        wait_for(begun, child)
        child.send(number)
        assert child.wait(PATIENCE_SECONDS) == code, child.stderr
    assert "Traceback" not in child.stderr
    (folder,) = folders(Workspace().runs)
    assert folder.record().status == "STOPPED"


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("where", "workers"), [("draw", 0), ("sample", 1)])
def test_a_limit_ends_a_run_whose_data_have_no_end(tmp_path, where, workers):
    words, _ = command(tmp_path, where, workers, "train.stall_s=3")
    child = start(tmp_path, *words)
    assert child.wait() == 1, child.stderr
    assert "train.stall_s (3 s)" in child.stderr or "does not return" in child.stderr
    (folder,) = folders(Workspace().runs)
    assert folder.record().status == "FAILED"


@pytest.mark.parametrize("longest", [1, 50])
def test_an_episode_that_is_longer_than_the_limit_is_one_line(tmp_path, longest):
    words, _ = command(tmp_path, "episode", 0, f"data.evaluation.longest={longest}")
    child = start(tmp_path, *words)
    assert child.wait() == 1, child.stderr
    assert f"have not ended after {longest} steps: let EndlessEpisodesConfig's environment" in child.stderr
    assert "Traceback" not in child.stderr
