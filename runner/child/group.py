"""Child processes that do the same work together, each on a part of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.child.spawn import Cause, Child, ChildError
from runner.system.hardware import usable_cores

if TYPE_CHECKING:
    from runner.recipe.recipe import Recipe

_MOMENT_SECONDS = 1.0


class ChildGroup(AbstractContextManager["ChildGroup"]):
    """One or several processes that run ``main(parent)`` of a module, and end together.

    The option ``group`` tells a process its ``rank``, their ``count``, and the path of the
    ``store`` by which they find each other. Each of several has its share of the cores.

    Args:
        module: The module.
        recipe: The recipe that all of them get.
        count: Number of processes.
        plugin_files: Files that the recipe needs.
        options: Further input of the module.
    """

    def __init__(
        self,
        module: str,
        recipe: Recipe,
        count: int = 1,
        *,
        plugin_files: Sequence[Path] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.count = count
        threads = None if count == 1 else max(1, usable_cores() // count)
        self._children: list[Child] = []
        # If a process cannot start, those before it end.
        with ExitStack() as stack:
            # The last to go, because processes write to it until they end.
            folder = tempfile.TemporaryDirectory(prefix="runner-group-", ignore_cleanup_errors=True)
            stack.enter_context(folder)
            store = str(Path(folder.name, "store"))
            for rank in range(count):
                place = {"rank": rank, "count": count, "store": store}
                child = Child(
                    module,
                    recipe,
                    plugin_files=plugin_files,
                    options={**(options or {}), "group": place},
                    threads=threads,
                )
                self._children.append(stack.enter_context(child))
            self._resources = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        """Ends all processes."""
        self._resources.close()

    def ask(self, command: str, timeout: float = 300.0) -> dict[str, Any]:
        """Gives all processes a command, and returns the answer of the first.

        Raises:
            ChildError: One of them has failed; then all of them have ended.
        """
        return self.ask_each(command, [()] * self.count, timeout)[0]

    def ask_each(
        self,
        command: str,
        arguments: Sequence[tuple[bytes, ...]],
        timeout: float = 300.0,
    ) -> list[dict[str, Any]]:
        """Gives all processes a command, each with its arguments, and returns their answers by rank.

        Raises:
            ChildError: One of them has failed; then all of them have ended.
        """
        for child, values in zip(self._children, arguments, strict=True):
            child.order(command, *values)
        return self._answers(timeout, f"no answer to '{command}'")

    def answer(self, timeout: float) -> dict[str, Any]:
        """Returns the next message of the first process, once all of them have sent one.

        Raises:
            ChildError: One of them has failed; then all of them have ended.
        """
        return self._answers(timeout, "no answer")[0]

    def _answers(self, timeout: float, hung: str) -> list[dict[str, Any]]:
        try:
            return [child.answer(timeout, hung=hung) for child in self._children]
        except ChildError as error:
            # The others may wait for the one that has failed, or know the reason.
            errors = [error, *self._errors()]
            self._resources.close()
            raise next(filter(_is_about_memory, errors), error) from None
        except BaseException:
            self._resources.close()
            raise

    def _errors(self) -> Iterator[ChildError]:
        """Yields the errors of processes that fail within a moment."""
        for child in self._children:
            try:
                child.answer(_MOMENT_SECONDS)
            except ChildError as error:
                yield error


def _is_about_memory(error: ChildError) -> bool:
    return error.cause is Cause.OUT_OF_MEMORY
