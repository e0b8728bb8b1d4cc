"""Every row of the table of threats names a test that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    line for line in (ROOT / "docs" / "security.md").read_text().splitlines() if line.startswith("| ") and "::" in line
]


def test_there_are_rows():
    assert len(ROWS) >= 25
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_a_test(row):
    (path, name) = re.fullmatch(r"\|[^|]+\|[^|]+\| `(tests/[\w/]+\.py)::(test_\w+)` \|", row).groups()
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions
