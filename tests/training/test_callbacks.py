"""Callbacks are called when something has happened, change nothing unnoticed, and are resumed bit for bit."""

import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from toy_runs import TOYS, Notes, trained, written

from runner.cli.closing_table import show
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import drift, read_lock
from runner.recipe.yaml_nodes import RecipeError
from runner.system.console import Console
from runner.system.errors import PluginError, RunnerError
from runner.tracking import RunFolder, Workspace
from runner.tracking.listing import described
from runner.training.checkpoint import CHECKPOINTS, load_newest
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.signals import Stop

OBSERVERS = Path(__file__).parents[1] / "observers.py"
REGISTRY = Registry([TOYS, OBSERVERS])
SHORT = ("train.updates=12", "train.evaluate_every=4", "train.checkpoint_every=3", "train.log_every=3")
COUNTER = "callbacks.counter=on"


def recipe_of(folder, *sets):
    written(folder)
    return load(folder / "toy.yaml", [*SHORT, *sets], REGISTRY)


def pipeline_of(folder, *sets):
    return assemble(recipe_of(folder, *sets), [TOYS, OBSERVERS])


def observed(folder, *sets):
    """Returns the loop of a finished training and what it logged."""
    return trained(folder, pipeline_of(folder, *sets))


def counter_of(loop):
    return loop.callbacks._callbacks["counter"]


def state_of(loop):
    """Returns the learner's tensors, in order."""
    state = loop.pipeline.learner.complete_state()
    moments = [value for group in state["optimizers"]["model"]["state"].values() for value in group.values()]
    return [*state["modules"]["model"].values(), *moments]


