"""What a recipe can say about replay."""

import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from runner.plugins.marl.replay.config import PrioritizedConfig, ReplayConfig, UniformConfig

REPLAY = TypeAdapter(ReplayConfig)


def test_kind_chooses_the_section():
    assert REPLAY.validate_python({"kind": "uniform", "capacity": 10}) == UniformConfig(capacity=10)
    assert REPLAY.validate_python({"kind": "prioritized"}) == PrioritizedConfig()


def test_beta_is_a_list_in_yaml():
    assert REPLAY.validate_python({"kind": "prioritized", "beta": [0.5, 1]}).beta == (0.5, 1.0)


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "fifo"},
        {"kind": "uniform", "alpha": 0.6},
        {"kind": "uniform", "capacity": 0},
        {"kind": "uniform", "capacity": 1e3},
        {"kind": "uniform", "device": "cuda"},
        {"kind": "prioritized", "alpha": -0.1},
        {"kind": "prioritized", "alpha": 1.1},
        {"kind": "prioritized", "alpha": float("nan")},
        {"kind": "prioritized", "beta": [0.4]},
        {"kind": "prioritized", "beta": [0.4, 1.5]},
        {"kind": "prioritized", "beta": ["0.4", 1]},
        {"kind": "prioritized", "epsilon": 0.0},
        {"kind": "prioritized", "epsilon": float("inf")},
    ],
)
def test_what_makes_no_sense_is_refused(section):
    with pytest.raises(ValidationError):
        REPLAY.validate_python(section)


def test_torch_is_not_imported_for_it():
    code = "import sys, runner.plugins.marl.replay.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
