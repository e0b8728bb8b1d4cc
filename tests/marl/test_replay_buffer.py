"""The ring under both kinds of replay: what is stored comes back, the oldest goes first, the state is whole."""

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.api import UsageError
from runner.plugins.marl.replay import buffer
from runner.plugins.marl.replay.build import make_replay, storage_device
from runner.plugins.marl.replay.config import PrioritizedConfig, UniformConfig

CPU = torch.device("cpu")
SHAPES = {"observation": (2, 3), "action": (2, 1), "reward": (2,), "terminated": ()}
KINDS = pytest.mark.parametrize("config", [UniformConfig, PrioritizedConfig])


def make(config, seed=0, capacity=20, device=CPU, storage="same"):
    config = config(capacity=capacity, device=storage)
    generator = torch.Generator(storage_device(config, device)).manual_seed(seed)
    return make_replay(config, SHAPES, device, generator)


def transitions(first, count, device=CPU):
    """Transitions whose every number tells which one it is."""
    number = torch.arange(first, first + count, device=device)
    batch = {name: number.float().view(-1, *(1 for _ in shape)).expand(count, *shape) for name, shape in SHAPES.items()}
    return {**batch, "terminated": number % 2 == 0}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@KINDS
@given(capacity=st.integers(1, 150), counts=st.lists(st.integers(1, 70), min_size=1, max_size=12))
def test_the_last_transitions_are_drawn_whole_and_no_others(config, capacity, counts):
    replay = make(config, capacity=capacity)
    kept = deque(maxlen=capacity)
    for count in (min(count, capacity) for count in counts):
        first = kept[-1] + 1 if kept else 1
        replay.add(transitions(first, count))
        kept.extend(range(first, first + count))
    assert len(replay) == len(kept)

    batch = replay.sample(200, 0.5)
    numbers = batch["reward"][:, 0].long()
    expected = transitions(0, kept[-1] + 1)
    assert set(numbers.tolist()) <= set(kept)
    for name, shape in SHAPES.items():
        assert batch[name].shape == (200, *shape)
        assert batch[name].is_contiguous()
        assert torch.equal(batch[name], expected[name][numbers].float())
    assert torch.equal((numbers - 1) % capacity, batch["index"])


@KINDS
def test_one_seed_gives_one_sequence_of_batches(config):
    batches = []
    for seed in (0, 0, 1):
        replay = make(config, seed)
        replay.add(transitions(0, 20))
        batches.append(replay.sample(64, 0.0))
    assert same(batches[0], batches[1])
    assert not same(batches[0], batches[2])


@KINDS
@pytest.mark.parametrize("added", [0, 7, 20, 33])
def test_state_restores_what_follows_bit_for_bit(config, added):
    original, restored = make(config), make(config, seed=5)
    for first in range(added):
        original.add(transitions(first, 1))
    for first in range(13):  # what is there already must not shine through
        restored.add(transitions(100 + first, 1))
    if added:
        batch = original.sample(8, 0.0)
        original.update_priorities(batch["index"], torch.linspace(-3, 9, 8))

    restored.load_state_dict(original.state_dict())
    restored.generator.set_state(original.generator.get_state())

    assert len(restored) == len(original)
    for step in range(5):
        for replay in (original, restored):
            replay.add(transitions(50 + 3 * step, 3))
        batches = [replay.sample(16, 0.3) for replay in (original, restored)]
        assert same(*batches)
        for replay in (original, restored):
            replay.update_priorities(batches[0]["index"], torch.linspace(0, step, 16))


@KINDS
def test_state_holds_only_what_is_filled(config):
    replay = make(config, capacity=1000)
    replay.add(transitions(0, 3))
    state = replay.state_dict()
    ((first, rows),) = state["rows"].pieces()
    assert (first, len(rows)) == (0, 3)
    assert all(len(value) == 3 for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def test_state_of_another_buffer_is_refused():
    state = make(UniformConfig).state_dict()
    with pytest.raises(UsageError, match=r"has capacity 20, the recipe's 30; resume with"):
        make(UniformConfig, capacity=30).load_state_dict(state)
    with pytest.raises(UsageError, match=r"has shapes .*reward"):
        make(UniformConfig).load_state_dict({**state, "shapes": {"reward": [2]}})


@KINDS
def test_more_at_once_than_fits_is_refused(config):
    replay = make(config, capacity=4)
    with pytest.raises(UsageError, match=r"data\.replay\.capacity: .*at least 5"):
        replay.add(transitions(0, 5))


def test_a_field_of_another_size_is_refused():
    batch = transitions(0, 4)
    with pytest.raises(RuntimeError, match="shape"):
        make(UniformConfig).add(batch | {"action": batch["observation"]})


@KINDS
def test_an_empty_buffer_says_so(config):
    with pytest.raises(UsageError, match="empty; collect"):
        make(config).sample(4, 0.0)


@KINDS
def test_a_buffer_that_cannot_fit_is_refused_before_it_is_allocated(config):
    with pytest.raises(UsageError, match=r"need \d+\.\d GiB, but cpu has .* lower it to at most \d+$"):
        make(config, capacity=10**13)


def test_the_most_that_fits_is_told(monkeypatch):
    monkeypatch.setattr(buffer, "available_memory", lambda: 100 * 52 + 51)
    make(PrioritizedConfig, capacity=100)
    with pytest.raises(UsageError, match=r"101 transitions of 52 bytes .* at most 100"):
        make(PrioritizedConfig, capacity=101)


def test_a_gpu_without_room_points_at_host_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (44, 1000))
    with pytest.raises(UsageError, match=r"but cuda:0 has .* at most 1, or keep it .* with data\.replay\.device: cpu"):
        buffer._require_memory(2, 44, torch.device("cuda:0"))


def test_uniform_replay_draws_all_alike_with_weight_one():
    replay = make(UniformConfig)
    replay.add(transitions(0, 10))
    batch = replay.sample(10_000, 0.0)
    counts = torch.bincount(batch["index"], minlength=10)
    # Chi-square with 9 degrees of freedom: its 99.9 % point is 27.9.
    assert ((counts - 1000).square() / 1000).sum() < 27.9
    assert torch.equal(batch["weight"], torch.ones(10_000))
    replay.update_priorities(batch["index"], torch.ones(10_000))  # allowed, and means nothing


def test_storage_follows_the_learner_unless_told():
    gpu = torch.device("cuda:1")
    assert storage_device(UniformConfig(), gpu) == gpu
    assert storage_device(PrioritizedConfig(device="cpu"), gpu) == CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@KINDS
@pytest.mark.parametrize("storage", ["same", "cpu"])
def test_on_a_gpu(config, storage):
    gpu = torch.device("cuda", torch.cuda.current_device())
    replay = make(config, capacity=200, device=gpu, storage=storage)
    for first in range(0, 300, 50):
        replay.add(transitions(first, 50, gpu))
    batch = replay.sample(64, 0.5)
    assert {value.device for value in batch.values()} == {storage_device(config(device=storage), gpu)}
    assert torch.equal(batch["reward"][:, 0].long() % 200, batch["index"])
    replay.update_priorities(batch["index"].to(gpu), torch.ones(64, device=gpu))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@KINDS
def test_a_gpu_is_never_waited_for(config):
    gpu = torch.device("cuda", torch.cuda.current_device())
    replay, batch, error = make(config, device=gpu), transitions(0, 8, gpu), torch.ones(16, device=gpu)
    replay.add(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        replay.add(batch)
        drawn = replay.sample(16, 0.5)
        replay.update_priorities(drawn["index"], error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
