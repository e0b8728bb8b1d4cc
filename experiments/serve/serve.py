"""Requests per second of ``runner serve``, of a bare FastAPI handler and of LitServe, and whether answers are mixed up.

Every server is a separate process with one thread of torch; the clients are threads of this one.
"""

import argparse
import http.client
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
TOLERANCE = 1e-5
SETTINGS = {
    "ours": ["serve.wait_ms=20"],
    "ours, wait_ms 0": ["serve.wait_ms=0"],
    "ours, bit_exact": ["serve.bit_exact=true"],
    # A batch has half of the clients, so that there is another one for the second copy.
    "parallel: 1": ["serve.parallel=1", "serve.max_batch=8"],
    "parallel: 2": ["serve.parallel=2", "serve.max_batch=8"],
}
"""Settings of our server by contestant."""


def questions(kind, count):
    """As many requests, each another one."""
    draw = random.Random(0)
    if kind == "classifier":
        return [{"image": [[[round(draw.random(), 3) for _ in range(8)] for _ in range(8)]]} for _ in range(count)]
    return [{"cloud": cloud(draw), "grasps": 4, "steps": 10, "seed": number} for number in range(count)]


def cloud(draw):
    """256 points on a cube of 75 mm."""
    places = [[round(draw.uniform(-0.0375, 0.0375), 5) for _ in range(3)] for _ in range(256)]
    for place in places:
        place[draw.randrange(3)] = draw.choice((-0.0375, 0.0375))
    return places


def loaded(run):
    """The model of a run as it is served."""
    import torch

    from runner.plugin.registry import Registry
    from runner.serve.load import load

    torch.set_num_threads(1)
    return load(run, None, [], Registry())[0]


# --- another one ------------------------------------------------------------------------------------------------------


def serve_bare(run, port):
    """One request after the other, in a handler."""
    import uvicorn
    from fastapi import FastAPI, Response

    model, app = loaded(run), FastAPI()

    def predict(request):
        return Response(model.answers([request])[0], media_type="application/json")

    predict.__annotations__ = {"request": model.request, "return": Response}
    app.post("/predict")(predict)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical", loop="asyncio", http="h11")


def command(name, run, port):
    """What starts a contestant."""
    if name == "litserve":
        return [sys.executable, str(HERE / "litserved.py"), run, str(port)]
    if name == "bare":
        return [sys.executable, __file__, "--bare", "--run", run, "--port", str(port)]
    settings = SETTINGS[name]
    return [sys.executable, "-m", "runner", "serve", run, "--port", str(port), *settings]


@contextmanager
def server(name, run):
    """A contestant that answers on a port, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        command(name, run, port), env=os.environ | THREADS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, f"{name} ended by itself"
                assert time.monotonic() < deadline, f"{name} does not answer"
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=60)
        with suppress(ProcessLookupError):  # LitServe leaves processes behind
            os.killpg(process.pid, signal.SIGKILL)


# --- measuring --------------------------------------------------------------------------------------------------------


def asked(port, bodies, at_once):
    """Answers and seconds of each request, and seconds of all."""
    own = threading.local()

    def ask(body):
        if not hasattr(own, "connection"):
            own.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        began = time.perf_counter()
        own.connection.request("POST", "/predict", body, {"content-type": "application/json"})
        response = own.connection.getresponse()
        content = response.read()
        return response.status, content, time.perf_counter() - began

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, bodies[: 2 * at_once]))  # threads, connections and the model's first calls
        began = time.perf_counter()
        answers = list(pool.map(ask, bodies))
        return answers, time.perf_counter() - began


def numbers(answer):
    """Every number in an answer."""
    if isinstance(answer, dict):
        answer = [*answer.values()]
    if isinstance(answer, list):
        return [number for each in answer for number in numbers(each)]
    return [answer] if isinstance(answer, int | float) else []


def row(name, at_once, run, bodies, alone):
    """What one contestant came to."""
    with server(name, run) as port:
        answers, seconds = asked(port, bodies, at_once)
    wrong = [each for each in answers if each[0] != 200]
    differences = [
        max(abs(one - other) for one, other in zip(numbers(json.loads(content)), expected, strict=True))
        for (status, content, _), expected in zip(answers, alone, strict=False)
        if status == 200
    ]
    spent = sorted(each[2] for each in answers)
    found = {
        "server": name, "at_once": at_once, "requests": len(bodies), "per_second": len(bodies) / seconds,
        "p50_ms": 1e3 * statistics.median(spent), "p99_ms": 1e3 * spent[int(0.99 * len(spent))],
        "errors": len(wrong), "mixed": sum(each > TOLERANCE for each in differences),
        "largest_difference": max(differences, default=None),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def measure(run, count, at_once):
    """Every contestant with the model of a run."""
    model = loaded(run)
    asking = questions(model.about["kind"], count)
    alone = [numbers(json.loads(model.answers([model.request(**each)])[0])) for each in asking]
    bodies = [json.dumps(each).encode() for each in asking]
    few = bodies[: max(1, count // 5)]
    rows = [
        row("ours, wait_ms 0", 1, run, few, alone),
        row("ours", 1, run, few, alone),
        row("bare", 1, run, few, alone),
        row("bare", at_once, run, bodies, alone),
        row("ours", at_once, run, bodies, alone),
        row("ours, bit_exact", at_once, run, bodies, alone),
    ]
    if find_spec("litserve"):
        rows.append(row("litserve", at_once, run, bodies, alone))
    return {"kind": model.about["kind"], "rows": rows}


def main():
    """Measures, or is the bare handler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, action="append", help="a run; may be repeated")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        serve_bare(given.run[0], given.port)
        return
    names = ["torch", "fastapi", "uvicorn", "pydantic", *(["litserve"] if find_spec("litserve") else [])]
    about = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}", "torch_threads": 1,
        "versions": {name: version(name) for name in names},
    }  # fmt: skip
    models = [measure(run, given.requests, given.at_once) for run in given.run]
    given.out.write_text(json.dumps({**about, "models": models}, indent=1) + "\n")


if __name__ == "__main__":
    main()
