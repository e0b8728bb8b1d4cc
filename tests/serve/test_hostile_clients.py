"""Clients that try to stop a server, to be answered for others, or to be answered for what they should not ask."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import psutil
import pytest
from serving import connected, received, server, until

from runner.serve.bodies import LARGE_BODIES

CONNECTIONS = 32
LONGEST_BODY = 200_000
SETTINGS = (
    f"serve.connections={CONNECTIONS}", "serve.client_s=120", "serve.max_batch=4", "serve.wait_ms=5", "serve.queue=200",
    "serve.hosts=[models.example, '192.0.2.7']", f"serve.max_body_bytes={LONGEST_BODY}",
)  # fmt: skip
WORDS = b'{"words": [1, 2, 3]}'
JSON = "content-type: application/json\r\n"
CLOSE = "connection: close"


def request(method="POST", path="/predict", headers=JSON, body=WORDS, host="localhost", length=None, keep=False):
    """The bytes of a request; with another length than the body's if that is given."""
    length = len(body) if length is None else length
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", f"content-length: {length}", *([] if keep else [CLOSE])]
    return ("\r\n".join([*lines, headers]) + "\r\n").encode() + body


def answers(text):
    """Status, headers and body of each answer on a connection."""
    found = []
    while text:
        head, _, rest = text.partition("\r\n\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
        length = int(headers.get("content-length", 0))
        found.append((int(head.split()[1]), headers, rest[:length]))
        text = rest[length:]
    return found


def exchange(client, data):
    """The answers to bytes on a connection of their own, until the server closes it."""
    with connected(client) as connection:
        connection.sendall(data)
        return answers(received(connection))


def assert_error(answer, status):
    found, headers, body = answer
    assert found == status, body
    assert headers["content-type"] == "application/json"
    assert headers["x-content-type-options"] == "nosniff"
    assert [*json.loads(body)] == ["error"]
    assert "\n" not in body


# --- allowed hosts ----------------------------------------------------------------------------------------------------

ALLOWED = [
    "localhost",
    "LocalHost.",
    "127.0.0.1",
    "127.8.9.1",
    "[::1]",
    "models.example",
    "Models.Example",
    "192.0.2.7",
    "x",
    "runner",
    "GPU-Server-2",
]
TRICKS = [
    "{}.evil.example", "evil-{}.example", "evil.example#{}", "evil.example?{}", "user@{}", "{}@evil.example", "{}/",
    "{}..", "{} evil.example", "[{}]x", "evil.example:80:{}",
]  # fmt: skip
FOREIGN = [
    "evil.example",
    "192.0.2.8",
    "[2001:db8::1]",
    "0.0.0.0",
    "2130706433",
    "0x7f000001",
    "",
    "xn--lcalhost-m3a",
    "-x",
    "x-",
    "_x",
    "x_y",
    "a" * 64,
    "x.evil.example",
]


def foreign_hosts():
    """Names that only look like allowed ones."""
    names = ["localhost", "127.0.0.1", "models.example"]
    return [*FOREIGN, *(trick.format(name) for trick in TRICKS for name in names)]


@pytest.mark.parametrize("port", ["", ":8000"])
def test_only_allowed_hosts_are_served(client, port):
    for host in ALLOWED:
        assert exchange(client, request(host=host + port))[0][0] == 200, host
    assert len(foreign_hosts()) > 40
    for host in foreign_hosts():
        assert_error(exchange(client, request(host=host + port))[0], 400)


@pytest.mark.parametrize(
    "path", ["/model/", "//evil.example/", "/part", "//part", "//evil.example/..//part", "/\\part"]
)
@pytest.mark.parametrize("host", ["localhost", "models.example:80"])
def test_redirects_do_not_name_a_host(client, path, host):
    (_, headers, _), *_ = exchange(client, request("GET", path, "", b"", host))
    assert re.match(r"/([^/\\]|$)", headers.get("location", "/"))


def test_a_redirect_of_the_page_leads_to_its_folder(client):
    (status, headers, _), *_ = exchange(client, request("GET", "/part", "", b""))
    assert (status, headers["location"]) == (307, "/part/")


# --- what is not valid HTTP -------------------------------------------------------------------------------------------


def two_lengths():
    """Requests with both lengths, in which another one is hidden."""
    hidden = b"GET /model HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for number in range(50):
        rng = random.Random(number)
        body = rng.choice([b"0\r\n\r\n", b"5\r\nabcde\r\n0\r\n\r\n", WORDS])
        name = rng.choice(["Content-Length", "content-length", "CONTENT-LENGTH"])
        lengths = [f"{name}:{' ' * rng.randrange(3)}{rng.choice([0, len(body), len(body + hidden), 10**9])}"]
        lengths.append(f"Transfer-Encoding:{rng.choice(['', ' '])}{rng.choice(['chunked', 'Chunked', 'chunKED'])}")
        rng.shuffle(lengths)
        method = rng.choice(["POST", "GET", "PUT"])
        yield "\r\n".join([f"{method} /predict HTTP/1.1", "host: localhost", *lengths, "", ""]).encode() + body + hidden


def test_two_lengths_are_refused_and_the_connection_closes(client):
    for data in two_lengths():
        (answer,) = exchange(client, data)
        assert_error(answer, 400)
        assert answer[1]["connection"] == "close"
        assert "both Content-Length and Transfer-Encoding" in answer[2]


def damaged_requests(count):
    """Requests in which some bytes are replaced, repeated or missing."""
    whole = request(headers=JSON + "x-one: 1\r\nx-two: 2\r\n", body=WORDS)
    for number in range(count):
        rng = random.Random(number)
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(4)] = rng.choice(
                [b"", b"\r\n", b"\0", b":", b" ", b"\xff", rng.randbytes(3), bytes(data[at : at + 9]) * 2]
            )
        yield bytes(data)


