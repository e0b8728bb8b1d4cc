import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outages import records

from runner.system import secrets
from runner.system.errors import StorageError
from runner.system.secrets import MASK, redact_values, register
from runner.tracking import Workspace
from runner.tracking.spool import Spool
from runner.tracking.store import Store, shown

SECRETS = ["hunter2-plain", 'hunter2"quoted\\', "hunter2-é-\U0001f511", "hunter2\ttab'"]
texts = st.lists(st.one_of(st.sampled_from(SECRETS), st.text(max_size=6)), max_size=4).map("".join)
written_records = st.dictionaries(
    st.sampled_from(["params", "tags", "status", "artifact"]),
    st.one_of(texts, st.dictionaries(st.sampled_from(["a.api_token", "n_tokens", "x"]), texts, max_size=3)),
)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(secrets, "_known", frozenset())
    monkeypatch.setattr(secrets, "_pattern", None)


@given(st.lists(written_records, max_size=4))
def test_the_spool_holds_no_secret_and_every_record(tmp_path_factory, written):
    for secret in SECRETS:
        register(secret)
    spool = Spool(tmp_path_factory.mktemp("spool") / "spool.jsonl")
    for record in written:
        spool.append(**record)
    spool.close()
    found = records(spool.path.parent)
    assert all(record.pop("t") for record in found)
    assert found == [redact_values(record) for record in written]
    data = spool.path.read_bytes()
    for secret in SECRETS:
        assert json.dumps(secret)[1:-1].encode() not in data
        assert secret.encode() not in data
    assert b"hunter2" not in data


def test_metrics_reach_the_spool_as_they_are(tmp_path):
    record = {"t": 1, "step": 2, "metrics": {"train/token_loss": 0.5, "train/tokens": 12345678, "auth": "nan"}}
    register("12345678")
    spool = Spool(tmp_path / "spool.jsonl")
    spool.append(**record)
    spool.close()
    assert records(tmp_path) == [record]


@pytest.mark.parametrize("password", ["hunter2", "hunter2/é@x", "hunter2'\"&%"])
def test_no_error_of_a_store_holds_the_password(password, monkeypatch):
    for host in ("127.0.0.1:1", "127.0.0.1:wrong", "["):
        uri = f"http://me:{quote(password, safe='')}@{host}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(StorageError) as caught:
            Store(Workspace())
        assert "hunter2" not in str(caught.value)


def test_a_uri_is_shown_without_user_and_password():
    assert shown("postgresql://me:pw@db/x?sslmode=on") == "postgresql://db/x?sslmode=on"
    assert shown("http://me:pw@[/x") == f"http://me:{MASK}@[/x"
