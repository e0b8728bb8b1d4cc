"""Selects the tests of a commit: every quick one, and of slow and of similar ones a part, others at every commit."""

import hashlib
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW = Path(__file__).with_name("slow.txt")
"""Names of slow tests, one in a line; ``python tests/slow.py`` writes it."""
SHARE = 3
"""Of so many cases of slow tests, one is run."""
SOURCES = ("runner", "plugins", "tests")


def commit() -> str:
    """Returns the hash of the commit that is checked out, or an empty text outside of a repository."""
    return _git("rev-parse", "HEAD").strip()


def changed_files() -> list[Path]:
    """Returns what the last commit and the working tree change, relative to the repository."""
    return [Path(line) for line in _git("diff", "--name-only", "--no-renames", "HEAD~1").splitlines()]


def slow_tests() -> frozenset[str]:
    """Returns the names of slow tests, without cases."""
    return frozenset(SLOW.read_text().split())


def omitted(
    items: Iterable[pytest.Item], seed: str, slow: frozenset[str] = frozenset(), changed: Iterable[Path] = ()
) -> set[pytest.Item]:
    """Returns the cases that are not run.

    Of a test marked with ``sampled(N)``, those are all but N; of other slow tests, all but one of ``SHARE``. Slow tests
    of a package that is changed are run, and so is every case that is named after a changed file.

    Args:
        items: The collected cases of all tests.
        seed: Decides which cases are run; the same text selects the same ones.
        slow: Names of slow tests.
        changed: Changed files, relative to the repository.
    """
    changed = list(changed)
    packages = {_package(path) for path in changed if path.parts[0] in SOURCES}
    names = {path.stem for path in changed}

    def must_run(item: pytest.Item) -> bool:
        return not names.isdisjoint(re.split(r"[\[\]-]", item.nodeid)[1:])

    left_out = set()
    similar = defaultdict(list)
    for item in items:
        if must_run(item):
            continue
        if marker := item.get_closest_marker("sampled"):
            similar[_test(item), marker.args[0]].append(item)
        elif _test(item) in slow and _package_of(item) not in packages and _hash(item, seed) % SHARE:
            left_out.add(item)
    for (_, number), cases in similar.items():
        left_out.update(sorted(cases, key=lambda item: _hash(item, seed))[number:])
    return left_out


def _package(path: Path) -> str:
    """Returns what a source file and its tests have in common: tests mirror the source."""
    return path.parts[1]


def _package_of(item: pytest.Item) -> str:
    return _package(Path(item.nodeid.partition("::")[0]))


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _hash(item: pytest.Item, seed: str) -> int:
    return int(hashlib.sha256(f"{seed} {item.nodeid}".encode()).hexdigest(), 16)


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout
