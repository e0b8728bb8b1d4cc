"""PyTorch training experiments declared in YAML, whose speed-ups are proven."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.system.errors import RunnerError
    from runner.train.evaluate import load_model
    from runner.train.run import train

__version__ = "0.1.0"
__all__ = ["RunnerError", "load_model", "train"]

_PLACES = {"RunnerError": "runner.system.errors", "load_model": "runner.train.evaluate"}


def __getattr__(name: str) -> Any:
    """Imports a module when its name is first used: ``import runner`` alone imports nothing."""
    if name == "train":
        return import_module("runner.train")
    if name not in _PLACES:
        raise AttributeError(f"module 'runner' has no attribute '{name}'")
    return getattr(import_module(_PLACES[name]), name)
