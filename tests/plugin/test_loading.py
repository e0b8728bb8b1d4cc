"""Batches that worker processes load: right whatever the files, and in one line where something goes wrong."""

import errno
import gc
import multiprocessing
import os
import pickle
import re
import signal
import traceback

import pytest
import torch
from records import (
    OPENED,
    ROWS,
    Elsewhere,
    Endless,
    Itself,
    Lines,
    OpenedBefore,
    Records,
    StreamElsewhere,
    drawn,
    numbered,
    source_of,
    write,
)
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from runner.api import Mean, Progress, RunnerError, UsageError
from runner.plugin.batches import Plugins
from runner.plugin.registry import Registry


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield write(tmp_path_factory.mktemp("records"))
    for file in OPENED.values():
        file.close()


@pytest.fixture
def start_method():
    before = multiprocessing.get_start_method()
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method(before, force=True)


class Learner:
    """Adds up what it is evaluated on."""

    def __init__(self):
        self.seen = []

    def metrics(self, batch):
        self.seen.append(batch)
        return {"index": Mean(batch["index"].sum(), len(batch["index"]))}

    def inputs(self, batch):
        return batch

    def predict(self, inputs):
        return inputs

    def evaluating(self):
        from contextlib import nullcontext

        return nullcontext()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize(("method", "workers"), [("fork", 0), ("fork", 4), ("spawn", 1), ("forkserver", 1)])
