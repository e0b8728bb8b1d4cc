import shlex
import sqlite3
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import sqlalchemy.exc
from faces import FakeCatalog
from optuna.pruners import HyperbandPruner
from optuna.study import StudyDirection
from optuna.trial import TrialState
from studies import SPACE, read, study_text

from runner.study.leases import Leases
from runner.study.sampler import PerTrialSampler
from runner.study.store import COMPUTATION, DEFINITION, TOP_UP, VARIABLE, StudyStore, forget, verdict_key
from runner.system.errors import ExitCode, StorageError, UsageError
from runner.system.processes import Owner
from runner.tracking import Workspace

OPEN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from faces import FakeCatalog
from runner.study.definition import load_study
from runner.study.leases import Leases
from runner.study.store import StudyStore
from runner.tracking import Workspace
definition = load_study(sys.argv[2], (), FakeCatalog())
print("ready", flush=True)
sys.stdin.readline()
store = StudyStore.open(Workspace())
study = store.create(definition)
store.top_up(study, definition, Leases(store.engine, "mine"))
print(len(study.get_trials(deepcopy=False)), len(study.user_attrs), flush=True)
"""
TESTS = Path(__file__).parents[1]
DEAD = Owner.this_process().model_copy(update={"born": 12345.0})


@pytest.fixture
def leases(store):
    return Leases(store.engine, "mine")


def refused(store, definition):
    with pytest.raises(UsageError) as caught:
        store.create(definition)
    return str(caught.value)


def test_a_study_is_made_once(store, tmp_path):
    definition = read(tmp_path, study_text(more="budget: {trials: 5}\n"), "data.envs=3")
    one, again = store.create(definition), store.create(definition)
    assert one._study_id == again._study_id
    assert again.user_attrs[DEFINITION] == one.user_attrs[DEFINITION]
    kept = again.user_attrs[DEFINITION]
    assert (kept["digest"], kept["file"]) == (definition.digest, str(tmp_path / "study.yaml"))
    assert kept["sets"] == ["data.envs=3"]  # of the command line
    assert kept["recipe"]["data"]["envs"] == 3
    assert isinstance(again.sampler, PerTrialSampler)


def test_a_study_has_names_and_directions_of_its_objectives(store, tmp_path):
    aims = "objectives: {eval/return: maximize, eval/x: minimize, eval/success: {direction: maximize, reach: 0.9}}\n"
    study = store.create(read(tmp_path, study_text(aims=aims)))
    assert study.directions == [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE, StudyDirection.MINIMIZE]
    assert study.metric_names == ["eval/return", "eval/x", "eval/success"]


def test_the_pruner_knows_how_long_a_training_is(store, tmp_path):
    text = study_text(more="pruner: {kind: hyperband}\nset: [train.env_steps=5000, train.evaluate_every=500]\n")
    study = store.create(read(tmp_path, text))
    assert isinstance(study.pruner, HyperbandPruner)
    assert (study.pruner._min_resource, study.pruner._max_resource) == (500, 5000)


@pytest.mark.parametrize(
    ("text", "sets", "differing"),
    [
        (study_text(more="seed: 3\n"), (), "seed"),
        (study_text(SPACE.replace("1e-2", "2e-2")), (), "space.model.lr.float"),
        (study_text(more="seeds: 2\nsampler: {kind: random}\n"), (), "sampler.kind, seeds"),
        (study_text(), ("data.envs=9", "seed=1"), "recipe.data.envs, recipe.seed"),
        (study_text(more="set: [data.envs=9]\n"), (), "recipe.data.envs"),
        (study_text(more="seed: 3\nbudget: {trials: 9}\nretries: 4\nlimits: {seconds: 3}\n"), (), "seed"),
    ],
)
def test_another_definition_of_that_name_is_refused_with_what_differs(store, tmp_path, text, sets, differing):
    store.create(read(tmp_path))
    message = refused(store, read(tmp_path, text, *sets))
    assert message.startswith(f"study 'mine' was created with another definition ({differing}); give this one another")
    assert message.endswith("--fresh")


class ChangedCatalog(FakeCatalog):
    """The same plugins, of which one is of another version."""

    def __init__(self, kind):
        self._kind = kind

    def provider(self, section, kind):
        version = "0.2.0" if kind == self._kind else "0.1.0"
        return replace(super().provider(section, kind), version=version)


@pytest.mark.parametrize("kind", ["net", "sim", "merge", "rival"])
def test_other_code_is_refused_unless_it_is_allowed(store, tmp_path, kind):
    """Also that of a stage which the recipe does not use and trials may."""
    space = "space:\n  optimization.rival: {choice: [off, on]}\n"
    definition = read(tmp_path, study_text(space), "optimization.cache=off")
    store.create(definition)
    changed = replace(definition, catalog=ChangedCatalog(kind))
    assert f".{kind}: proven-runner 0.1.0 before, proven-runner 0.2.0 now" in refused(store, changed)
    store.create(definition)
    store.create(changed, allow_drift=True)
    store.create(changed)
    assert f".{kind}" in refused(store, definition)


def test_a_study_of_an_earlier_version_is_continued(store, tmp_path):
    definition = read(tmp_path)
    store.create(definition).set_user_attr(COMPUTATION, None)
    store.create(replace(definition, catalog=ChangedCatalog("net")))
    assert ".net" in refused(store, definition)


def test_budget_and_limits_may_change(store, tmp_path):
    store.create(read(tmp_path, study_text(more="budget: {trials: 3}\n")))
    study = store.create(read(tmp_path, study_text(more="budget: {trials: 9}\nlimits: {seconds: 3}\n")))
    assert study.user_attrs[DEFINITION]["config"]["budget"]["trials"] == 9


def test_a_study_of_another_name_is_another(store, tmp_path):
    one = store.create(read(tmp_path))
    other = store.create(read(tmp_path, study_text(more="seed: 3\n").replace("name: mine", "name: other")))
    assert one._study_id != other._study_id


def test_a_study_is_found_by_its_name(store, tmp_path):
    made = store.create(read(tmp_path))
    assert store.find("mine")._study_id == made._study_id
    with pytest.raises(UsageError, match=r"no study 'mien' in sqlite:.* - did you mean 'mine'\?"):
        store.find("mien")


def test_no_secret_of_a_recipe_is_in_the_storage(store, tmp_path, isolated_workspace):
    definition = read(tmp_path, study_text(more="set: [model.password=opensesame9]\n"), "model.password=opensesame8")
    store.top_up(store.create(definition), definition, Leases(store.engine, "mine"))
    assert b"opensesame" not in (isolated_workspace / "optuna.db").read_bytes()


def test_a_study_that_nobody_works_on_is_forgotten_with_its_leases(store, leases, tmp_path, monkeypatch):
    store.create(read(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "this_process", lambda owner=DEAD: owner)  # it died
        assert leases.claim(3)
    forget("mine", Workspace())
    assert leases.all() == []
    with pytest.raises(UsageError, match="no study 'mine'"):
        store.find("mine")
    store.create(read(tmp_path, study_text(more="seed: 3\n")))


def test_a_study_that_somebody_works_on_is_not_forgotten(store, leases, tmp_path):
    store.create(read(tmp_path))
    assert leases.claim(0)
    with pytest.raises(UsageError, match=r"study 'mine' is being worked on: process [0-9]+ on "):
        forget("mine", Workspace())
    assert store.find("mine").user_attrs[DEFINITION]
    leases.release(0)
    forget("mine", Workspace())


def test_what_is_not_there_is_forgotten_already(store):
    forget("mine", Workspace())


def test_fresh_forgets_trials_and_lays_their_folder_aside(store, tmp_path, isolated_workspace):
    definition = read(tmp_path)
    forget("mine", Workspace())  # nothing yet
    store.create(definition).enqueue_trial({})
    folder = isolated_workspace / "studies" / "mine"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("old")
    forget("mine", Workspace())
    assert not folder.exists()
    assert [path.read_text() for path in folder.parent.glob("mine.*.before/report.html")] == ["old"]
    assert store.create(definition).get_trials() == []


def test_the_queue_has_as_many_trials_as_the_budget_and_the_recipe_as_it_is_first(store, leases, tmp_path):
    definition = read(tmp_path, study_text(more="budget: {trials: 4}\n"))
    study = store.create(definition)
    store.top_up(study, definition, leases)
    store.top_up(study, definition, leases)
    queue = study.get_trials()
    assert [trial.state for trial in queue] == [TrialState.WAITING] * 4
    assert [trial.system_attrs.get("fixed_params") for trial in queue] == [{"model.lr": 1e-3}, {}, {}, {}]
    assert leases.all() == []


def test_a_recipe_that_the_space_leaves_out_is_not_tried(store, leases, tmp_path):
    space = "space: {model.lr: {choice: [1e-4, 1e-2]}}\n"
    definition = read(tmp_path, study_text(space, more="budget: {trials: 2}\n"))
    study = store.create(definition)
    store.top_up(study, definition, leases)
    assert [trial.system_attrs.get("fixed_params") for trial in study.get_trials()] == [{}, {}]


@pytest.mark.parametrize(("before", "after", "there"), [(2, 5, 5), (5, 2, 5)])
def test_a_budget_that_is_changed_adds_trials_and_takes_none_away(store, leases, tmp_path, before, after, there):
    for trials in (before, after):
        definition = read(tmp_path, study_text(more=f"budget: {{trials: {trials}}}\n"))
        study = store.create(definition)
        store.top_up(study, definition, leases)
    assert len(study.get_trials()) == there


def test_several_workers_put_no_trial_into_the_queue_twice(store, tmp_path):
    definition = read(tmp_path, study_text(more="budget: {trials: 7}\n"))
    study, barrier, failed = store.create(definition), threading.Barrier(4), []

    def top_up():
        leases = Leases(store.engine, "mine")
        own = optuna.load_study(study_name="mine", storage=store)
        barrier.wait()
        try:
            store.top_up(own, definition, leases)
        except BaseException as error:
            failed.append(error)
        finally:
            store.remove_session()

    threads = [threading.Thread(target=top_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(study.get_trials()) == 7
    assert [bool(trial.system_attrs.get("fixed_params")) for trial in study.get_trials()] == [True] + [False] * 6


def test_what_a_worker_that_died_had_not_put_into_the_queue_is_put_there(store, leases, tmp_path, monkeypatch):
    definition = read(tmp_path, study_text(more="budget: {trials: 4}\n"))
    study = store.create(definition)
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "this_process", lambda owner=DEAD: owner)
        assert Leases(store.engine, "mine").claim(TOP_UP)
    study.enqueue_trial(definition.as_given())
    store.top_up(study, definition, leases)
    assert [trial.system_attrs["fixed_params"] for trial in study.get_trials()] == [{"model.lr": 1e-3}, {}, {}, {}]


def test_several_processes_open_a_fresh_storage_at_once(tmp_path):
    read(tmp_path, study_text(more="budget: {trials: 5}\n"))
    command = [sys.executable, "-c", OPEN, str(TESTS), str(tmp_path / "study.yaml")]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
            for _ in range(2)
        ]
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 2
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        said = [child.communicate() for child in children]
    assert said == [("5 3\n", "")] * 2


def test_a_trial_goes_on_as_often_as_it_has_to(store, tmp_path):
    study = store.create(read(tmp_path))
    study.enqueue_trial({"model.lr": 2e-3})
    study.get_trials()
    for _ in range(2):
        trial = store.trial(study, 0)
        assert trial.number == 0
        assert trial.suggest_float("model.lr", 1e-4, 1e-2, log=True) == 2e-3
        trial.set_user_attr("seen", True)
        assert study.get_trials()[0].state == TrialState.RUNNING
    study.tell(trial, 1.0)
    assert study.best_trial.user_attrs == {"seen": True}


def test_a_verdict_is_kept_for_stages_with_the_same_settings_whatever_numbers_are_searched(tmp_path):
    cache = {"optimization.cache": "on"}
    definition = read(tmp_path, study_text(SPACE + "  optimization.cache: {choice: [off, on]}\n"))
    one, other = (definition.recipe_of(cache | {"model.lr": lr}) for lr in (1e-3, 2e-3))
    assert verdict_key(one, cache | {"model.lr": 1e-3}) == verdict_key(other, cache | {"model.lr": 2e-3})
    off = definition.recipe_of({"optimization.cache": "off"})
    assert verdict_key(one, cache) != verdict_key(off, {"optimization.cache": "off"})
    assert verdict_key(one, {"model.how": "one"}) != verdict_key(one, {"model.how": "another"})


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://runner:hunter2hunter2@127.0.0.1:1/studies", "127.0.0.1"),
        ("postgres://runner:hunter2hunter2@127.0.0.1:1/studies?connect_timeout=5", "127.0.0.1"),
        ("mysql+nodriver://runner:hunter2hunter2@127.0.0.1/studies", "nodriver"),
        ("nonsense", "parse"),
        ("sqlite:////proc/nowhere/optuna.db", "unable to open database file"),
    ],
)
def test_a_storage_that_does_not_answer_says_so_without_a_password(monkeypatch, url, reason):
    monkeypatch.setenv(VARIABLE, url)
    with pytest.raises(StorageError) as caught:
        StudyStore.open(Workspace())
    message = str(caught.value)
    assert caught.value.exit_code == ExitCode.STORAGE_UNAVAILABLE == 5
    assert message.startswith("study storage ")
    assert reason in message
    assert "start its server, or name another in OPTUNA_STORAGE" in message
    assert "hunter2hunter2" not in message
    assert "\n" not in message


def test_a_file_that_is_no_database_is_no_storage(isolated_workspace):
    isolated_workspace.mkdir()
    (isolated_workspace / "optuna.db").write_text("this is no database, and was never one\n" * 99)
    with pytest.raises(StorageError, match="file is not a database"):
        StudyStore.open(Workspace())


def test_a_database_of_another_optuna_is_no_storage(storage_url, isolated_workspace):
    with closing(sqlite3.connect(isolated_workspace / "optuna.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'v0.9.0.a'")
    with pytest.raises(StorageError, match="no longer compatible"):
        StudyStore.open(Workspace())


def test_a_workspace_that_cannot_be_written_is_no_storage(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNNER_WORKSPACE", str(tmp_path / "file" / "below"))
    with pytest.raises(StorageError, match=r"study storage sqlite:///.*cannot be used"):
        StudyStore.open(Workspace())


def test_a_storage_that_goes_away_is_said_with_what_to_do(store, tmp_path, isolated_workspace):
    store.create(read(tmp_path))
    told = r"does not answer any more: .*; the same command continues from there"
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(StorageError, match=told))
        opened = stack.enter_context(StudyStore.session(Workspace()))
        (isolated_workspace / "optuna.db").write_text("overwritten\n" * 999)
        opened.engine.dispose()
        opened.find("mine")


def test_a_storage_that_goes_away_takes_no_password_along(store, monkeypatch):
    url = "postgresql://runner:hunter2hunter2@host/studies"
    monkeypatch.setattr(store, "url", url)
    monkeypatch.setattr(StudyStore, "open", lambda _workspace, _reading=False: store)
    with pytest.raises(StorageError) as caught, StudyStore.session(Workspace()):
        raise sqlalchemy.exc.OperationalError(f"SELECT 1 -- {url}", {}, Exception(f"no route to {url}\nmore"))
    assert "no route to postgresql://runner:**********@host/studies" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "more" not in str(caught.value).replace("any more", "")


def test_other_errors_are_not_the_storages(store):
    with pytest.raises(UsageError, match="mine"), StudyStore.session(Workspace()):
        raise UsageError("mine")


def test_the_dashboard_is_told_the_storage_and_never_a_password(tmp_path, monkeypatch):
    store = StudyStore.open(Workspace(tmp_path / "a folder"))
    command = ["optuna-dashboard", f"sqlite:///{tmp_path}/a folder/optuna.db"]
    assert shlex.split(store.dashboard) == command
    url = "postgresql+psycopg://me:hunter2hunter2@host:5432/studies"
    store.url = url
    for given in (url, url.replace("+psycopg", ""), url.replace("postgresql+psycopg", "postgres")):
        monkeypatch.setenv(VARIABLE, given)
        assert "hunter2" not in store.dashboard
        shell = f"optuna-dashboard() {{ printf '%s' \"$1\"; }}; {store.dashboard}"
        assert subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout == url
    store.url = "postgresql+psycopg://host/studies?user=me&password=hunter2hunter2"
    assert "hunter2" not in store.dashboard
