"""Training: assembly, training step, guards, checkpoints and resumption."""

import sys
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    """Lets ``runner.train(...)`` train, although ``runner.train`` is this package."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from runner.train.run import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Train