def test_files_that_are_opened_at_the_first_access_are_read_right(folder, start_method, method, workers):
    start_method(method)
    source = source_of(Records(folder), workers=workers, batch_size=8)
    batches = drawn(source, 2 * ROWS // 8, 8)
    if method == "fork":  # others take seconds to start a process
        batches += source.held_out_batches()
        assert sorted(indices(batches[-ROWS // 8 :])) == [*range(ROWS)]
    for name in ("file", "module", "zip", "sqlite", "hdf5", "map"):
        assert not any(batch[name].any() for batch in batches), name
    processes = {int(number) for batch in batches for number in batch["process"]}
    assert (os.getpid() in processes) == (workers == 0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("workers", [0, 4])
def test_files_that_are_open_before_workers_start_are_not_shared(folder, workers):
    source = source_of(OpenedBefore(folder), workers=workers, batch_size=8)
    for batch in (*drawn(source, 3 * ROWS // 8, 8), *source.held_out_batches()):
        assert not any(batch[name].any() for name in ("file", "zip", "map"))


@pytest.mark.parametrize("data", [Elsewhere(), StreamElsewhere()], ids=["map-style", "iterable"])
def test_the_parent_of_workers_never_reads_from_a_dataset(data):
    source = source_of(data, workers=1)
    assert source.shapes == {"index": ()}
    assert len(drawn(source, 5)) == 5
    learner = Learner()
    source.rehearse(learner, None)
    assert source.evaluate(learner) == {"index": 9.5}


def test_data_that_cannot_be_sent_to_a_worker_are_refused(folder, start_method):
    start_method("spawn")
    with pytest.raises(UsageError, match=r"data\.workers: 1: 'OpenedBefore' cannot be sent to workers .*first access"):
        source_of(OpenedBefore(folder), workers=1)


# --- streams ----------------------------------------------------------------------------------------------------------


def indices(batches):
    return [int(index) for batch in batches for index in batch["index"]]


@pytest.mark.parametrize("make", [Endless, Lines, lambda count: Itself(count, again=False), numbered])
def test_a_stream_that_is_read_once_loses_no_sample_and_is_not_read_again(make):
    source = source_of(make(22), [{"index": torch.tensor(0)}])
    assert indices(drawn(source, 5)) == [*range(20)]
    with pytest.raises(UsageError, match=r"no batch in pass 2, so it may be one that can be read only once"):
        drawn(source, 1)


def test_a_stream_that_was_read_ahead_goes_on_with_another_size_of_batches():
    source = source_of(Endless(22), [{"index": torch.tensor(0)}], batch_size=4)
    assert indices(drawn(source, 3, 6)) == [*range(18)]


@pytest.mark.parametrize("make", [Endless, Lines, lambda count: Itself(count, again=False), numbered])
def test_a_held_out_stream_that_is_read_once_is_refused_before_it_is_evaluated(make):
    source = source_of(Elements(8), make(22))
    with pytest.raises(UsageError, match=r"starts with other samples when it is read again.*__iter__"):
        source.rehearse(Learner(), None)


@pytest.mark.parametrize(("make", "workers"), [(Endless, 1), (Lines, 1), (lambda count: Itself(count, again=True), 0)])
def test_evaluations_of_a_stream_see_all_of_it_every_time(make, workers):
    source = source_of(Elements(8), make(22), workers=workers)
    for _ in range(2):
        source.rehearse(Learner(), None)
        learner = Learner()
        assert source.evaluate(learner) == {"index": 10.5}
        assert indices(learner.seen) == [*range(22)]


def test_held_out_data_without_a_sample_are_refused():
    with pytest.raises(UsageError, match="no held-out sample"):
        source_of(Elements(8), Itself(0, again=True)).evaluate(Learner())


class Counted(Itself):
    """A stream that reports a length."""

    def __init__(self, count, length):
        super().__init__(count, again=True)
        self.length = length

    def __len__(self):
        return self.length


def test_an_epoch_of_a_stream_with_a_length_is_a_pass_over_it():
    source = source_of(Counted(22, 22), [{"index": torch.tensor(0)}])
    assert source.epoch_samples(4) == 20
    assert indices(drawn(source, 15, unit="epochs")) == 3 * [*range(20)]
    for workers in (0, 1):
        resumed = source_of(Counted(22, 22), [{"index": torch.tensor(0)}], workers=workers)
        resumed.load_state_dict({"consumed": 7})
        assert indices(drawn(resumed, 1, unit="epochs")) == [8, 9, 10, 11]


class Shuffled(IterableDataset):
    """Another order in every pass, by a generator of its own and the number of passes."""

    def __init__(self):
        self.generator, self.passes = torch.Generator().manual_seed(0), 0

    def __iter__(self):
        order = torch.randperm(10, generator=self.generator)
        self.passes += 1
        return iter([{"index": index + 100 * self.passes} for index in order])


def test_the_state_of_a_stream_is_that_of_all_passes_before_with_and_without_a_worker():
    held_out = [{"index": torch.tensor(0)}]
    batches = indices(drawn(source_of(Shuffled(), held_out), 7))
    assert [index // 100 for index in batches] == 8 * [1] + 8 * [2] + 8 * [3] + 4 * [4]
    assert indices(drawn(source_of(Shuffled(), held_out, workers=1), 7)) == batches
    for workers in (0, 1):
        resumed = source_of(Shuffled(), held_out, workers=workers)
        resumed.load_state_dict({"consumed": 5})
        assert indices(drawn(resumed, 2)) == batches[20:]


@pytest.mark.parametrize(("count", "length"), [(22, 64), (22, 9), (40, 22)])
def test_a_wrong_length_of_a_stream_is_refused_where_epochs_count(count, length):
    batches = count // 4
    held_out = [{"index": torch.tensor(0)}]
    # Further samples are noticed at once: a training may end before the pass does.
    delivered = f"at least {length // 4 + 1}" if count > length else str(batches)
    message = rf"delivered {delivered} batches of 4 in epoch 1, and its __len__ is {length}"
    source = source_of(Counted(count, length), held_out)
    assert len(drawn(source, min(count, length) // 4, unit="epochs")) == min(count, length) // 4
    with pytest.raises(UsageError, match=message):
        drawn(source, 1, unit="epochs")
    assert len(drawn(source_of(Counted(count, length), held_out), batches + 1)) == batches + 1


# --- what is random in held-out data ----------------------------------------------------------------------------------


class Noisy(Dataset):
    """The same sample every time, but for what is drawn for it."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"index": torch.rand(())}


class NoisyStream(IterableDataset):
    def __iter__(self):
        for _ in range(10):
            yield {"index": torch.rand(())}


class NoisyRows:
    nbytes = 0

    def __len__(self):
        return 10

    def take(self, index):
        return {"index": torch.rand(len(index))}

    def to(self, device):
        return self


@pytest.mark.parametrize(("data", "workers"), [(Noisy(), 2), (NoisyStream(), 1), (NoisyRows(), 2)])
def test_noise_in_held_out_data_depends_on_the_batch_alone(data, workers):
    evaluations = []
    for count in (0, workers):
        source = source_of(Elements(8), data, workers=count)
        for seed in (1, 2):
            torch.manual_seed(seed)
            evaluations.append(torch.cat([batch["index"] for batch in source.held_out_batches()]))
            drawn(source, 1)
    for evaluation in evaluations[1:]:
        assert torch.equal(evaluations[0], evaluation)
    assert len(evaluations[0].unique()) == 10


# --- errors -----------------------------------------------------------------------------------------------------------


class Elements(Dataset):
    """Samples of which one goes wrong."""

    def __init__(self, count, wrong=None):
        self.count, self.wrong = count, wrong

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.wrong is not None and index == self.count - 1:
            return self.wrong()
        return {"index": torch.tensor(index)}


class PeculiarError(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, name, *, code):
        super().__init__(f"{name} has code {code}")


def raise_key_error():
    raise KeyError("label")


def raise_peculiar():
    raise PeculiarError("frame", code=7)


def raise_usage_error():
    raise UsageError("data.folder: shells/7.png cannot be read")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (raise_key_error, KeyError, "'label'"),
        (raise_peculiar, (PeculiarError, RuntimeError), "frame has code 7"),
        (raise_usage_error, UsageError, "shells/7.png cannot be read (sample 19 of the training data)"),
    ],
)
def test_an_error_in_a_sample_is_the_original_one_with_its_number(workers, wrong, kind, text):
    source = source_of(Elements(20, wrong), workers=workers)
    with pytest.raises(kind, match=re.escape(text)) as caught:
        drawn(source, 5)
    frames = [(frame.filename, frame.name) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert (__file__, wrong.__name__) in frames
    line = wrong.__code__.co_firstlineno
    assert any(line < frame.lineno < line + 3 for frame in traceback.extract_tb(caught.value.__traceback__))
    if kind is not UsageError:
        assert caught.value.__notes__ == ["sample 19 of the training data"]


def test_an_error_in_a_stream_is_the_original_one_with_its_number():
    class Broken(IterableDataset):
        def __iter__(self):
            yield from numbered(9)
            raise_key_error()

    for workers in (0, 1):
        with pytest.raises(KeyError) as caught:
            drawn(source_of(Broken(), workers=workers), 3)
        assert caught.value.__notes__ == ["after sample 8 of the training data"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: {"index": torch.ones(5)}, "'index' of sample 19 is [5], that of sample {first} is []"),
        (lambda: {"other": torch.tensor(0)}, "'index' of sample 19 is missing, that of sample {first} is []"),
        (lambda: {"index": None}, "'index' of sample 19 is NoneType, that of sample {first} is []"),
    ],
)
def test_samples_that_do_not_fit_together_are_named(workers, wrong, text):
    source = source_of(Elements(20, wrong), workers=workers, batch_size=20)
    first = int(drawn(source_of(Elements(20), batch_size=20), 1, 20)[0]["index"][0])
    with pytest.raises(RunnerError, match=re.escape(text.format(first=first))) as caught:
        drawn(source, 1, 20)
    assert "\n" not in str(caught.value)
    assert "write collate(samples)" in str(caught.value)


def test_an_error_in_a_held_out_sample_says_which_part_it_is_of():
    source = source_of(Elements(8), Elements(6, raise_key_error), workers=1)
    with pytest.raises(KeyError) as caught:
        list(source.held_out_batches())
    assert caught.value.__notes__ == ["sample 5 of the held-out data"]


@pytest.fixture
def prompt_workers(monkeypatch):
    """Has torch look every moment, instead of every 5 s, whether a worker lives."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


SHORTAGES = [
    "unable to allocate shared memory(shm) for file </torch_26384_1681386444_1>: No space left on device (28)",
    "unable to write to file </torch_26384_1681386444_1>: No space left on device (28)",
    "unable to resize file </torch_26384_1681386444_1> to the right size: No space left on device (28)",
    signal.SIGBUS,
]
"""What torch raises in a worker where its batches no longer fit; and what ends it if memory that it has is missing."""


@pytest.mark.usefixtures("prompt_workers")
@pytest.mark.parametrize("shortage", SHORTAGES, ids=["allocate", "write", "resize", "bus error"])
def test_full_shared_memory_is_one_line_with_what_to_do(shortage):
    def run_out():
        if isinstance(shortage, str):
            raise RuntimeError(shortage)
        os.kill(os.getpid(), shortage)

    with pytest.raises(RunnerError, match=r"^data\.workers: the shared memory in /dev/shm .*--shm-size.*$"):
        drawn(source_of(Elements(20, run_out), workers=1), 5)


def test_a_full_disk_of_the_data_is_not_blamed_on_shared_memory():
    def run_out():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "decoded")

    with pytest.raises(OSError, match="No space left on device: 'decoded'"):
        drawn(source_of(Elements(20, run_out), workers=1), 5)


@pytest.mark.usefixtures("prompt_workers")
@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed (SIGKILL) while it read sample 19"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
        (lambda: os._exit(3), "ended with exit code 3"),
    ],
)
def test_a_worker_that_ends_is_one_line_with_what_it_was_loading(end, text):
    def end_in_worker():
        assert get_worker_info() is not None
        end()

    source = source_of(Elements(20, end_in_worker), workers=1)
    handler = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(RunnerError, match=re.escape(text)) as caught:
        drawn(source, 5)
    assert "while it read sample 19 of the training data: " in str(caught.value)
    assert signal.getsignal(signal.SIGCHLD) == handler


def test_workers_end_when_their_source_is_dropped(monkeypatch):
    still_alive = []
    join = multiprocessing.process.BaseProcess.join

    def watched_join(process, timeout=None):
        join(process, timeout)
        still_alive.append(process.is_alive())

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "join", watched_join)
    source = source_of(Elements(20), workers=2)
    drawn(source, 2)
    del source
    gc.collect()
    assert still_alive
    assert not any(still_alive)


class Collecting(Elements):
    """Looks for garbage before a sample is read, as Python does at some time."""

    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


def test_workers_leave_those_of_an_earlier_loader_alone(capfd):
    of_other_tests = multiprocessing.active_children()
    gc.disable()
    try:
        earlier = source_of(Elements(2_000), workers=2)
        drawn(earlier, 1)
        workers = [process for process in multiprocessing.active_children() if process not in of_other_tests]
        # Garbage that the next workers inherit.
        earlier.itself = earlier
        del earlier
        later = source_of(Collecting(20), workers=1)
        assert len(drawn(later, 4)) == 4
        assert len(workers) == 2
        assert all(worker.is_alive() for worker in workers)
        del later
    finally:
        gc.enable()
    gc.collect()
    assert capfd.readouterr().err == ""


def test_progress_of_epochs_is_that_of_passes():
    source = source_of(Counted(22, 22), [{"index": torch.tensor(0)}])
    progress = Progress("epochs", 2, source.epoch_samples(4))
    fractions = []
    for _ in range(10):
        progress.advance(source.counts(source.draw(4, progress)))
        fractions.append(progress.fraction)
    assert fractions == [pytest.approx(step / 10) for step in range(1, 11)]
    assert (progress.done, progress.position) == (2, progress.whole)


STAGE = """
from runner.api import Exact, Stage, StageConfig

class SlowerConfig(StageConfig):
    "Does nothing."
    kind = "slower"
    implementation = "Stage"
    phase = 1

    def contract(self, setting):
        return Exact()

"""


def test_workers_import_plugins_of_one_name_from_several_files_and_no_removed_ones(tmp_path):
    """A process may have used one file after the other; each of its workers gets all of them."""
    paths = [tmp_path / folder / "mine.py" for folder in ("a", "b", "gone")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(STAGE)
        Registry([path])
    paths[-1].unlink()
    pickled = pickle.dumps(Plugins())
    assert all(str(path).encode() in pickled for path in paths)
    assert isinstance(pickle.loads(pickled), Plugins)


def test_workers_import_no_plugin_that_could_not_be_imported(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError")
    with pytest.raises(UsageError, match="cannot be imported"):
        Registry([path])
    assert str(path).encode() not in pickle.dumps(Plugins())
