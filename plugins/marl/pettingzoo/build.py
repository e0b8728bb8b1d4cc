"""Makes PettingZoo environments by name; every possible mistake has one clear message."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from runner.api import UsageError

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

INSTALL = "pip install 'proven-runner[pettingzoo]'"


def environment_maker(
    name: str, options: Mapping[str, Any]
) -> Callable[[], ParallelEnv[str, Any, Any]]:
    """Returns a function that makes a copy of the environment.

    Args:
        name: a module with a ``parallel_env``; the config has checked that it may be imported.
        options: arguments for ``parallel_env``.

    Raises:
        UsageError: the package is not installed, has no such parallel environment, or refuses the
            options.
    """
    module = _import(name)
    if not hasattr(module, "parallel_env"):
        raise UsageError(
            f"data.environment: '{name}' has no parallel environment"
        )
    arguments = dict(options)
    # These environments have discrete actions by default, which no learner here supports.
    if name.startswith("mpe2."):
        arguments = {"continuous_actions": True, **options}

    def make() -> ParallelEnv[str, Any, Any]:
        try:
            # pygame prints a greeting on stdout, which is reserved for the runner's data.
            with contextlib.redirect_stdout(sys.stderr):
                return module.parallel_env(**arguments)
        except (AssertionError, TypeError, ValueError) as error:
            raise UsageError(
                f"data.options: '{name}' refuses {dict(options)}: {error}"
            ) from error

    return make


def _import(name: str) -> ModuleType:
    package = name.partition(".")[0]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise UsageError(
                f"data.environment: the installed '{package}' has no environment '{name}'"
            ) from error
        if error.name in {"pettingzoo", "mpe2"}:
            raise UsageError(
                f"data.environment: '{name}' needs the package '{error.name}': {INSTALL}"
            ) from error
        raise UsageError(
            f"data.environment: '{name}' needs the package '{error.name}', which its authors "
            f"leave to you to install"
        ) from error
