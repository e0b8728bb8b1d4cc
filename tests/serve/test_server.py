"""A server in a process of its own, asked by clients of all sorts."""

import re
import resource
import signal
import socket
import threading

import pytest
from serving import Asking, asked_together, connected, left, metric, received, server, until

from runner.recipe.recipe import ServeConfig
from runner.serve.server import allow_files, bound

SETTINGS = ("serve.max_batch=4", "serve.wait_ms=10", "serve.queue=3", "serve.max_body_bytes=4096")
WORDS = {"words": [1, 2, 3]}


def test_it_says_that_it_is_alive_and_ready_and_what_it_serves(client, place):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    about = client.get("/model").json()
    assert (about["name"], about["kind"], about["recipe"]) == (place[1].name, "toy_obedient", "obedient")
    assert (about["classes"], about["inactive"]) == ([], {})


def test_openapi_has_the_forms_of_the_learner(client):
    document = client.get("/openapi.json").json()
    operation, forms = document["paths"]["/predict"]["post"], document["components"]["schemas"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/WordsRequest")
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/NextResponse")
    assert forms["WordsRequest"]["properties"]["words"]["type"] == "array"


def test_the_page_of_the_model_is_at_the_root_and_loads_nothing_from_elsewhere(client):
    page = client.get("/")
    assert "<title>Words</title>" in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'self';")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b'{"words": [1, "2"]}', "words.1: input should be a valid integer"),
        (b'{"words": [1.5, 2.5, 3.5]}', "words.0: input should be a valid integer"),
        (b'{"word": [1]}', "words: field required (and 1 more)"),
        (b'{"words": [99]}', "words: should be below 16"),
        (b'{"words": [1]', "the body is not JSON: Expecting ',' delimiter"),
        (b"[]", "body: should be an object"),
        (b"", "body: field required"),
    ],
)
def test_what_is_malformed_is_refused_in_one_line(client, body, line):
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()) == (422, {"error": line})


def test_a_body_that_is_too_long_is_refused_however_it_comes(client):
    body = b'{"words": [' + b"1, " * 2000 + b"1]}"
    for content in (body, iter([body[:3000], body[3000:]])):
        response = client.post("/predict", content=content, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()) == (413, {"error": "the body is longer than 4,096 bytes"})


@pytest.fixture(scope="module")
def impatient(place):
    """A client of a server that does not wait long for what it has begun to send."""
    with server(*place, "serve.client_s=0.5") as (_, client):
        yield client


def test_a_body_that_does_not_come_is_waited_for_only_so_long(impatient):
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n"
    with connected(impatient) as connection:
        connection.sendall(head + b'{"words"')
        said = received(connection)
    assert said.startswith("HTTP/1.1 408")
    assert "the body did not come within 0.5 s" in said


