"""PyTorch training experiments declared in YAML, whose speed-ups are proven."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.system.errors import RunnerError
    from runner.tracking.run_table import runs
    from runner.training.evaluate import load_model
    from runner.training.resume import resume
    from runner.training.run import train

__version__ = "0.1.0"
__all__ = ["RunnerError", "load_model", "resume", "runs", "train"]

_MODULES = {
    "RunnerError": "runner.system.errors",
    "load_model": "runner.training.evaluate",
    "resume": "runner.training.resume",
    "runs": "runner.tracking.run_table",
    "train": "runner.training.run",
}


def __getattr__(name: str) -> Any:
    """Imports a module when its name is first used: ``import runner`` alone imports nothing."""
    if name not in _MODULES:
        raise AttributeError(f"module 'runner' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
