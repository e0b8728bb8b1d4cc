import json
import shutil
from pathlib import Path

import pytest
from running import TINY_DIGITS, train_here

import runner as package
from runner.system.errors import CheckpointError, ExitCode, UsageError
from runner.tracking import Workspace
from runner.tracking.store import Store
from runner.tracking.versions import Versions, is_version
from runner.training.checkpoint import checkpoints
from runner.training.model import REQUEST_SCHEMA
from runner.training.model_versions import NotVerifiedError, promote, record_verification, register
from runner.training.trained_run import trained


@pytest.fixture(scope="module")
def finished(tmp_path_factory, migrated_database):
    """A workspace with a finished run, and the run's name."""
    root = tmp_path_factory.mktemp("finished") / ".runner"
    root.mkdir()
    shutil.copy(migrated_database, root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNNER_WORKSPACE", str(root))
        return root, Path(train_here("digits_classifier", *TINY_DIGITS).run_dir).name


@pytest.fixture
def run(finished, monkeypatch):
    root, name = finished
    monkeypatch.setenv("RUNNER_WORKSPACE", str(root))
    return name


def weights_file(version):
    folder = Store(Workspace()).model(f"models:/{version.model}")
    return next(checkpoints(folder / "checkpoints")[0].glob("tensors-*"))


def test_versions_are_whole_numbers_and_the_same_weights_have_one(run):
    first = register(run, "counted")
    assert (first.reference, first.run, register(run, "counted")) == ("counted/1", run, first)
    versions = Versions(Store(Workspace()))
    facts = {"run": run, "weights": "0" * 64, "model": first.model}
    for _ in range(10):
        last = versions.create("counted", trained(run).folder.name[-8:].ljust(32, "0"), facts, "file:///nowhere")
    assert [each.number for each in versions.all("counted")] == [*range(1, 12)]
    assert last.number == 11


def test_a_version_describes_its_request_and_its_schema_is_in_the_artifacts(run):
    version = register(run, "described")
    store = Store(Workspace())
    text = store.client.get_model_version("described", "1").description
    assert "* **request**: `image: array`" in text
    schema = json.loads((store.model(f"models:/{version.model}") / REQUEST_SCHEMA).read_text())
    assert schema["required"] == ["image"]


def test_a_version_is_a_model_wherever_one_is_named(run):
    version = register(run, "named")
    Versions(Store(Workspace())).call(version, "candidate")
    expected = {name: each.tolist() for name, each in package.load_model(run).named_parameters()}
    for reference in ("named/1", "named@candidate"):
        found = package.load_model(reference)
        assert {name: each.tolist() for name, each in found.named_parameters()} == expected


def test_only_what_was_verified_becomes_the_champion(run):
    register(run, "proven")
    with pytest.raises(
        NotVerifiedError, match="proven/1 has not been verified; verify it first: runner verify RECIPE --of"
    ) as told:
        promote("proven", 1)
    assert told.value.exit_code is ExitCode.GATE_FAILED
    record_verification("proven/1", trained("proven/1"), "FAIL", "quantise: 3 % of accuracy")
    with pytest.raises(NotVerifiedError, match="'digits_classifier', FAIL: quantise: 3 % of accuracy"):
        promote("proven", 1)
    record_verification("proven/1", trained("proven/1"), "PASS", "")
    assert promote("proven", 1).aliases == ("champion",)
    assert trained("proven@champion").name == "proven@champion"


def test_a_verification_of_the_run_counts_if_it_was_of_the_same_weights(run):
    told = record_verification(run, trained(run), "PASS", "")
    file = Workspace().runs / run / "verification.json"
    text = file.read_text()
    kept = json.loads(text)
    assert (kept["outcome"], kept["weights"], kept["recipe_digest"]) == (
        "PASS",
        told.weights,
        trained(run).recipe.digest,
    )
    file.write_text(json.dumps(kept | {"weights": "0" * 64}))
    assert register(run, "found").judgement is None
    file.write_text(text)
    assert promote("found", 1).judgement == told
    file.unlink()


def test_a_damaged_file_is_one_line(run):
    version = register(run, "damaged")
    path = weights_file(version)
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=rf"{path.name}: damaged \(its checksum differs"):
            trained("damaged/1")
    finally:
        path.write_bytes(whole)


def test_other_weights_than_were_registered_are_refused(run):
    """As if somebody had put another run's whole model in its place."""
    version = register(run, "replaced")
    facts = {"run": run, "weights": "0" * 64, "model": version.model}
    Versions(Store(Workspace())).create("replaced", "0" * 32, facts, "file:///nowhere")
    with pytest.raises(CheckpointError, match=r"replaced/2: .* has other weights than were registered: SHA"):
        trained("replaced/2")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nobody/1", "unknown version 'nobody/1'; there are: .*named/1 @candidate"),
        ("named@nobody", "unknown version 'named@nobody'"),
        ("named/99", "unknown version 'named/99'"),
    ],
)
def test_a_version_that_is_not_there_is_said_with_those_that_are(run, reference, message):
    Versions(Store(Workspace())).call(register(run, "named"), "candidate")
    with pytest.raises(UsageError, match=message):
        trained(reference)


def test_what_is_no_finished_run_has_no_version(run, tmp_path):
    record = json.loads((Workspace().runs / run / "run.json").read_text())
    other = Workspace().runs / "digits_classifier-00000000"
    shutil.copytree(Workspace().runs / run, other)
    (other / "run.json").write_text(json.dumps(record | {"name": other.name, "status": "FAILED"}))
    with pytest.raises(UsageError, match="is not a finished run"):
        register(other.name)
    shutil.rmtree(other)
    with pytest.raises(UsageError, match=r"'a b' is not a valid name of a model; use letters, digits"):
        register(run, "a b")


def test_a_path_is_no_version(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_version("runs/3")
    (tmp_path / "runs" / "3").mkdir(parents=True)
    assert not is_version("runs/3")
    assert not is_version("models:/m-1")
    assert not is_version("digits_classifier-0959e613")
