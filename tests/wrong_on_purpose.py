"""Registration of stages that are wrong on purpose."""

import sys
from typing import ClassVar

from runner.api import Exact, StageConfig


def wrong(kind, wraps, contract=Exact):
    """Registers a stage with settings that promise a contract, the same bits unless given."""

    def register(implementation):
        namespace = {
            "__module__": implementation.__module__,
            "__doc__": implementation.__doc__,
            "__annotations__": {
                "phase": ClassVar[int],
                "kind": ClassVar[str],
                "wraps": ClassVar[frozenset[str]],
            },
            "kind": kind,
            "phase": 1,
            "wraps": frozenset(wraps),
            "contract": lambda self, setting: contract(),
            "implementation": implementation,
        }
        name = f"{implementation.__name__}Config"
        face = type(StageConfig)(name, (StageConfig,), namespace)
        setattr(sys.modules[implementation.__module__], name, face)
        return implementation

    return register
