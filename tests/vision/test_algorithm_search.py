"""Plans for convolutions: how a search decides, what it rejects, and that nothing is searched twice."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from runner.plugin.tuning import Tuning
from runner.plugins.vision.convolution.geometry import ConvGeometry
from runner.plugins.vision.convolution.key import ConvKey
from runner.plugins.vision.convolution.native import Native
from runner.plugins.vision.convolution.plan import ConvPlan, Needs, parse_plan, plan_key
from runner.plugins.vision.convolution.plan_file import MOST_PLANS, RecentPlans, no_plans
from runner.plugins.vision.convolution.planner import Planner
from runner.plugins.vision.convolution.registry import BACKENDS, NATIVE
from runner.plugins.vision.convolution.search import (
    Search,
    SearchLimits,
    SearchResult,
    fastest_plan,
    gain_of,
)
from runner.plugins.vision.convolution.trial import Sampler
from runner.system.errors import UsageError

CPU = torch.device("cpu")
STEP = Needs(True, True)
FORWARD = Needs(False, False)
SIZES = list(itertools.product((1, 2), (2, 4), (6, 7, 8, 9, 10)))
"""Twenty shapes: batch, channels, height."""


def tensors(n=2, c=4, side=8, dtype=torch.float32, requires_grad=True):
    x = torch.randn(n, c, side, side, dtype=dtype).requires_grad_(requires_grad)
    w = torch.randn(4, c, 3, 3, dtype=dtype).requires_grad_(requires_grad)
    return x, w


def key_of(x, w, **geometry):
    return ConvKey.of(x, w, ConvGeometry((1, 1), (1, 1), **geometry))


class Twin(Native):
    """The baseline under another name."""

    name = "twin"


class Inexact(Native):
    """The baseline, off by 1e-3 of its size."""

    name = "inexact"
    timed = False

    def forward(self, x, w, geometry, workspace=None):
        return super().forward(x, w, geometry) * (1 + 1e-3)

    def backward_data(self, gradient, w, geometry, size, workspace=None):
        return super().backward_data(gradient, w, geometry, size) * (1 + 1e-3)

    def backward_weight(self, gradient, x, geometry, size, workspace=None):
        return super().backward_weight(gradient, x, geometry, size) * (1 + 1e-3)


class Random(Twin):
    """Rounds differently at each call."""

    def forward(self, x, w, geometry, workspace=None):
        return super().forward(x, w, geometry) + 1e-7 * torch.randn(4)[:, None, None]


class Clock:
    """Simulated seconds of a call: of a backend or a plan, with noise and now and then a stall.

    Args:
        factors: By the name of a backend; a plan takes the mean of its directions.
        noise: Standard deviation of the logarithm.
        seed: Of the noise.
    """

    def __init__(self, factors, noise=0.03, seed=0):
        self.factors = factors
        self.noise = noise
        self.random = random.Random(seed)
        self.timed = set()

    def __call__(self, work, call):
        self.timed.add(work.name)
        factors = [self.factors.get(name, 1.0) for name in work.name.split("/")]
        stall = 3.0 if self.random.random() < 0.02 else 1.0
        return 1e-3 * sum(factors) / len(factors) * stall * self.random.lognormvariate(0, self.noise)


def searched(factors, backends, needs=STEP, limits=None, seed=0, noise=0.03):
    x, w = tensors(side=4)
    clock = Clock(factors, noise, seed)
    limits = limits or SearchLimits()
    search = Search(key_of(x, w), needs, CPU, limits, backends, timer=clock, seed=seed)
    return search.run(), clock


TWINS = {"native": NATIVE, "twin": Twin()}


def test_two_identical_backends_stay_native_in_95_of_100():
    plans = [searched({}, TWINS, seed=seed, noise=0.05)[0].plan for seed in range(100)]
    assert sum(plan.is_native for plan in plans) >= 95


def test_a_backend_that_is_faster_is_selected():
    results = [searched({"twin": 0.8}, TWINS, seed=seed)[0] for seed in range(20)]
    assert sum(result.plan == ConvPlan("twin", "twin", "twin") for result in results) >= 18
    assert all(1.1 < result.gain.value < 1.4 for result in results)


def test_a_gain_that_is_smaller_than_that_of_the_machine_is_not_believed():
    results = [searched({"twin": 0.98}, TWINS, seed=seed, noise=0.3)[0] for seed in range(20)]
    assert sum(result.plan.is_native for result in results) >= 18


@profile(max_examples=60)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=5, max_size=15),
    st.floats(0.2, 5.0),
)
def test_a_gain_is_clear_only_if_its_interval_and_all_of_a_a_lie_below(seconds, factor):
    gain, is_clear = gain_of(seconds, seconds, [value * factor for value in seconds])
    assert gain.value == pytest.approx(1 / factor)
    assert is_clear == (gain.low > 1)
    if factor >= 1:
        assert not is_clear


def test_a_tie_is_native():
    ties = {direction: {"native": 1.0, "fft": 1.0} for direction in ("forward", "backward_data", "backward_weight")}
    assert fastest_plan(ties, {"native": 2.0, "fft": 2.0}).is_native
    assert gain_of([1.0] * 11, [1.0] * 11, [1.0] * 11)[1] is False


def test_both_gradients_of_one_backend_are_timed_together():
    """Native computes them in one call, which is faster than two calls of two backends."""
    seconds = {
        "forward": {"native": 1.0, "im2col": 0.5},
        "backward_data": {"native": 1.0, "im2col": 0.9},
        "backward_weight": {"native": 1.0, "im2col": 1.2},
    }
    assert fastest_plan(seconds, {"native": 1.5, "im2col": 2.1}) == ConvPlan("im2col", "native", "native")
    assert fastest_plan(seconds, {"native": 2.0, "im2col": 2.1}) == ConvPlan("im2col", "im2col", "native")


@pytest.mark.parametrize("needs", [STEP, FORWARD, Needs(False, True), Needs(True, False)], ids=str)
def test_a_backend_that_is_off_by_a_thousandth_is_rejected_before_it_is_timed(needs):
    backends = {"native": NATIVE, "inexact": Inexact()}
    for seed in range(10):
        result, clock = searched({"inexact": 0.01}, backends, needs, seed=seed)
        assert result.plan.is_native
        assert clock.timed == {"native"}
        assert set(result.rejected) == {f"{direction} inexact" for direction in needs.directions}


def test_a_backend_that_returns_other_bits_is_left_out_of_a_deterministic_search():
    backends = {"native": NATIVE, "twin": Random()}
    fast = {"twin": 0.5}
    assert searched(fast, backends, FORWARD)[0].plan.forward == "twin"
    result, clock = searched(fast, backends, FORWARD, SearchLimits(deterministic=True))
    assert result.plan.is_native
    assert "twin" not in clock.timed


def test_workspace_limits_candidates():
    x, w = tensors()
    key = key_of(x, w)
    needed = BACKENDS["im2col"].workspace_bytes(key)
    for limit in (needed, needed - 1):
        search = Search(key, FORWARD, CPU, SearchLimits(workspace=limit), timer=Clock({}))
        names = {backend.name for backend in search.candidates("forward")}
        assert ("im2col" in names) == (limit == needed)


def test_a_search_without_time_keeps_native():
    result, clock = searched({"twin": 0.1}, TWINS, limits=SearchLimits(seconds=-1.0))
    assert result.plan.is_native
    assert "not finished" in result.reason
    assert clock.timed == set()


def test_a_search_leaves_no_trace():
    search = Search(key_of(*tensors(side=4)), STEP, CPU, SearchLimits(), timer=Clock({}))
    before = torch.get_rng_state()
    with torch.inference_mode():
        search.run()
    assert torch.equal(before, torch.get_rng_state())
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_samples_have_the_sizes_type_and_layout_of_the_key_and_are_new_each_time(layout, dtype):
    x, w = tensors(dtype=dtype, requires_grad=False)
    key = key_of(x.contiguous(memory_format=layout), w)
    sampler = Sampler(key, CPU)
    first, second = sampler.draw(), sampler.draw()
    assert key_of(first.x, first.w) == key
    assert first.gradient.shape == key.y_size
    assert not torch.equal(first.x, second.x)
    assert Sampler(key, CPU).draw().x.equal(first.x)


class Searches:
    """Counts searches, and selects a backend for each direction."""

    def __init__(self, plan=None, seconds=0.01):
        self.plan = plan or ConvPlan()
        self.keys = []
        self.seconds = seconds

    def __call__(self, key, needs, limits):
        self.keys.append((key, needs))
        return SearchResult(self.plan, "", seconds=self.seconds)


def planner(searches, plans=no_plans, tuning=None, limits=None, kind=Planner, **options):
    tuning = tuning or Tuning({"cpu": "one"})
    return kind(tuning.of("algorithm_search"), plans, searches, limits or SearchLimits(), **options)


def call(planner, x, w, stride=1):
    geometry = ConvGeometry((stride, stride), (1, 1))
    return planner.convolve(x, w, geometry, None, lambda count, device: torch.empty(count, dtype=torch.uint8))


def test_a_thousand_calls_over_twenty_shapes_search_twenty_times():
    searches = Searches(ConvPlan("im2col", "im2col", "native"))
    chosen = planner(searches)
    shapes = [tensors(*size) for size in SIZES]
    for number in range(1000):
        call(chosen, *shapes[number % len(shapes)])
    assert len(searches.keys) == len(set(searches.keys)) == 20
    assert chosen.searches == 20


def test_every_call_searches_again_if_that_is_wanted():
    searches = Searches()
    tuning = Tuning({})
    chosen = planner(searches, tuning=tuning, every_call=True, limits=SearchLimits(seconds=0.005))
    x, w = tensors()
    for _ in range(5):
        call(chosen, x, w)
    assert len(searches.keys) == 5
    assert tuning.data() == {}


def variants(x, w):
    """Calls whose times may differ from those of the first one."""
    yield x.double().detach().requires_grad_(), w.double().detach().requires_grad_()
    yield x.detach().contiguous(memory_format=torch.channels_last).requires_grad_(), w
    yield x.detach(), w
    yield x, w.detach()
    yield x.detach(), w.detach()
    yield x.detach()[:1].requires_grad_(), w


def check_separate_plans(kind):
    """Asserts that a planner searches for each of the variants once."""
    searches = Searches()
    chosen = planner(searches, kind=kind)
    x, w = tensors()
    call(chosen, x, w)
    for number, (other_x, other_w) in enumerate(variants(x, w), start=2):
        call(chosen, other_x, other_w)
        call(chosen, other_x, other_w)
        assert len(searches.keys) == number
    call(chosen, x, w, stride=2)
    assert len(searches.keys) == number + 1
    check_settings(searches, chosen, x, w)


def check_settings(searches, chosen, x, w):
    """Asserts that other threads and other arithmetic are another search, and that the first ones are not."""
    known = len(searches.keys)
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        for number, change in enumerate(("threads", "precision"), start=1):
            if change == "threads":
                torch.set_num_threads(threads + 1)
            else:
                torch.set_float32_matmul_precision("medium")
            call(chosen, x, w)
            assert len(searches.keys) == known + number
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            call(chosen, x, w)
            assert len(searches.keys) == known + number
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def test_another_type_layout_need_or_setting_is_another_search():
    check_separate_plans(Planner)


def blind_to(**values):
    """Returns a planner whose key lacks an entry: it takes a plan that was made for something else."""

    class Blind(Planner):
        def plan(self, key, needs):
            return super().plan(replace(key, **values), needs)

    return Blind


class Forgetful(Planner):
    """Takes the plan of the last call, whatever is convolved."""

    def plan(self, key, needs):
        self.last = getattr(self, "last", None) or super().plan(key, needs)
        return self.last


MUTANTS = {
    "key without dtype": blind_to(dtype="float32"),
    "stale plan after a change of layout": blind_to(layout="contiguous"),
    "key without threads": blind_to(threads=1),
    "TF32 of another plan": blind_to(math="ieee/highest"),
    "stale plan": Forgetful,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planner_that_uses_a_plan_of_something_else_is_noticed(name):
    with pytest.raises(AssertionError):
        check_separate_plans(MUTANTS[name])


def test_the_first_threads_are_known_again():
    searches = Searches()
    chosen = planner(searches)
    x, w = tensors()
    threads = torch.get_num_threads()
    try:
        for count in (threads, threads + 1, threads):
            torch.set_num_threads(count)
            call(chosen, x, w)
    finally:
        torch.set_num_threads(threads)
    assert len(searches.keys) == 2


KEYS = st.builds(
    ConvKey,
    n=st.integers(1, 9), c=st.integers(1, 9), h=st.integers(3, 9), w=st.integers(3, 9), k=st.integers(1, 9),
    kernel=st.sampled_from([(1, 1), (3, 3)]), stride=st.sampled_from([(1, 1), (2, 2)]),
    padding=st.sampled_from([(0, 0), (1, 1)]), dilation=st.sampled_from([(1, 1), (2, 2)]), groups=st.just(1),
    transposed=st.booleans(), output_padding=st.just((0, 0)), dtype=st.sampled_from(["float32", "float64"]),
    layout=st.sampled_from(["contiguous", "channels_last"]), direction=st.just("forward"),
    device=st.sampled_from(["cpu", "cuda:A"]), threads=st.integers(1, 4),
    math=st.sampled_from(["ieee/highest", "tf32/highest", "ieee/highest/deterministic"]),
    library=st.sampled_from(["torch-1", "torch-2"]),
)  # fmt: skip


@profile(max_examples=80)
@given(KEYS, KEYS, st.booleans(), st.booleans())
def test_the_text_of_a_plan_differs_exactly_where_its_key_does(first, second, data, weight):
    needs = Needs(data, weight)
    assert (plan_key(first, needs) == plan_key(second, needs)) == (first == second)
    changed = [
        replace(first, **{name: getattr(second, name)})
        for name in vars(first)
        if getattr(first, name) != getattr(second, name)
    ]
    assert len({plan_key(key, needs) for key in [first, *changed]}) == 1 + len(changed)


@profile(max_examples=60)
@given(
    st.none() | st.integers() | st.text(max_size=4) | st.lists(st.text(max_size=3), max_size=3)
    | st.dictionaries(
        st.sampled_from(["forward", "backward_data", "backward_weight", "x"]),
        st.sampled_from(["native", "cudnn", "fft", "", "none", None, 3]),
        max_size=4,
    )
)  # fmt: skip
def test_only_a_legal_plan_is_read(values):
    x, w = tensors()
    key = replace(key_of(x, w), stride=(2, 2))
    directions = {"forward", "backward_data", "backward_weight"}
    is_legal = isinstance(values, dict) and values.keys() == directions and set(values.values()) == {"native"}
    if is_legal:
        assert parse_plan(values, key, STEP).is_native
        return
    with pytest.raises(ValueError, match=r"should name|unknown backend|computes"):
        parse_plan(values, key, STEP)


def test_choices_of_the_lock_are_used_without_a_search():
    x, w = tensors()
    first = Tuning({})
    searches = Searches(ConvPlan("im2col", "fft", "winograd"))
    y = call(planner(searches, tuning=first), x, w)
    second = Tuning({})
    second.lock(json.loads(json.dumps(first.data()))["choices"])
    none = Searches()
    again = planner(none, tuning=second)
    assert call(again, x, w).equal(y)
    assert none.keys == []


def test_a_lock_with_a_plan_that_is_impossible_is_refused_in_one_line():
    x, w = tensors()
    key = plan_key(key_of(x, w), STEP)
    tuning = Tuning({})
    tuning.lock(
        {"algorithm_search": {key: {"forward": "cudnn", "backward_data": "native", "backward_weight": "native"}}}
    )
    with pytest.raises(UsageError, match="--retune") as refusal:
        call(planner(Searches(), tuning=tuning), x, w)
    assert "\n" not in str(refusal.value)


def test_after_the_time_limit_further_shapes_keep_native_and_are_recorded():
    searches = Searches(ConvPlan("im2col", "im2col", "im2col"), seconds=1.0)
    tuning = Tuning({})
    chosen = planner(searches, tuning=tuning, limits=SearchLimits(seconds=2.5))
    for size in SIZES[:6]:
        call(chosen, *tensors(*size))
    assert len(searches.keys) == 3
    assert chosen.untested == 3
    plans = tuning.data()["choices"]["algorithm_search"].values()
    assert [plan["forward"] for plan in plans] == ["im2col"] * 3 + ["native"] * 3
    assert "3 convolutions stayed native" in chosen.notes()[1]


def test_where_nothing_may_be_searched_what_is_unknown_is_native():
    tuning = Tuning({}, searches=False)
    searches = Searches(ConvPlan("im2col", "im2col", "im2col"))
    call(planner(searches, tuning=tuning), *tensors())
    assert searches.keys == []
    assert tuning.data() == {}


def test_a_checkpoint_replaces_plans_that_were_searched():
    x, w = tensors()
    saved = Tuning({})
    call(planner(Searches(ConvPlan("im2col", "im2col", "im2col")), tuning=saved), x, w)
    tuning = Tuning({})
    chosen = planner(Searches(), tuning=tuning)
    call(chosen, x, w)
    tuning.restore(saved.data())
    assert chosen.plan(key_of(x, w), STEP).forward == "im2col"


def test_a_strided_input_keeps_native():
    x, w = tensors(requires_grad=False)
    searches = Searches()
    call(planner(searches), x[:, :, ::2], w)
    assert searches.keys == []


def test_recent_plans_are_bounded_and_forget_the_oldest():
    plans = RecentPlans()
    for number in range(MOST_PLANS):
        plans.put(str(number), {"forward": "native"})
    plans.get("0")
    plans.put("new", {"forward": "native"})
    assert len(plans) == MOST_PLANS
    assert plans.get("0") is not None
    assert plans.get("1") is None


@pytest.mark.parametrize("names", list(itertools.product(["native", "im2col", "fft"], repeat=3)), ids="/".join)
def test_a_plan_computes_what_native_computes(names):
    x, w = tensors(dtype=torch.float64)
    chosen = planner(Searches(ConvPlan(*names)))
    expected = call(planner(Searches()), x, w)
    gradient = torch.randn_like(expected)
    y = call(chosen, x, w)
    torch.testing.assert_close(y, expected)
    for mine, theirs in zip(*(torch.autograd.grad(out, [x, w], gradient) for out in (y, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)
