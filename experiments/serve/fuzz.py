"""Hostile requests and floods of connections against ``runner serve``: what it answers, and what it needs for that.

Every server is a process of its own. Results are appended to a file while the script runs, one JSON object a line.
"""

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

HERE = Path(__file__).parent
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
CLIENTS = 8
BATCH = 500
HOLD_S = 8
"""Seconds for which a flooding client keeps its connection."""
JSON = {"content-type": "application/json"}


# --- requests ---------------------------------------------------------------------------------------------------------


def question(kind, rng):
    """A valid request to a learner of this kind."""
    if kind == "classifier":
        return {"image": [[[round(rng.random(), 3) for _ in range(8)] for _ in range(8)]]}
    if kind == "grasp_diffusion":
        points = [[round(rng.uniform(-0.03, 0.03), 4) for _ in range(3)] for _ in range(64)]
        return {"cloud": points, "grasps": 2, "steps": 2, "seed": rng.randrange(1000)}
    return {"prompt": "".join(rng.choices("abcdefgh ", k=4)), "seed": rng.randrange(1000), "characters": 8}


ODD_VALUES = [
    None, True, -1, 0, 1.5, 10**30, -(10**400), "", "a", "\ud800", "\u202e\x1b[2J", "x" * 5000, [], {}, [[]],
    [None] * 2000, ["a"] * 20_000, [[["a"] * 50] * 50], {"a": {"a": {}}},
    {str(number): number for number in range(3000)},
]  # fmt: skip


def damaged_value(value, rng):
    """A JSON value in which one part is replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice([*value])
        damaged = dict(value)
        match rng.randrange(5):
            case 0:
                del damaged[key]
            case 1:
                damaged[rng.choice(["other", key.upper(), ""])] = rng.choice(ODD_VALUES)
            case _:
                damaged[key] = damaged_value(value[key], rng)
        return damaged
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], damaged_value(value[at], rng), *value[at + rng.randrange(2) :]]
    return rng.choice(ODD_VALUES)


def damaged_bytes(data, rng):
    """Bytes of which some are replaced, repeated or missing."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.randrange(6)] = rng.choice(
            [b"", b"\0", b"\xff", b'"', b"[", b"{", b"\r\n", rng.randbytes(4)]
        )
    return bytes(data)


def body_of(kind, rng):
    """A body: valid, damaged as JSON, damaged as bytes, nested, with a repeated key, or long."""
    valid = question(kind, rng)
    text = json.dumps(valid)
    match rng.randrange(12):
        case 0 | 1 | 2:
            return text.encode()
        case 3:
            return damaged_bytes(text.encode(), rng)
        case 4:
            return rng.choice(["[", '{"a":', "[[0],"]).encode() * rng.randrange(1, 30_000)
        case 5:
            key = rng.choice([*valid])
            return f'{text[:-1]}, "{key}": {json.dumps(valid[key])}}}'.encode()
        case 6:
            return b'{"image": [' + rng.choice([b"0,", b"[],", b'"",', b"{},"]) * rng.randrange(1, 200_000) + b"0]}"
        case 7:
            return b" " * rng.randrange(3_000_000)
        case _:
            return json.dumps(damaged_value(valid, rng), allow_nan=True).encode()


