"""Selects a few cases of a test with many similar ones: others at every commit, so that all are run in the end."""

import hashlib
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest


def commit() -> str:
    """Returns the hash of the commit that is checked out, or an empty text outside of a repository."""
    command = ["git", "rev-parse", "HEAD"]
    answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def omitted(items: Iterable[pytest.Item], seed: str) -> set[pytest.Item]:
    """Returns the cases that are not run: of each test marked with ``sampled(N)``, all but N.

    Args:
        items: The collected cases of all tests.
        seed: Decides which cases are run; the same text selects the same ones.
    """
    cases = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    return {
        item
        for (_, number), similar in cases.items()
        for item in sorted(similar, key=lambda item: _order(item, seed))[number:]
    }


def _order(item: pytest.Item, seed: str) -> str:
    return hashlib.sha256(f"{seed} {item.nodeid}".encode()).hexdigest()