def test_damaged_requests_get_an_error_in_json_or_none(client):
    statuses = set()
    for data in damaged_requests(200):
        with connected(client) as connection:
            connection.settimeout(0.1)  # some are not complete
            connection.sendall(data)
            text = b""
            with suppress(TimeoutError):
                while piece := connection.recv(65536):
                    text += piece
        for status, headers, body in answers(text.decode()):
            statuses.add(status)
            assert status < 500
            assert headers["content-type"] == "application/json"
            assert status == 200 or [*json.loads(body)] == ["error"], (data, body)
    assert {200, 400, 422} <= statuses


def test_bodies_in_tiny_pieces_are_refused(client):
    head = f"POST /predict HTTP/1.1\r\nhost: localhost\r\n{JSON}transfer-encoding: chunked\r\n\r\n".encode()
    for size in (1, 3, 10):
        (answer,) = exchange(client, head + (b"%x\r\n%s\r\n" % (size, b" " * size)) * 3000 + b"0\r\n\r\n")
        assert_error(answer, 400)
        assert "pieces of the body are too small" in answer[2]


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.01, 2, 8, 15])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_of_a_long_body_can_read_the_answer(client, factor, chunked):
    body = b" " * int(LONGEST_BODY * factor)
    data = request(body=body, headers=JSON)
    if chunked:
        data = data.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
        data = data.replace(body, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    for _ in range(7):
        found = exchange(client, data)
        assert_error(found[0], 413)


def test_after_a_long_body_the_connection_goes_on(client):
    statuses = [
        answer[0] for answer in exchange(client, request(body=b" " * (LONGEST_BODY + 1), keep=True) + request())
    ]
    assert statuses == [413, 200]


def test_a_client_that_never_stops_sending_is_cut_off(client):
    sent = 0
    with connected(client) as connection, suppress(ConnectionError):
        connection.sendall(request(length=10**12))
        for _ in range(200):
            connection.sendall(b" " * LONGEST_BODY)
            sent += LONGEST_BODY
    assert sent < 100 * LONGEST_BODY


def test_a_client_that_waits_for_permission_is_refused_before_it_sends(client):
    with connected(client) as connection:
        connection.sendall(request(body=b"", length=LONGEST_BODY + 1, headers=JSON + "expect: 100-continue\r\n"))
        (answer,) = answers(received(connection))
    assert_error(answer, 413)
    assert answer[1]["connection"] == "close"


CONTENT_TYPES = [
    None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application",
    "application/jsonp", "text/json", "json", "application/xml", "application/json; charset=utf-16",
    'application/json;charset="latin1"', "application/octet-stream",
]  # fmt: skip


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_what_is_not_declared_as_json_is_refused(client, content_type):
    headers = "" if content_type is None else f"content-type: {content_type}\r\n"
    assert_error(exchange(client, request(headers=headers))[0], 415)


@pytest.mark.parametrize(
    "headers", ["Content-Type: Application/JSON; charset=UTF-8\r\n", "content-type: application/ld+json\r\n"]
)
def test_other_spellings_of_json_are_read(client, headers):
    assert exchange(client, request(headers=headers))[0][0] == 200


def test_compressed_bodies_are_refused(client):
    assert_error(exchange(client, request(headers=JSON + "content-encoding: gzip\r\n"))[0], 415)


def test_a_repeated_key_is_refused(client):
    answer = exchange(client, request(body=b'{"words": [1], "words": [2]}'))[0]
    assert_error(answer, 422)
    assert "the key 'words' appears twice" in answer[2]


def test_slow_large_bodies_make_room_for_others(client):
    """The oldest incomplete one is refused; small ones need no place."""
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(client)) for _ in range(LARGE_BODIES + 4)]
        for connection in slow:
            connection.sendall(request(body=b" " * 100_000, length=150_000))
            time.sleep(0.02)
        large = exchange(client, request(body=WORDS + b" " * 100_000))
        small = exchange(client, request())
        assert [large[0][0], small[0][0]] == [200, 200]
        for connection in slow[:5]:
            (answer,) = answers(received(connection))
            assert_error(answer, 503)
            assert int(answer[1]["retry-after"]) >= 1


