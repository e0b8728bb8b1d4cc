"""How the batches of a training are divided among its processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from runner.system.errors import RunnerError

if TYPE_CHECKING:
    from runner.distributed.data_parallel import DataParallel, Parallelized
    from runner.distributed.process_group import ProcessGroup
    from runner.plugin.configs import SourceConfig
    from runner.plugin.context import Processes

Value = TypeVar("Value")


def draws_parts(data: SourceConfig, group: ProcessGroup | None) -> bool:
    """Returns whether every process draws a part of each batch itself."""
    return group is not None and data.division == "draws" and not group.cuts_batches


def divide(pipeline: Parallelized, group: ProcessGroup) -> DataParallel:
    """Divides the updates of a pipeline, which has all of its stages, among processes.

    Raises:
        UsageError: The learner cannot be trained on parts of a batch.
        RunnerError: The initial parameters differ between processes.
    """
    # Tests replace the class by incorrect ones, so it is looked up at each call.
    from runner.distributed import data_parallel, divided_draws

    parallel: DataParallel
    if pipeline.recipe.data.division == "draws":
        parallel = divided_draws.DividedDraws(group, pipeline)
    else:
        parallel = data_parallel.DataParallel(group, pipeline)
    parallel.attach()
    return parallel


def decide_together(group: Processes, make: Callable[[], Value]) -> Value:
    """Returns what the first process makes; all processes raise an error if that fails.

    The others wait as long as it shows signs of life, and do nothing meanwhile.
    """
    if group.rank:
        outcome = group.decide(dict[str, Any])
        if "error" in outcome:
            raise RunnerError(f"process 0: {outcome['error']}")
        value: Value = outcome["value"]
        return value
    try:
        value = make()
    except Exception as error:
        message = str(error) or type(error).__name__
        group.decide(lambda: {"error": message})
        raise
    group.decide(lambda: {"value": value})
    return value
