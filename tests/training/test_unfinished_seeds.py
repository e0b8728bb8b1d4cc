"""Results of a group whose members have not all finished."""

import errno
import io
import math
import os

import mlflow
import pytest
from run_folders import run_folder
from toy_runs import TOYS, SilentSeeds, toy

from runner.cli.seeds import show
from runner.cli.sync import sync
from runner.plugin.registry import Registry
from runner.system.console import Console
from runner.system.stored_json import json_number
from runner.tracking import RunFolder, Workspace
from runner.tracking.seeds import groups
from runner.tracking.spool import Spool, unsent
from runner.tracking.store import Store
from runner.training.seeds import train_seeds

pytestmark = pytest.mark.usefixtures("migrated_workspace")


@pytest.fixture
def group_of(tmp_path, monkeypatch):
    """Returns the result of a group whose trainings log these losses by step."""

    def group_of(curves, statuses, **options):
        def train_seed(recipe, registry, run, threads, options, *rest):
            folder = run_folder(digest=recipe.digest, group=options["group"][0], status=statuses[recipe.seed])
            spool = Spool(folder.spool)
            for step, loss in curves[recipe.seed].items():
                spool.append(t=step, step=step, metrics={"eval/loss": json_number(loss)})
            spool.close()

        monkeypatch.setattr("runner.training.seeds.train_seed", train_seed)
        recipes = {seed: toy(tmp_path, "train.updates=4", f"seed={seed}") for seed in curves}
        return train_seeds(
            recipes, Registry([TOYS]), Workspace(), SilentSeeds(), 1, tags={}, note="", resume_command="",
            **{"go_on": False, **options},
        )  # fmt: skip

    return group_of


CURVES = {5: {2: 1.0, 4: 0.1}, 6: {2: 3.0}, 7: {2: 2.0, 4: 0.3}}


@pytest.mark.parametrize("status", ["FAILED", "STOPPED", "RUNNING"])
def test_values_of_an_unfinished_group_are_those_of_its_mean(status, group_of):
    result = group_of(CURVES, {5: "FINISHED", 6: status, 7: "FINISHED"})
    assert result.status == "FAILED"
    assert result.unfinished == (6,)
    assert result.steps == {"loss": 2}
    assert result.values == {"loss": {5: 1.0, 6: 3.0, 7: 2.0}}
    assert result.means["loss"].mean == pytest.approx(2.0)
    assert result.data()["steps"] == {"loss": 2}
    for width in (80, 160):
        screen = io.StringIO()
        show(result, ["loss"], "again", "seed", Console(file=screen, width=width))
        assert "after step 2, the last that all seeds reached: loss" in " ".join(screen.getvalue().split())


def test_values_of_a_finished_group_are_the_last_ones(group_of):
    result = group_of(CURVES, dict.fromkeys(CURVES, "FINISHED"))
    assert (result.status, result.unfinished, result.steps) == ("FINISHED", (), {})
    assert result.values == {"loss": {5: 0.1, 6: 3.0, 7: 0.3}}


