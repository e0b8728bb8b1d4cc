"""Batches that are computed at the same time, each by a copy of the model."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from serving import PLUGINS, Asking, asked_together, left, metric, until

from runner.plugin.registry import Registry
from runner.serve.load import load

SETTINGS = ("serve.parallel=2", "serve.max_batch=4", "serve.wait_ms=0")
WORDS = {"words": [1, 2, 3]}


def loaded(place, monkeypatch, parallel):
    workspace, run_dir = place
    monkeypatch.setenv("RUNNER_WORKSPACE", str(workspace.root))
    return load(run_dir.name, None, [f"serve.parallel={parallel}"], Registry(PLUGINS))[0]


def test_a_batch_is_answered_while_another_one_is_computed(client, tmp_path):
    batches = metric(client, "runner_batch_size_count")
    first = Asking(client, WORDS | {"after": str(tmp_path / "go")})
    until(lambda: metric(client, "runner_batch_size_count") == batches + 1)
    assert client.post("/predict", json=WORDS).status_code == 200
    (tmp_path / "go").touch()
    assert first.answered().status_code == 200


def test_answers_are_those_to_the_request_alone(client):
    questions = [{"words": [n % 16, *range(n // 8)]} for n in range(48)]
    expected = [client.post("/predict", json=question).json()["shares"] for question in questions]
    together = asked_together(client, questions, at_once=12)
    for response, shares in zip(together, expected, strict=True):
        assert response.json()["shares"] == pytest.approx(shares, abs=1e-5)
    assert metric(client, "runner_waiting_requests") == 0


def test_a_client_that_leaves_ends_its_own_batch_alone(client, tmp_path):
    batches = metric(client, "runner_batch_size_count")
    staying = Asking(client, WORDS | {"after": str(tmp_path / "go")})
    until(lambda: metric(client, "runner_batch_size_count") == batches + 1)
    leaving = left(client, words=[1, 2], passes=10**9)
    until(lambda: metric(client, "runner_batch_size_count") == batches + 2)
    leaving.close()
    # The thread of the abandoned batch computes this one.
    assert client.post("/predict", json=WORDS).status_code == 200
    (tmp_path / "go").touch()
    assert staying.answered().status_code == 200


def test_copies_have_the_same_parameters_in_memory_once(place, monkeypatch):
    model = loaded(place, monkeypatch, 3)
    models = model.parallel()
    assert len(models) == 3
    addresses = {
        tuple(parameter.data_ptr() for role in each.learner.roles.values() for parameter in role.module.parameters())
        for each in models
    }
    assert len(addresses) == 1
    assert len({id(each.learner) for each in models}) == 3
    request = model.request(**WORDS)
    assert len({each.answers([request])[0] for each in models}) == 1


@pytest.mark.parametrize("parallel", [1, 2])
def test_on_a_gpu_each_copy_has_a_stream_unless_it_is_the_only_one(place, monkeypatch, parallel):
    """Streams are simulated: what is tested is which stream a copy of the model enters."""
    model = loaded(place, monkeypatch, parallel)
    entered = []

    @contextmanager
    def enter(stream):
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    synchronized = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    with monkeypatch.context() as device:
        device.setattr(model.learner, "device", torch.device("cuda"))
        models = model.parallel()
    for each in models:
        each.answers([model.request(**WORDS)])
    if parallel == 1:
        assert entered == [None]
        return
    assert len({id(stream) for stream in entered}) == 2
    assert [stream.device.type for stream in entered] == ["cuda", "cuda"]
    assert synchronized == [torch.device("cuda")]
