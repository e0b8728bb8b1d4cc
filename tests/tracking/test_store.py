import pytest

from runner.system.errors import StorageError
from runner.tracking.store import Store
from runner.tracking.workspace import workspace


@pytest.fixture
def store(migrated_workspace):
    return Store.open(workspace())


@pytest.fixture
def run_id(store):
    return store.create_run(store.experiment("tests"), "a")


def test_an_experiment_is_created_once_with_an_absolute_place_for_artifacts(store):
    created = store.experiment("marl")
    assert store.experiment("marl") == created
    assert store.client.get_experiment(created).artifact_location == (workspace().artifacts / "marl").as_uri()


def test_a_deleted_experiment_is_an_error_with_its_remedy(store):
    store.client.delete_experiment(store.experiment("gone"))
    with pytest.raises(StorageError, match="mlflow experiments restore --experiment-id"):
        store.experiment("gone")


def test_a_run_is_found_by_its_name(store):
    experiment = store.experiment("tests")
    created = store.create_run(experiment, "marl-3f2a91c0")
    assert store.run_named(experiment, "marl-3f2a91c0") == created
    assert store.run_named(experiment, "marl") is None
    assert store.client.get_run(created).info.run_name == "marl-3f2a91c0"


def test_more_than_mlflow_takes_in_one_call_is_sent_in_several(store, run_id):
    metrics = [(f"m{n}", float(n), 1000 + n, n) for n in range(1001)]
    params = {f"p{n}": str(n) for n in range(101)}
    tags = {f"t{n}": str(n) for n in range(101)}
    store.send(run_id, metrics, params, tags)
    data = store.client.get_run(run_id).data
    assert data.metrics == {key: value for key, value, _, _ in metrics}
    assert data.params == params
    assert tags.items() <= data.tags.items()


def test_sending_twice_changes_nothing(store, run_id):
    metrics = [("loss", 0.5, 1000, 1), ("loss", 0.25, 2000, 2), ("loss", float("nan"), 3000, 3)]
    for _ in range(2):
        store.send(run_id, metrics, {"p": "1"}, {"t": "1"})
    assert len(store.client.get_metric_history(run_id, "loss")) == 3


def test_a_value_that_is_refused_for_good_does_not_stop_the_others(store, run_id, caplog):
    store.send(run_id, [], {"seed": "1"}, {})
    store.send(run_id, [("loss", 0.5, 1000, 1)], {"seed": "2", "other": "3"}, {})
    data = store.client.get_run(run_id).data
    assert data.params == {"seed": "1", "other": "3"}
    assert data.metrics == {"loss": 0.5}
    assert "MLflow refused param 'seed'" in caplog.text