def request(kind, seed):
    """The bytes of a request; most of them are wrong in some way."""
    rng = random.Random(seed)
    body = body_of(kind, rng)
    method, path, headers = "POST", "/predict", {"host": "localhost", "connection": "close", **JSON}
    headers["content-length"] = str(len(body))
    match rng.randrange(16):
        case 0:
            headers["host"] = rng.choice(["evil.example", "localhost.evil.example", "[::1", "", "a" * 300])
        case 1:
            headers["content-type"] = rng.choice(
                ["text/plain", "application/json; charset=utf-16", "", "multipart/form-data"]
            )
        case 2:
            path = rng.choice(
                ["/", "/model/", "//evil.example/", "/../../etc/passwd", "/metrics", "/%00", "*", "/openapi.json"]
            )
            method = rng.choice(["GET", "HEAD", "OPTIONS", "DELETE", "POST", "BREW"])
        case 3:
            headers["transfer-encoding"] = "chunked"
        case 4:
            headers["content-length"] = rng.choice(["-1", "1e3", "9" * 30, str(len(body) // 2), "0"])
        case 5:
            del headers["content-length"]
            headers["transfer-encoding"] = "chunked"
            size = rng.choice([1, 3, 4096])
            pieces = [body[at : at + size] for at in range(0, min(len(body), 3000 * size), size)]
            body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + rng.choice(
                [b"0\r\n\r\n", b"z\r\n"]
            )
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    data = "\r\n".join(lines).encode("utf-8", "surrogateescape") + body
    return damaged_bytes(data, rng) if rng.random() < 0.05 else data


def status_of(port, data, timeout=60):
    """The status of the answer; a word if there is none."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
            with suppress(ConnectionError):  # it was refused before all was sent
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR) if b"\r\n\r\n" not in data else None
            answer = connection.recv(65536)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return type(error).__name__
    found = re.match(rb"HTTP/1.1 (\d+)", answer)
    return int(found[1]) if found else "closed"


def answers(port, kind, count=20):
    """The server's answers to the same valid questions."""
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        body = json.dumps(question(kind, rng)).encode()
        head = "POST /predict HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            data = b""
            while piece := connection.recv(65536):
                data += piece
        assert data.startswith(b"HTTP/1.1 200"), data[:300]
        texts.append(data.partition(b"\r\n\r\n")[2])
    return texts


# --- servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def server(run):
    """A server of a run: its port and its process."""
    command = [sys.executable, "-m", "runner", "serve", run, "--port", "0"]
    process = subprocess.Popen(command, env=os.environ | THREADS, stderr=subprocess.PIPE, text=True)
    try:
        port = address_port(process.stderr)
        drain = threading.Thread(target=lambda: [None for _ in process.stderr], daemon=True)
        drain.start()
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=60)


def address_port(log):
    """Reads a server's log up to its address, and returns the port.

    Raises:
        SystemExit: the server ended before; the message is its log.
    """
    lines = []
    for line in log:
        if address := re.search(r"answers on \S+:(\d+)", line):
            return int(address[1])
        lines.append(line)
    raise SystemExit("the server did not start:\n" + "".join(lines))


class HealthMonitor:
    """A process that queries ``/health`` 20 times a second, each time on a new connection."""

    def __init__(self, port):
        command = [sys.executable, __file__, "--monitor", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self):
        """Ends it, and returns what it found."""
        report, _ = self._process.communicate("", timeout=120)
        return json.loads(report)


def monitor(port):
    """Queries until the standard input ends, and prints a report."""
    has_ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), has_ended.set()), daemon=True).start()
    data = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    seconds, failures = [], Counter()
    while not has_ended.wait(0.05):
        start = time.monotonic()
        status = status_of(port, data)
        seconds.append(time.monotonic() - start)
        if status != 200:
            failures[str(status)] += 1
    seconds.sort()
    report = {
        "queries": len(seconds),
        "median_s": round(seconds[len(seconds) // 2], 4),
        "slowest_s": round(seconds[-1], 3),
        "above_1_s": sum(each > 1 for each in seconds),
        "failures": dict(failures),
    }
    print(json.dumps(report), flush=True)


def fuzz(port, kind, count, write):
    """Sends hostile requests; returns the statuses."""
    statuses = Counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for start in range(0, count, BATCH):
            seeds = range(start, min(start + BATCH, count))
            statuses.update(map(str, pool.map(lambda seed: status_of(port, request(kind, seed)), seeds)))
            write(requests=start + len(seeds), statuses=dict(statuses))
    return statuses


def flood(port, kind, rate, seconds, write):
    """Opens connections that do nothing, or begin and do not end; returns the statuses of valid requests meanwhile."""
    valid = json.dumps(question(kind, random.Random(0))).encode()
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    whole = head + b"content-length: %d\r\n\r\n" % len(valid) + valid
    beginnings = [b"", b"", b"GET /hea", head, whole[:-1]]
    is_over = threading.Event()
    statuses = Counter()

    def ask():
        while not is_over.wait(0.1):
            statuses[str(status_of(port, whole))] += 1

    asking = threading.Thread(target=ask)
    asking.start()
    held = []
    start = time.monotonic()
    opened = 0
    while (now := time.monotonic()) < start + seconds:
        while opened < (now - start) * rate:
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                held.append((now, connection))
                connection.sendall(beginnings[opened % len(beginnings)])
            opened += 1
            if opened % (10 * rate) == 0:
                write(opened=opened, statuses=dict(statuses))
        while held and held[0][0] < now - HOLD_S:
            held.pop(0)[1].close()
        time.sleep(0.005)
    is_over.set()
    asking.join()
    for _, connection in held:
        connection.close()
    return opened, statuses


def attack(run, arguments, write):
    """Attacks the server of one run several times; returns a record of every round."""
    with server(run) as (port, process):
        kind = kind_of(port)
        before = answers(port, kind)
        records = []
        for number in range(1, arguments.rounds + 1):
            record = attack_once(port, process, kind, arguments, write)
            record["same_answers"] = answers(port, kind) == before
            records.append({"kind": kind, "round": number, **record})
    return records


def kind_of(port):
    """Reads the kind of the served model."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /model HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return json.loads(connection.makefile().read().partition("\n\n")[2])["kind"]


def attack_once(port, process, kind, arguments, write):
    """Sends damaged requests, then floods the server with connections."""
    memory = [process.memory_info().rss / 2**20]
    health = HealthMonitor(port)
    statuses = fuzz(port, kind, arguments.requests, lambda **record: write(kind=kind, phase="fuzz", **record))
    fuzz_health = health.end()
    memory.append(process.memory_info().rss / 2**20)

    health = HealthMonitor(port)
    cpu = sum(process.cpu_times()[:2])
    opened, meanwhile = flood(
        port,
        kind,
        arguments.rate,
        arguments.seconds,
        lambda **record: write(kind=kind, phase="flood", **record),
    )
    flood_health = health.end()
    cpu = sum(process.cpu_times()[:2]) - cpu
    # Connections and their timers end.
    time.sleep(12)
    memory.append(process.memory_info().rss / 2**20)
    return {
        "requests": arguments.requests,
        "statuses": dict(sorted(statuses.items())),
        "health_during_requests": fuzz_health,
        "connections": opened,
        "valid_requests_during_flood": dict(meanwhile),
        "health_during_flood": flood_health,
        "cpu_ms_per_connection": round(1e3 * cpu / opened, 2),
        "load_average": os.getloadavg()[0],
        "memory_mib": dict(zip(("before", "after_requests", "after_flood"), memory, strict=True)),
    }


def main():
    """Attacks the servers one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="append", default=[], help="a run of a classifier, a language model or grasps")
    parser.add_argument("--requests", type=int, default=3400, help="for each run")
    parser.add_argument("--rate", type=int, default=300, help="new connections a second")
    parser.add_argument("--seconds", type=float, default=60, help="of each flood")
    parser.add_argument("--rounds", type=int, default=1, help="of requests and flood, each server")
    parser.add_argument("--results", type=Path, default=HERE / "fuzz.jsonl")
    parser.add_argument("--monitor", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.monitor:
        monitor(arguments.monitor)
        return

    def write(**record):
        with arguments.results.open("a") as file:
            file.write(json.dumps({"time": round(time.time(), 1), **record}) + "\n")

    for run in arguments.run:
        for record in attack(run, arguments, write):
            write(phase="summary", **record)
            print(json.dumps(record, indent=1), flush=True)


if __name__ == "__main__":
    main()
