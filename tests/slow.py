"""Writes ``slow.txt`` from the times of a complete run.

pytest -n 4 --dist worksteal --complete --junitxml=times.xml
python tests/slow.py times.xml
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

from sampling import SLOW

LIMIT = 1.0
"""Seconds that the cases of a slow test take on average, on two processor cores that four test processes share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path, help="what --junitxml has written")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds (default: %(default)s)")
    parser.add_argument("--add", action="store_true", help="keep the list, for the times of a sample")
    arguments = parser.parse_args()
    tests = slow_tests(ElementTree.parse(arguments.times).iter("testcase"), arguments.limit)
    if arguments.add:
        tests = sorted({*tests, *SLOW.read_text().split()})
    SLOW.write_text("".join(f"{test}\n" for test in tests))


def slow_tests(cases, limit):
    """Returns the names of tests whose cases take longer than ``limit`` seconds on average, in their order."""
    seconds = defaultdict(list)
    for case in cases:
        file = case.get("classname").replace(".", "/") + ".py"
        test = case.get("name").partition("[")[0]
        seconds[f"{file}::{test}"].append(float(case.get("time")))
    return sorted(test for test, times in seconds.items() if mean(times) > limit)


if __name__ == "__main__":
    main()
