"""Returns GPU memory to the driver after every update."""

from collections.abc import Callable
from typing import Any, ClassVar

from runner.api import Exact, Pipeline, Setting, Stage, StageConfig


class EmptyCacheConfig(StageConfig):
    """Calls ``torch.cuda.empty_cache()`` after every update, as many a training script does.

    Torch keeps freed memory for the next allocation. Returning it makes every update
    request memory from the driver again, which also waits for the GPU: expect it to be
    slower. The stage exists to measure that.

    When it helps: another process needs the memory between two updates.
    When it hurts: nearly always, in time.
    """

    kind: ClassVar[str] = "empty_cache"
    implementation = "EmptyCache"
    phase: ClassVar[int] = 3
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: the same bits."""
        return Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason on a CPU, which has no such cache."""
        return None if setting.device.type == "cuda" else "a CPU has no cache of GPU memory"


class EmptyCache(Stage):
    """Empties the cache after every update."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the update."""
        pipeline.slots.wrap("update", self._emptied)

    @staticmethod
    def _emptied(step: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def update(*arguments: Any) -> Any:
            output = step(*arguments)
            torch.cuda.empty_cache()
            return output

        return update