def test_the_best_value_of_a_grid_is_of_a_finished_run(group_of):
    curves = {5: {2: 1.0}, 6: {2: 0.1}, 7: {2: 2.0}}
    statuses = {5: "FINISHED", 6: "FAILED", 7: "FINISHED"}
    group_of(curves, statuses, kind="grid", varied=("seed",))
    (group,) = groups(Workspace())
    assert (group.kind, group.metrics["eval/loss"]) == ("grid", 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_mean_that_is_nan_replaces_earlier_ones(value, group_of):
    curves = {5: {2: 1.0, 4: 0.5}, 6: {2: 2.0, 4: value}}
    result = group_of(curves, dict.fromkeys(curves, "FINISHED"))
    (group,) = groups(Workspace())
    assert math.isnan(group.metrics["eval/loss"])
    client = mlflow.MlflowClient(Workspace().resolved_uri(group.tracking_uri))
    assert math.isnan(client.get_run(result.run_id).data.metrics["eval/loss"])


def test_a_group_of_seeds_is_not_continued_as_a_grid(group_of):
    statuses = {5: "FAILED", 6: "FINISHED", 7: "FINISHED"}
    group_of(CURVES, statuses)
    group_of(CURVES, statuses, kind="grid", varied=("seed",))
    assert [group.kind for group in groups(Workspace())] == ["grid", "seeds"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_at_the_end_does_not_cost_the_result(number, group_of, monkeypatch, caplog):
    write = RunFolder.write

    def write_unless_last(folder, record):
        if record.kind == "seeds" and record.status == "FINISHED":
            raise OSError(number, os.strerror(number))
        write(folder, record)

    monkeypatch.setattr(RunFolder, "write", write_unless_last)
    result = group_of(CURVES, dict.fromkeys(CURVES, "FINISHED"))
    assert result.status == "FINISHED"
    assert f"the record of {result.name} was not written: {os.strerror(number)}" in caplog.text


def results_in_mlflow(group):
    client = mlflow.MlflowClient(Workspace().resolved_uri(group.tracking_uri))
    run = client.get_run(group.run_id)
    names = [artifact.path for artifact in client.list_artifacts(group.run_id)]
    return run.info.status, run.data.metrics, run.data.tags["mlflow.note.content"], names


@pytest.mark.parametrize("method", ["send", "set_status", "log_artifact"])
@pytest.mark.parametrize("kind", ["seeds", "folds"])
def test_results_that_mlflow_refuses_are_sent_later(kind, method, group_of, monkeypatch, caplog):
    send = getattr(Store, method)

    def refuse_results(store, run_id, *values):
        record = RunFolder(next(Workspace().seeds.iterdir())).record()
        if record is not None:
            raise OSError("it is away")
        send(store, run_id, *values)

    with monkeypatch.context() as away:
        away.setattr(Store, method, refuse_results)
        result = group_of(CURVES, dict.fromkeys(CURVES, "FINISHED"), kind=kind)
    hint = f"missing in MLflow: it is away; send them with: runner sync {result.name}"
    assert hint in caplog.text
    folder = RunFolder(Workspace().seeds / result.name)
    assert unsent(folder.spool)
    sync([result.name] if kind == "seeds" else None)
    assert not unsent(folder.spool)
    status, metrics, description, names = results_in_mlflow(folder.record())
    assert (status, names) == ("FINISHED", ["curves.png"])
    assert metrics["eval/loss"] == result.means["loss"].mean
    assert "FINISHED; eval/loss" in description


@pytest.mark.parametrize("lines", [0, 1, 2, 4, 5])
def test_results_are_sent_if_the_disk_refuses_their_lines(lines, group_of, monkeypatch, caplog):
    """Two lines are the group before its training."""
    written = []

    class FullSpool(Spool):
        is_full = False

        def append(self, **record):
            self.is_full = self.is_full or len(written) >= lines
            if not self.is_full:
                written.append(record)
                super().append(**record)

        def close(self):
            return super().close() and not self.is_full

    monkeypatch.setattr("runner.training.group_publication.Spool", FullSpool)
    result = group_of(CURVES, dict.fromkeys(CURVES, "FINISHED"))
    assert result.status == "FINISHED"
    status, metrics, description, names = results_in_mlflow(RunFolder(Workspace().seeds / result.name).record())
    assert (status, names) == ("FINISHED", ["curves.png"])
    assert metrics["eval/loss"] == result.means["loss"].mean
    assert "FINISHED; eval/loss" in description
    assert "missing in MLflow" not in caplog.text


def test_results_that_neither_disk_nor_mlflow_takes_are_a_warning(group_of, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("runner.training.group_publication.Spool", refuse)
    monkeypatch.setattr(Store, "send", refuse)
    result = group_of(CURVES, dict.fromkeys(CURVES, "FINISHED"))
    assert result.status == "FINISHED"
    assert f"the results of {result.name} are missing in MLflow" in caplog.text
    assert "runner sync" not in caplog.text


def test_results_are_sent_without_a_plot_that_cannot_be_written(group_of, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("runner.tracking.seeds.draw", refuse)
    result = group_of(CURVES, dict.fromkeys(CURVES, "FINISHED"))
    status, metrics, _, names = results_in_mlflow(RunFolder(Workspace().seeds / result.name).record())
    assert (status, names) == ("FINISHED", [])
    assert metrics["eval/loss"] == result.means["loss"].mean
    assert f"the curves of {result.name} are not plotted" in caplog.text


@pytest.mark.parametrize("kind", ["seeds", "folds", "grid"])
def test_a_group_is_at_work_before_it_is_in_mlflow(kind, group_of, monkeypatch):
    """``runner sync`` leaves a group alone that is at work."""
    send = Store.send
    seen = []

    def observe(store, *values):
        record = RunFolder(next(Workspace().seeds.iterdir())).record()
        seen.append((record.at_work, record.status))
        send(store, *values)

    monkeypatch.setattr(Store, "send", observe)
    group_of(CURVES, dict.fromkeys(CURVES, "FINISHED"), kind=kind)
    assert len(seen) == 2
    assert set(seen) == {(True, "RUNNING")}


@pytest.mark.parametrize("value", [0.1, 0.0, math.nan])
@pytest.mark.parametrize("status", ["FINISHED", "FAILED"])
def test_the_means_of_a_group_are_in_mlflow_once(value, status, group_of):
    """Its process may die between its results and its record; they are computed again."""
    curves = {5: {2: 1.0, 4: value}, 6: {2: 3.0, 4: 0.2}}
    statuses = {5: "FINISHED", 6: status}
    first = group_of(curves, statuses)
    folder = RunFolder(Workspace().seeds / first.name)
    folder.write(folder.record().model_copy(update={"status": "STOPPED"}))
    again = group_of(curves, statuses, go_on=True)
    assert again.name == first.name
    client = mlflow.MlflowClient(Workspace().resolved_uri(folder.record().tracking_uri))
    history = client.get_metric_history(first.run_id, "eval/loss")
    assert [point.step for point in history] == [2, 4]


def test_a_group_without_a_spool_has_nothing_to_send(group_of):
    result = group_of(CURVES, dict.fromkeys(CURVES, "FINISHED"))
    RunFolder(Workspace().seeds / result.name).spool.unlink()
    sync([result.name])