# --- connections ------------------------------------------------------------------------------------------------------

BEGINNINGS = [
    b"", b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: ",
    request()[:-1], request(body=b""), request(length=100),
]  # fmt: skip


@pytest.mark.parametrize("beginning", [*BEGINNINGS, None])
def test_a_flood_of_connections_keeps_nobody_out(client, beginning):
    """Three times as many as are allowed, which do nothing, or begin and do not end; None: one of each kind."""
    with ExitStack() as stack:
        for number in range(3 * CONNECTIONS):
            connection = stack.enter_context(connected(client))
            with suppress(OSError):  # it was one too many
                connection.sendall(BEGINNINGS[number % len(BEGINNINGS)] if beginning is None else beginning)
            if number % 8 == 0:  # answers come before a client gives up, which it does before the server does
                for path in ("/health", "/ready"):
                    assert exchange(client, request("GET", path, body=b""))[0][0] == 200
                assert exchange(client, request())[0][0] == 200


def test_a_request_that_is_ended_for_others_gets_an_answer(client):
    with ExitStack() as stack:
        first = stack.enter_context(connected(client))
        first.sendall(request(length=100))
        for _ in range(2 * CONNECTIONS):
            time.sleep(0.01)
            connection = stack.enter_context(connected(client))
            with suppress(OSError):
                connection.sendall(request(length=100))
        ended = received(first)
    (answer,) = answers(ended)
    assert_error(answer, 503)
    assert int(answer[1]["retry-after"]) >= 1


def test_when_all_connections_are_busy_the_server_can_still_be_looked_at(client, tmp_path):
    body = json.dumps({"words": [1], "after": str(tmp_path / "go")}).encode()
    with ExitStack() as stack:
        busy = [stack.enter_context(connected(client)) for _ in range(CONNECTIONS)]
        for connection in busy:
            connection.sendall(request(body=body))
        until(lambda: exchange(client, request())[0][0] == 503)
        for path in ("/health", "/ready"):
            assert exchange(client, request("GET", path, body=b""))[0][0] == 200
        refused = exchange(client, request("GET", "/model", body=b""))[0]
        (tmp_path / "go").touch()
        for connection in busy:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert_error(refused, 503)
    assert int(refused[1]["retry-after"]) >= 1


# --- other clients ----------------------------------------------------------------------------------------------------


FRAGMENTS = ['""', "[]", "{}", "null", "1.5", "true", '"ab"', '{"":0}', "[[]]", "[0,0]", '{"a":{}}', "1e9", '"\\u0000"']


def bodies_full_of_errors(count, length):
    """Bodies of one length, each of which repeats a few wrong values."""
    for number in range(count):
        rng = random.Random(number)
        pattern = ",".join(rng.choices(FRAGMENTS, k=rng.randrange(1, 4))) + ","
        opening, closing = rng.choice([('{"words": [', "0]}"), ("[", "0]"), ('{"words": [1], "other": [', "0]}")])
        yield (opening + pattern * (length // len(pattern)) + closing).encode()
    yield json.dumps({str(number): 0 for number in range(length // 12)}).encode()


def test_bodies_full_of_errors_do_not_delay_others_or_fill_the_memory(place):
    with server(*place) as (child, client), ThreadPoolExecutor(9) as pool:
        process = psutil.Process(child.process.pid)
        assert client.post("/predict", json={"words": [1]}).status_code == 200
        before = largest = process.memory_info().rss
        slowest = 0.0
        begin = time.monotonic()
        attacks = [pool.submit(exchange, client, request(body=body)) for body in bodies_full_of_errors(50, 500_000)]
        attacks += [pool.submit(exchange, client, request(body=body)) for body in bodies_full_of_errors(5, 2_000_000)]
        while not all(attack.done() for attack in attacks):
            start = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - start)
            largest = max(largest, process.memory_info().rss)
            time.sleep(0.01)
        duration = time.monotonic() - begin
        for attack in attacks:
            assert_error(attack.result()[0], 422)
        assert client.post("/predict", json={"words": [1]}).status_code == 200
    # Other processes on the machine delay the attacks and the answers alike.
    assert slowest < max(2.0, duration / 4)
    assert largest - before < 200 * 2**20


def test_the_documented_answers_to_predict_are_those_that_are_given(client):
    document = client.get("/openapi.json").json()
    documented = document["paths"]["/predict"]["post"]["responses"]
    assert {"400", "408", "413", "415", "422", "500", "503", "504"} <= {*documented}
    for status in ("400", "413", "415"):
        assert documented[status]["description"]
        reference = documented[status]["content"]["application/json"]["schema"]["$ref"]
        assert [*document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]] == ["error"]
