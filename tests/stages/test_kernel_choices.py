"""The kernels that the compiler selects by time are tuning choices: a run of the lock selects none by itself."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugin.tuning import Tuning
from runner.plugins.stages import kernel_choices
from runner.plugins.stages.kernel_choices import WITHOUT_CACHES, KernelChoices

MACHINE = {"cpu": "one"}
KERNELS = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=5, unique=True)


@pytest.fixture
def operations(monkeypatch):
    """Candidates say by themselves what they compute."""
    monkeypatch.setattr(kernel_choices, "_operation", lambda candidates: candidates[0].operation)


def candidates_of(operation, kernels):
    return [SimpleNamespace(operation=operation, hash_key=lambda kernel=kernel: kernel) for kernel in kernels]


@pytest.mark.usefixtures("operations")
@given(st.dictionaries(st.text(max_size=3), KERNELS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_fastest_kernel_of_every_operation_is_recorded_and_selected_again(offers, random):
    tuning = Tuning(MACHINE)
    recording = KernelChoices(tuning.of("compile"))
    fastest = {}
    for operation, kernels in offers.items():
        candidates = candidates_of(operation, kernels)
        assert recording.restrict(candidates) == candidates
        times = [random.random() for _ in candidates]
        # Torch puts several candidates into a mapping by identity, as these are.
        timings = {Hashed(candidate): time for candidate, time in zip(candidates, times, strict=True)}
        recording.record(timings, "mm", [], candidates)
        fastest[operation] = kernels[times.index(min(times))]
    locked = Tuning(MACHINE)
    locked.lock(json.loads(json.dumps(tuning.data()))["choices"])
    replaying = KernelChoices(locked.of("compile"))
    for operation, kernels in offers.items():
        candidates = candidates_of(operation, random.sample(kernels, len(kernels)))
        (selected,) = replaying.restrict(candidates)
        assert selected.hash_key() == fastest[operation]


class Hashed:
    """A candidate that may be the key of a mapping."""

    def __init__(self, candidate):
        self.hash_key = candidate.hash_key


@pytest.mark.usefixtures("operations")
def test_a_kernel_that_is_not_offered_is_selected_again_with_a_warning(caplog):
    tuning = Tuning(MACHINE)
    tuning.of("compile").record("product", "gone")
    candidates = candidates_of("product", ["a", "b"])
    kernels = KernelChoices(tuning.of("compile"))
    assert kernels.restrict(candidates) == candidates
    assert kernels.replayed == 0
    assert "not offered here" in caplog.text


@pytest.mark.usefixtures("operations")
def test_where_nothing_may_be_searched_the_library_computes():
    candidates = candidates_of("product", ["library", "b"])
    kernels = KernelChoices(Tuning(MACHINE, searches=False).of("compile"))
    assert kernels.restrict(candidates) == candidates[:1]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_torch_selects_a_kernel_once_and_takes_it_from_the_lock_afterwards(monkeypatch):
    """Both for the forward and for the backward pass, with the same bits."""
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    measured = []
    monkeypatch.setattr(
        AlgorithmSelectorCache, "make_precompile_fn", lambda *_, **__: lambda: None
    )  # kernels are built when they are used

    def benchmark(self, choices, *_, **__):
        measured.append(choices)
        return {choice: float(number) for number, choice in enumerate(choices)}

    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark", benchmark)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(4, 16, 16, generator=generator, requires_grad=True) for _ in range(2))

    def trained(tuning):
        torch._dynamo.reset()
        kernels = KernelChoices(tuning.of("compile"))
        options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs", False) | WITHOUT_CACHES
        product = kernels.applied(torch.compile(torch.bmm, options=options, dynamic=False))
        with kernels.apply():
            output = product(x, w)
            gradients = torch.autograd.grad(output, (x, w), torch.ones_like(output))
        return kernels.replayed, [output, *gradients]

    tuning = Tuning(MACHINE)
    replayed, first = trained(tuning)
    assert replayed == 0
    searches = len(measured)
    assert searches
    locked = Tuning(MACHINE)
    locked.lock(tuning.data()["choices"])
    replayed, second = trained(locked)
    assert replayed == searches
    assert len(measured) == searches
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
