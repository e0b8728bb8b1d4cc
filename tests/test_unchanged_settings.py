"""A test that leaves torch's settings changed fails, and the next one begins with the usual ones."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch_settings

CHANGES = {
    "torch.get_default_dtype": partial(torch.set_default_dtype, torch.float64),
    "torch.get_default_device": partial(torch.set_default_device, "meta"),
    "torch.get_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.is_grad_enabled": partial(torch.set_grad_enabled, False),
    "torch.get_deterministic_debug_mode": partial(torch.set_deterministic_debug_mode, "warn"),
    "torch.is_anomaly_enabled": partial(torch.autograd.set_detect_anomaly, True),
    "autocast enabled on cpu": partial(torch.set_autocast_enabled, "cpu", True),
    "autocast dtype on cpu": partial(torch.set_autocast_dtype, "cpu", torch.float16),
    "torch.get_float32_matmul_precision": partial(torch.set_float32_matmul_precision, "medium"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("name", torch_settings.WATCHED)
def test_a_changed_setting_is_named_and_restored(name):
    before = torch_settings.read()
    CHANGES[name]()
    assert set(torch_settings.restore(before)) == {name}
    assert torch_settings.read() == before


TESTS = """
import pytest
import torch
from conftest import unchanged_settings

def test_first():
    torch.set_float32_matmul_precision("medium")

def test_second():
    assert torch.get_float32_matmul_precision() == "highest"
"""


def test_the_test_that_changes_one_fails_and_not_the_next(tmp_path):
    (tmp_path / "test_precision.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", str(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    child = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "2 passed, 1 error" in child.stdout
    assert "left torch's settings changed: {'torch.get_float32_matmul_precision': 'medium'}" in child.stdout