def assert_same(expected, actual):
    for one, other in zip(state_of(expected), state_of(actual), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def logged(notes, prefix="callbacks/"):
    return {name: points for name, points in notes.points.items() if name.startswith(prefix)}


def test_every_method_is_called_with_progress_metrics_and_the_learner(tmp_path):
    loop, notes = observed(tmp_path, COUNTER)
    calls = counter_of(loop).calls
    assert [update for method, update, _ in calls if method == "after_update"] == list(range(1, 13))
    assert [(method, update) for method, update, _ in calls if method != "after_update"] == [
        ("on_start", 0), ("after_checkpoint", 3), ("after_evaluation", 4), ("after_checkpoint", 4),
        ("after_checkpoint", 6), ("after_evaluation", 8), ("after_checkpoint", 8), ("after_checkpoint", 9),
        ("after_evaluation", 12), ("on_end", 12), ("after_checkpoint", 12),
    ]  # fmt: skip
    metrics = {method: names for method, _, names in calls}
    assert metrics["on_start"] == []
    assert metrics["after_update"] == metrics["after_evaluation"] == ["loss"]
    assert metrics["on_end"] == metrics["after_checkpoint"] == ["eval/loss", "train/loss", "train/updates"]
    assert notes.points["callbacks/counter/after_update"] == [(step, float(step)) for step in range(2, 13, 2)]
    assert notes.points["callbacks/counter/on_end"] == [(12, 1.0)]


def test_without_callbacks_there_is_nothing(tmp_path):
    loop, notes = observed(tmp_path)
    assert loop.callbacks is None
    assert "callbacks" not in loop.state_dict()
    assert [name for name in notes.points if "callbacks" in name] == []
    assert "callbacks" not in loop.pipeline.recipe.values()


def test_a_callback_that_reads_changes_no_bit(tmp_path):
    expected, plain_notes = observed(tmp_path)
    loop, notes = observed(tmp_path, COUNTER)
    assert loop.callbacks.summary() == ""
    assert_same(expected, loop)
    for name in ("train/loss", "eval/loss"):
        assert notes.points[name] == plain_notes.points[name]
    assert "perf/callbacks_share" in notes.points


class Killed(BaseException):
    pass


@pytest.mark.parametrize("update", [1, 3, 4, 8, 11])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_resumed_run_continues_bit_for_bit(update, is_killed, tmp_path):
    expected, expected_notes = observed(tmp_path, COUNTER)
    pipeline = pipeline_of(tmp_path, COUNTER)
    stop = Stop()

    def interrupting(step):
        def interrupted(*arguments):
            if pipeline.progress.updates == update:
                if is_killed:
                    raise Killed
                stop.received = signal.SIGTERM
            return step(*arguments)

        return interrupted

    pipeline.slots.wrap("update", interrupting)
    notes = Notes()
    cut = []
    notes.mark = lambda: cut.append({name: len(points) for name, points in notes.points.items()}) or len(cut) - 1
    interrupted = Loop(pipeline, tmp_path / "interrupted", notes, notes, stop)
    with suppress(Killed):
        interrupted.run()
    state = load_newest(tmp_path / "interrupted" / CHECKPOINTS)
    resumed = Loop(pipeline_of(tmp_path, COUNTER), tmp_path / "resumed", notes, notes, Stop())
    if state:
        resumed.load_state_dict(state)
        # What was logged after the checkpoint is logged again, as the run's spool does it.
        counts = cut[state["cursor"]]
        notes.points = {name: points[: counts.get(name, 0)] for name, points in notes.points.items()}
    else:
        notes.points = {}
    resumed.run()
    assert_same(expected, resumed)
    assert counter_of(resumed).counts == counter_of(expected).counts
    assert logged(notes) == logged(expected_notes)


@pytest.mark.parametrize(
    ("method", "after", "end"),
    [
        ("on_start", 0, 0),
        ("after_update", 5, 5),
        ("after_evaluation", 3, 4),
        ("after_checkpoint", 5, 6),
        ("on_end", 0, 12),
    ],
)
def test_a_callback_ends_the_training_as_finished(method, after, end, tmp_path):
    sets = (f"callbacks.counter={{ends_in: {method}, after: {after}}}",)
    if not end:
        with pytest.raises(RunnerError, match="ended before its first update"):
            observed(tmp_path, *sets)
        return
    loop, _ = observed(tmp_path, *sets)
    assert (loop.complete, loop.progress.updates) == (True, end)
    assert loop.ended_early == ("" if end == 12 else f"enough in {method}")
    resumed = Loop(pipeline_of(tmp_path, *sets), tmp_path / "again", Notes(), Notes(), Stop())
    resumed.load_state_dict(loop.state_dict())
    resumed.run()
    assert resumed.progress.updates == end


CHANGES = {
    "in_place": "model.3.weight", "data": "model.3.weight", "other_data": "model.3.weight",
    "state": "optimizer.model.state.0.exp_avg", "rate": "optimizer.model.groups.0.lr",
    "mode": "mode of model", "switch": "requires_grad of model.3.weight", "average": "average of model.0.weight",
}  # fmt: skip
QUICK = ("in_place", "other_data", "rate")
"""What every look detects, not only one that reads all numbers."""


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_callback_changes_is_named(what, tmp_path, caplog):
    sets = (f"callbacks.meddler.what={what}", *["train.ema=0.9"] * (what == "average"))
    loop, _ = observed(tmp_path, *sets)
    summary = loop.callbacks.summary()
    assert summary.startswith("callback 'meddler' changed '")
    assert summary.endswith("' in after_update after update 1")
    assert CHANGES[what] in summary
    assert f"{summary}; the run is marked" in caplog.text
    resumed = Loop(pipeline_of(tmp_path, *sets), tmp_path / "again", Notes(), Notes(), Stop())
    resumed.load_state_dict(loop.state_dict())
    assert resumed.callbacks.summary() == summary


@pytest.mark.parametrize("what", [*QUICK, "data"])
def test_between_two_complete_looks_only_changes_of_addresses_and_counters_show(what, tmp_path):
    loop, _ = observed(tmp_path, f"callbacks.meddler={{what: {what}, at: 7}}")
    assert ("after update 7" in loop.callbacks.summary()) == (what in QUICK)


@pytest.mark.parametrize("sets", [(), ("train.ema=0.9",)])
@pytest.mark.parametrize("what", ["predicting", "nothing"])
def test_reading_is_no_change(what, sets, tmp_path):
    loop, _ = observed(tmp_path, f"callbacks.meddler={{what: {what}, at: 7}}", *sets)
    assert loop.callbacks.summary() == ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("misspelt", r"Misspelt.after_updates in .*s.py:\d+ is never called - did you mean 'after_update'\?"),
        ("narrow", r"Narrow.on_end in .*s.py:\d+ should take \(self, progress, metrics, learner\)"),
        ("idle", r"Idle overrides none of on_start, .*, so it has no effect"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_called_is_an_error_with_its_line(kind, message, tmp_path):
    path = tmp_path / "toy.yaml"
    written(tmp_path)
    path.write_text(f"{path.read_text()}callbacks: {{{kind}: on}}\n")
    recipe = load(path, SHORT, REGISTRY)
    line = len(path.read_text().splitlines())
    with pytest.raises(RecipeError, match=rf"toy.yaml:{line}:\d+: callbacks.{kind}: {message}"):
        trained(tmp_path, assemble(recipe, [TOYS, OBSERVERS]))


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("list", "should return None or metrics by name, got list"),
        ("text", "returned 'a' as str; it should be a number or a scalar tensor"),
        ("flag", "returned 'a' as bool; it should be a number or a scalar tensor"),
        ("name", "returned a metric with the name ''"),
    ],
)
def test_what_is_no_metric_is_an_error_with_the_method(returns, message, tmp_path):
    with pytest.raises(RunnerError, match=rf"Odd.after_update in .*observers.py:\d+ {message}"):
        observed(tmp_path, f"callbacks.odd.returns={returns}")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("callbacks.conter=on", "callbacks.conter: unknown callback - did you mean 'counter'?"),
        ("callbacks.xyz=on", "callbacks.xyz: unknown callback - known: "),
        ("callbacks.counter.evry=1", "callbacks.counter.evry: unknown key - did you mean 'every'?"),
        ("callbacks.counter=7", "callbacks.counter: should be on, off or its settings, got 7"),
        ("callbacks=7", "callbacks: should be a mapping of callbacks, got 7"),
        ("calbacks.counter=on", "calbacks: unknown key - did you mean 'callbacks'?"),
    ],
)
def test_misuse_is_one_line(assignment, message, tmp_path):
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, assignment)
    (problem,) = caught.value.problems
    assert f"{problem.path}: {problem.message}".startswith(message)


