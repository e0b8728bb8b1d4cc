"""``runner.api``: complete, and the same for an editor, for ``dir`` and for ``import *``."""

import ast
from pathlib import Path

import torch

import runner.api
from runner.api import Rows, TensorRows


def test_every_name_can_be_imported_and_listed():
    assert dir(runner.api) == sorted(runner.api.__all__)
    assert len(set(runner.api.__all__)) == len(runner.api.__all__)
    assert all(getattr(runner.api, name) is not None for name in dir(runner.api))


def test_every_public_name_that_the_module_imports_is_listed():
    tree = ast.parse(Path(runner.api.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports if str(node.module).startswith("runner.") for alias in node.names}
    assert names == set(runner.api.__all__)


def test_rows_are_those_that_a_table_in_memory_is_made_of():
    rows = TensorRows({"x": torch.arange(6.0).view(3, 2)})
    assert isinstance(rows, Rows)
    assert (len(rows), rows.nbytes) == (3, 24)
    assert torch.equal(rows.take(torch.tensor([2, 0]))["x"], torch.tensor([[4.0, 5.0], [0.0, 1.0]]))
