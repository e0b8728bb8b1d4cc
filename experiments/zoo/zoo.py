"""A public exam of misleading speed-ups, taken by the gate, the clock and other methods.

    python experiments/zoo/zoo.py                    # the exam; continues where it was interrupted
    python experiments/zoo/zoo.py --only NAME ...    # these entries, again
    python experiments/zoo/zoo.py --group a b        # these groups
    python experiments/zoo/zoo.py --table            # summary.md from the results that exist

Every method judges every entry in a process of its own with one thread, because some entries change their process.
Results are appended to results.jsonl as soon as they exist.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

RESULTS = HERE / "results.jsonl"
TABLE = HERE / "summary.md"
LIMIT_S = 150.0
"""Longest time of one method with one entry."""
METHODS = ("gate", "clock", "numbers", "stopwatch")


def work(name: str, method: str, how: str, connection) -> None:
    """Runs in a process of its own; sends one result."""
    from exam.catalog import ENTRIES
    from exam.methods import apply

    connection.send(apply(ENTRIES[name], method, how))
    connection.close()


def judge(name: str, method: str, how: str = "itself") -> dict:
    """Applies a method in a new process, and waits for the result up to the time limit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["exam.catalog", "exam.methods"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(name, method, how, sender), daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(LIMIT_S) else {"outcome": "ERROR", "reported": "time limit"}
    except EOFError:
        return {"outcome": "ERROR", "reported": "the process ended without a result"}
    finally:
        process.kill()
        process.join()


def examine(name: str) -> dict:
    """Returns the row of one entry."""
    from exam.catalog import ENTRIES
    from exam.report import processor

    entry = ENTRIES[name]
    started = time.perf_counter()
    how = judge(name, "how")["outcome"] if entry.emulation else "itself"
    results = {method: judge(name, method, how) for method in METHODS}
    numbers = results.pop("numbers")
    for method in ("allclose", "dynamo"):
        results[method] = numbers.get(method, numbers)
    where = {"torch": version("torch"), "processor": processor()}
    seconds = round(time.perf_counter() - started, 1)
    return {"name": name, "group": entry.group, "how": how, **results, **where, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="examine these entries, again")
    parser.add_argument("--group", nargs="+", metavar="LETTER", default=[], help="examine these groups")
    parser.add_argument("--table", action="store_true", help="write the table, and examine nothing")
    options = parser.parse_args()

    from exam.catalog import ENTRIES, GROUPS
    from exam.report import read_rows, summary

    unknown = [name for name in options.only if name not in ENTRIES]
    unknown += [letter for letter in options.group if letter not in GROUPS]
    if unknown:
        parser.error(f"no entry or group has the name {unknown[0]}")

    done = {row["name"] for row in read_rows(RESULTS)}
    names = options.only or [name for name in ENTRIES if name not in done]
    if options.group:
        names = [name for name in names if ENTRIES[name].group in options.group]
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        for name in [] if options.table else names:
            row = examine(name)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            outcomes = ", ".join(f"{key} {value['outcome']}" for key, value in row.items() if isinstance(value, dict))
            print(f"{name} ({row['how']}, {row['seconds']} s): {outcomes}", flush=True)
    TABLE.write_text(summary(read_rows(RESULTS)))


if __name__ == "__main__":
    main()