def test_a_recipe_with_callbacks_is_the_same_when_it_is_read_again(tmp_path):
    recipe = recipe_of(tmp_path, "callbacks.counter.every=3", "callbacks.meddler=off")
    assert recipe.values()["callbacks"] == {"counter": {"every": 3, "ends_in": "", "after": 0}}
    assert recipe.overrides["callbacks.counter.every"] == 3
    again = load(recipe.printable(), (), REGISTRY)
    assert again.callbacks == recipe.callbacks
    assert again.digest == recipe.digest != recipe_of(tmp_path).digest
    both = recipe_of(tmp_path, "callbacks.meddler=on", COUNTER)
    assert list(both.callbacks) == ["counter", "meddler"]


@pytest.mark.usefixtures("migrated_workspace")
def test_a_run_that_a_callback_changed_is_marked_everywhere(tmp_path, capsys):
    recipe = recipe_of(tmp_path, "callbacks={counter: on, meddler: on}")
    result = run(recipe, REGISTRY, Workspace(), NoOutput())
    summary = "callback 'meddler' changed 'model.3.weight' in after_update after update 1"
    assert result.changed_by == summary
    show(result, (), Console(width=200))
    assert f"callbacks {summary}" in capsys.readouterr().out
    assert described(RunFolder(Path(result.run_dir)))["changed_by"] == summary
    lock = read_lock(Path(result.lock))
    assert lock["recipe"]["callbacks"]["counter"]["every"] == 2
    assert lock["plugins"]["callbacks.counter"].startswith("observers.py ")
    assert drift(Path(result.lock), load(result.lock, (), REGISTRY), REGISTRY) == []
    texts = sorted((Path(result.run_dir) / "media" / "metrics").iterdir())
    assert [path.read_text() for path in texts] == ["loss"] * 3

    tags = MlflowClient(result.tracking_uri).get_run(result.run_id).data.tags
    assert (tags["callbacks"], tags["callbacks.changed"]) == ("counter,meddler", summary)
    assert summary in tags["mlflow.note.content"]


@pytest.mark.usefixtures("migrated_workspace")
def test_an_exception_is_reported_with_its_line(tmp_path):
    with pytest.raises(
        PluginError, match=r"Failing.after_evaluation in .*observers.py:\d+: KeyError: 'no such metric'"
    ):
        run(recipe_of(tmp_path, "callbacks.failing=on"), REGISTRY, Workspace(), NoOutput())
