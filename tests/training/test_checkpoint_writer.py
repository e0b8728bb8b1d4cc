import errno
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from runner.plugin.ring import Ring
from runner.training import checkpoint
from runner.training.checkpoint import Writer


def save(folder, step, state, score=None):
    each = Writer(folder)
    each.save(step, state, score)
    each.wait()
    return each


def steps(folder):
    return [int(path.name.removeprefix("step-")) for path in checkpoint.checkpoints(folder)]


def inodes(path):
    return {file.stat().st_ino for file in path.iterdir()}


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    for step, score in [(5, None), (10, 0.3), (20, 0.9), (30, None), (40, 0.5), (50, None), (60, None)]:
        save(tmp_path, step, {"step": step}, score)
    assert steps(tmp_path) == [20, 50, 60]
    save(tmp_path, 70, {}, 0.9)
    save(tmp_path, 80, {}, 0.1)
    save(tmp_path, 90, {}, 0.1)
    assert steps(tmp_path) == [70, 80, 90]  # of several equally good ones, the newest


def test_a_checkpoint_from_before_its_evaluation_is_written_again_with_the_score(tmp_path):
    """A signal in the last update asks for a checkpoint; the resumed run evaluates at the same place."""
    save(tmp_path, 10, {"complete": False}, 0.3)
    save(tmp_path, 20, {"complete": False})
    save(tmp_path, 20, {"complete": True}, 0.9)
    assert checkpoint.best(checkpoint.checkpoints(tmp_path)) == tmp_path / "step-000000000020"
    assert checkpoint.load_newest(tmp_path) == {"complete": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000010", "step-000000000020"]


class Buffer:
    """A ring of 100 rows of 8 bytes."""

    def __init__(self):
        self.rows, self.written = torch.zeros(100, 2), 0

    def add(self, count):
        for number in range(self.written, self.written + count):
            self.rows[number % 100] = number
        self.written += count

    def state(self):
        return {"ring": Ring(100, self.written, lambda first, last: self.rows[torch.arange(first, last) % 100])}


def numbers(path):
    """The numbers in the rows of a checkpoint's ring."""
    return torch.cat([rows for _, rows in checkpoint.load(path)["ring"].pieces()])[:, 0]


def test_rows_are_written_once_for_each_of_two_chains_that_share_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SEGMENT_BYTES", 80)
    buffer = Buffer()
    buffer.add(100)
    sizes = []

    def counting(tensors, path):
        sizes[-1] += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", counting)
    for step in range(8):
        buffer.add(10)
        sizes.append(0)
        save(tmp_path, step, buffer.state())
        newest = checkpoint.checkpoints(tmp_path)[-2:]
        assert len(newest) < 2 or not inodes(newest[0]) & inodes(newest[1])
        loaded = checkpoint.load(newest[-1])["ring"]
        assert torch.equal(
            torch.cat([rows for _, rows in loaded.pieces()])[:, 0], torch.arange(100.0) + 10 * (step + 1)
        )
    assert sizes == [800, 800] + [160] * 6  # 10 rows a step, for this one and the one before that it does not share


def test_a_disk_without_links_gets_whole_files(tmp_path, monkeypatch):
    def refuse(*paths):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    buffer = Buffer()
    for step in range(4):
        buffer.add(60)
        save(tmp_path, step, buffer.state())
    assert torch.equal(numbers(checkpoint.checkpoints(tmp_path)[-1]), torch.arange(140.0, 240.0))


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path):
    buffer, weights = Buffer(), torch.zeros(3)
    buffer.add(100)
    each = Writer(tmp_path)
    each.save(1, {"weights": weights, **buffer.state()})
    weights += 1
    buffer.add(50)
    each.wait()
    assert torch.equal(checkpoint.load(each.newest())["weights"], torch.zeros(3))
    assert torch.equal(numbers(each.newest()), torch.arange(100.0))


def test_a_large_checkpoint_is_spread_over_files_and_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)
    monkeypatch.setattr(checkpoint, "BACKGROUND_BYTES", 100)
    state = {f"{i}": torch.full((10,), float(i)) for i in range(5)} | {"empty": torch.zeros(0)}
    each = Writer(tmp_path)
    each.save(1, state)
    path = each.newest()  # without wait
    assert len(list(path.glob("tensors-*"))) == 3
    loaded = checkpoint.load(path)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_full_disk_is_said_once_and_leaves_the_older_checkpoint(tmp_path, monkeypatch, caplog):
    each = Writer(tmp_path)
    each.save(1, {"a": torch.ones(3)})
    each.wait()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**19))
    for step in (2, 3):
        each.save(step, {"a": torch.ones(3)})
        each.wait()
        assert each.failure.errno == errno.ENOSPC
    assert caplog.text.count("was not written") == 1
    assert "0.5 MiB free" in caplog.text
    assert steps(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]  # nothing half written is left
    monkeypatch.undo()
    each.save(4, {})
    each.wait()
    assert each.failure is None
    assert steps(tmp_path) == [1, 4]


def test_a_disk_that_fills_while_writing_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1, {"a": torch.ones(3)})

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", full)
    each = save(tmp_path, 2, {"a": torch.ones(3)})
    assert each.failure.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]


def test_a_disk_that_will_soon_be_full_is_said_ahead(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**20))
    each = Writer(tmp_path)
    for step in (1, 2):
        each.save(step, {"a": torch.ones(400_000)})
        each.wait()
    assert steps(tmp_path) == [1, 2]
    assert caplog.text.count("nearly full") == 1


def test_a_checkpoint_gets_no_name_before_the_metrics_up_to_it_are_durable(tmp_path):
    def refuse():
        raise OSError(errno.ENOSPC, "the disk refuses the run's metrics")

    each = Writer(tmp_path, refuse)
    each.save(1, {})
    each.wait()
    assert each.failure is not None
    assert steps(tmp_path) == []


def test_an_error_in_the_background_reaches_the_training(tmp_path):
    def wrong():
        raise RuntimeError("a bug")

    each = Writer(tmp_path, wrong)
    each.save(1, {})
    with pytest.raises(RuntimeError, match="a bug"):
        each.wait()


def test_what_a_dead_process_left_half_written_is_removed(tmp_path):
    (tmp_path / ".step-000000000007.partial").mkdir()
    Writer(tmp_path)
    assert list(tmp_path.iterdir()) == []