@pytest.mark.parametrize("beginning", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"])
def test_a_client_that_does_not_finish_asking_is_let_go(impatient, beginning):
    with connected(impatient) as connection:
        connection.sendall(beginning)
        assert received(connection) == ""


def test_requests_that_come_together_are_answered_together_and_as_if_alone(client):
    questions = [{"words": [n % 16, *range(n // 8)]} for n in range(24)]
    alone = [client.post("/predict", json=question).json()["shares"] for question in questions]
    batches = metric(client, "runner_batch_size_count")
    together = asked_together(client, questions, at_once=3)
    for response, expected in zip(together, alone, strict=True):
        assert response.json()["shares"] == pytest.approx(expected, abs=1e-5)
    assert metric(client, "runner_batch_size_count") - batches < len(questions)
    assert metric(client, "runner_waiting_requests") == 0


def test_one_that_fails_leaves_its_companions_alone(client):
    bad, *good = asked_together(client, [WORDS | {"fail": True}, WORDS, WORDS], at_once=3)
    assert (bad.status_code, bad.json()) == (500, {"error": "the model failed: RuntimeError: as it was told"})
    assert [each.status_code for each in good] == [200, 200]


def test_a_full_queue_asks_to_come_again(client, tmp_path):
    counted = metric(client, 'runner_requests_total{status="503"}')
    questions = [{"words": [1], "after": str(tmp_path / "go")}, *[WORDS] * 3]
    batches = metric(client, "runner_batch_size_count")
    first = Asking(client, questions[0])
    until(lambda: metric(client, "runner_batch_size_count") > batches)
    begun = [first, *(Asking(client, question) for question in questions[1:])]
    until(lambda: metric(client, "runner_waiting_requests") == 3)
    refused, ready = client.post("/predict", json=WORDS), client.get("/ready")
    (tmp_path / "go").touch()
    assert [each.answered().status_code for each in begun] == [200] * 4
    assert (refused.status_code, ready.status_code) == (503, 503)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"].startswith("the queue is full; try again in ")
    assert metric(client, 'runner_requests_total{status="503"}') == counted + 1


def test_a_deadline_passes_for_who_waits_and_for_who_is_being_answered(place, tmp_path):
    with server(*place, "serve.deadline_s=2", "serve.wait_ms=0") as (_, client):
        first = Asking(client, {"words": [1], "after": str(tmp_path / "go")})
        until(lambda: metric(client, "runner_batch_size_count") == 1)
        late = [each.answered() for each in (first, Asking(client, WORDS | {"after": str(tmp_path / "go")}))]
        (tmp_path / "go").touch()
        assert client.post("/predict", json=WORDS).status_code == 200
    line = {"error": "the deadline has passed before there was an answer"}
    assert [(each.status_code, each.json()) for each in late] == [(504, line)] * 2


def test_what_was_asked_before_sigterm_is_answered(place, tmp_path):
    with server(*place) as (child, client):
        begun = [Asking(client, WORDS | {"after": str(tmp_path / "go")}) for _ in range(6)]
        until(lambda: metric(client, "runner_batch_size_count") == 1)
        child.send(signal.SIGTERM)
        threading.Timer(0.3, (tmp_path / "go").touch).start()
        assert [each.answered().status_code for each in begun] == [200] * 6
        assert child.wait() == 0, child.stderr


def test_an_answer_that_takes_too_long_is_cut_off(place, tmp_path):
    with server(*place, "serve.drain_s=1") as (child, client):
        asked = Asking(client, WORDS | {"after": str(tmp_path / "never")})
        until(lambda: metric(client, "runner_batch_size_count") == 1)
        child.send(signal.SIGTERM)
        last = asked.answered()
        assert child.wait() == 143
    assert (last.status_code, last.json()) == (503, {"error": "the server stops before there is an answer"})
    assert "some requests were not answered" in child.stderr
    assert "Traceback" not in child.stderr


def test_nobody_waits_for_others_when_there_are_none(place):
    with server(*place, "serve.wait_ms=60000", "serve.deadline_s=20") as (_, client):
        assert [client.post("/predict", json=WORDS).status_code for _ in range(3)] == [200] * 3


def test_ctrl_c_ends_it_too(place):
    with server(*place) as (child, _):
        child.send(signal.SIGINT)
        assert child.wait() == 130


def test_answers_are_not_held_back_in_small_packets():
    """Asyncio sees to that where a socket says that it is TCP's."""
    with bound(ServeConfig(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "fitting"), [(256, 4096, 1024, 1024), (256, 300, 1024, 108), (256, 256, 8, 8)]
)
def test_connections_fit_into_the_limit_on_open_files(monkeypatch, caplog, soft, hard, connections, fitting):
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert allow_files(connections) == fitting
    assert limits[-1][0] <= hard
    assert ("ulimit -n" in caplog.text) == (fitting < connections)


def test_a_port_that_is_taken_is_said(place, client):
    port = client.base_url.port
    taken = rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use; name another serve\.port"
    with pytest.raises(AssertionError, match=taken), server(*place, "--port", str(port)):
        pass


@pytest.mark.parametrize("how", ["in a loop of Python", "in repeated calls of the module", "in C"])
def test_requests_of_clients_that_left_are_dropped_before_and_while_they_are_computed(place, tmp_path, how):
    """The batch that is being computed ends, and those that wait are never computed."""
    endless = {"in a loop of Python": {"after": str(tmp_path / "never")}, "in C": {"words": [1, 2], "naps": 40}}
    question = {"words": [1, 2]} | endless.get(how, {"passes": 10**9})
    with server(*place, "serve.wait_ms=0", "serve.queue=40", "serve.drain_s=1") as (child, client):
        connections = [left(client, **question)]
        until(lambda: metric(client, "runner_batch_size_count") == 1)
        connections += [left(client, **question | {"words": [1] * n}) for n in range(3, 13)]
        until(lambda: metric(client, "runner_waiting_requests") == 10)
        for connection in connections[1:]:
            connection.close()
        until(lambda: metric(client, "runner_waiting_requests") == 0)
        connections[0].close()
        assert client.post("/predict", json=WORDS).status_code == 200
        assert metric(client, "runner_batch_size_count") == 2
        assert metric(client, 'runner_requests_total{status="499"}') == 11
        child.send(signal.SIGTERM)
        assert child.wait() == 0, child.stderr


def test_an_error_while_a_request_is_answered_is_one_paragraph_for_the_operator_and_a_line_for_the_client(place):
    with server(*place) as (child, client):
        for question, line in (
            ({"words": [1, 2], "fail": True}, "RuntimeError: as it was told"),
            ({"words": [1, 2], "refuse": True}, "LookupError: refused otherwise"),
            ({"words": [1, 2], "invalid": True}, "KeyError: 'validated otherwise'"),
        ):
            response = client.post("/predict", json=question)
            assert (response.status_code, response.json()) == (500, {"error": f"the model failed: {line}"})
        assert client.post("/predict", json=WORDS).status_code == 200
    assert "Traceback" not in child.stderr
    assert re.search(r"Obedient.requested in \S*obedient\.py:\d+: RuntimeError: as it was told", child.stderr)
    assert 'the request: {"words":[1,2],' in child.stderr
    assert re.search(r"obedient\.py:\d+: KeyError: 'validated otherwise'", child.stderr)
