"""What a training reports about its speed: where the time went, and how fast updates are once they have begun."""

import pytest
from running import tiny
from toy_runs import toy_pipeline, trained

from runner.training import loop as looping
from runner.training import metrics
from runner.training.pipeline import assemble

DRAW_S, UPDATE_S, FIRST_S, EVALUATION_S = 0.6, 0.4, 50.0, 3.0


class Clock:
    """Time passes in a slot, and nowhere else."""

    def __init__(self):
        self.now = 0.0

    def slowed(self, slots, name, seconds, first=0.0):
        taken = [first]

        def wrapper(step):
            def slow(*arguments):
                output = step(*arguments)
                self.now += seconds + (taken.pop() if taken else 0.0)
                return output

            return slow

        slots.wrap(name, wrapper)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (metrics, looping):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    return clock


def slow(pipeline, clock):
    """The pipeline with steps that take a known time."""
    clock.slowed(pipeline.slots, "draw", DRAW_S)
    clock.slowed(pipeline.slots, "update", UPDATE_S, FIRST_S)
    evaluate = pipeline.source.evaluate

    def evaluated(learner):
        if not pipeline.source.rehearsing:
            clock.now += EVALUATION_S
        return evaluate(learner)

    pipeline.source.evaluate = evaluated
    return pipeline


def test_sampling_is_no_update_time_and_the_first_update_is_none_either(clock, tmp_path):
    pipeline = slow(toy_pipeline(tmp_path, "train.updates=20", "train.log_every=10"), clock)
    _, notes = trained(tmp_path, pipeline)
    points = {name: [value for _, value in values] for name, values in notes.points.items()}
    assert points["perf/first_update_seconds"] == pytest.approx([FIRST_S + UPDATE_S])
    assert points["perf/update_ms"] == pytest.approx([1e3 * UPDATE_S] * 2)
    first_s = 10 * DRAW_S + 9 * UPDATE_S + FIRST_S + UPDATE_S
    last_s = 10 * (DRAW_S + UPDATE_S) + EVALUATION_S
    assert points["perf/sample_share"] == pytest.approx([10 * DRAW_S / first_s, 10 * DRAW_S / last_s])
    assert points["perf/update_share"] == pytest.approx([9 * UPDATE_S / first_s, 10 * UPDATE_S / last_s])
    assert points["perf/startup_share"] == pytest.approx([(FIRST_S + UPDATE_S) / first_s, 0.0])
    assert points["perf/evaluate_share"] == pytest.approx([0.0, EVALUATION_S / last_s])
    for report in range(2):
        assert sum(values[report] for name, values in points.items() if name.endswith("_share")) == pytest.approx(1.0)


def test_drawing_an_evaluation_is_part_of_it_and_no_time_of_an_update(clock, tmp_path, monkeypatch):
    def draw_slowly(pipeline, interval):
        clock.now += 9.0

    monkeypatch.setattr(looping, "draw_evaluation", draw_slowly)
    sets = ("train.updates=20", "train.log_every=10", "train.evaluate_every=10")
    loop, notes = trained(tmp_path, slow(toy_pipeline(tmp_path, *sets), clock))
    assert [value for _, value in notes.points["perf/update_ms"]] == pytest.approx([1e3 * UPDATE_S] * 2)
    assert loop.mean_update_s() == pytest.approx(UPDATE_S)
    assert loop.spent["evaluate"] == pytest.approx(2 * (EVALUATION_S + 9.0))


@pytest.mark.parametrize("updates", [10, 30])
def test_speeds_are_those_of_training_steps(updates, clock, tmp_path):
    sets = (f"train.updates={updates}", "train.log_every=10", "train.evaluate_every=10")
    pipeline = slow(toy_pipeline(tmp_path, *sets), clock)
    _, notes = trained(tmp_path, pipeline)
    rates = [value for _, value in notes.points["perf/samples_per_second"]]
    assert rates[1:] == pytest.approx([8 / (DRAW_S + UPDATE_S)] * (updates // 10 - 1))
    assert rates[0] == pytest.approx(8 * 9 / (10 * DRAW_S + 9 * UPDATE_S))
    assert [value for _, value in notes.points["perf/updates_per_second"]] == pytest.approx(
        [rate / 8 for rate in rates]
    )


def test_a_single_update_has_no_time_of_a_steady_one(clock, tmp_path):
    _, notes = trained(tmp_path, slow(toy_pipeline(tmp_path, "train.updates=1"), clock))
    assert "perf/update_ms" not in notes.points
    assert notes.points["perf/updates_per_second"] == [(1, 0.0)]
    assert "perf/first_update_seconds" in notes.points


@pytest.mark.parametrize(
    ("recipe", "units"),
    [
        ("shakespeare_gpt", {"samples", "tokens", "updates"}),
        ("digits_classifier", {"samples", "updates"}),
        ("marl_baseline", {"env_steps", "updates"}),
    ],
)
def test_all_that_is_counted_has_a_speed_and_memory_has_a_peak(recipe, units, tmp_path):
    _, notes = trained(tmp_path, assemble(tiny(recipe, "optimization={}")))
    rates = {name: values[-1][1] for name, values in notes.points.items() if name.endswith("_per_second")}
    assert units <= {name.removeprefix("perf/").removesuffix("_per_second") for name in rates}
    assert all(rate > 0 for rate in rates.values())
    assert notes.points["perf/peak_memory_mib"][-1][1] > 50
