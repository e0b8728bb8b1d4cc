"""Imports the class that a plugin's settings name as their implementation."""

from __future__ import annotations

import builtins
import sys
from inspect import isabstract, isroutine
from types import ModuleType
from typing import TYPE_CHECKING, Any

from runner.plugin import configs
from runner.plugin.static_checks import declaring_class, describe_class, split_name
from runner.system.errors import UsageError

if TYPE_CHECKING:
    from runner.plugin.plugin_config import PluginConfig


def imported(config: PluginConfig) -> type[Any]:
    """Returns the implementation; raises a UsageError if it is of another type, or incomplete."""
    # These modules import torch, which validation does without.
    from runner.plugin.callback import Callback
    from runner.plugin.learner import Learner
    from runner.plugin.schedule_state import ScheduleState
    from runner.plugin.source import Source
    from runner.plugin.stage import Stage

    cls: Any = implementation_of(type(config))
    if not isinstance(cls, type) or not issubclass(
        cls, Learner | Source | Stage | Callback | ScheduleState
    ):
        setting = f"{type(config).__name__}.implementation"
        expected = "a Learner, a Source, a Stage, a Callback or a ScheduleState"
        actual = getattr(cls, "__name__", cls)
        raise UsageError(f"{setting} should be {expected}, got {actual!r}")
    if isabstract(cls):
        description = describe_class(cls)
        raise UsageError(description.lacks(sorted(description.abstract)))
    if misplaced := _misplaced(cls, type(config)):
        names = " and ".join(f"'{name}'" for name in misplaced)
        raise UsageError(
            f"{describe_class(cls)} defines {names}, which the runner reads from the settings: "
            f"move it to {type(config).__name__}"
        )
    return cls


def _misplaced(cls: type[Any], config: type[PluginConfig]) -> list[str]:
    """Returns the names that a plugin's class defines and that only its settings may declare.

    They would have no effect there: a loss that couples samples would be cut into parts.
    """
    declarations = {
        name: value
        for base in config.__mro__
        if base.__module__ == configs.__name__
        for name, value in vars(base).items()
        if not name.startswith("_") and name not in config.model_fields
    }
    of_runner = [
        base for base in cls.__mro__ if base.__module__.startswith("runner.plugin.")
    ]
    known = {name for base in of_runner for name in vars(base)}
    return sorted(
        name
        for base in cls.__mro__
        if base not in of_runner
        for name, value in vars(base).items()
        if name in declarations.keys() - known
        and isroutine(value) == isroutine(declarations[name])
    )


def implementation_of(config: type[PluginConfig]) -> type[Any]:
    """Imports and returns the implementation that a class of settings names.

    Raises:
        UsageError: The named module or class does not exist.
    """
    implementation = config.implementation
    if not isinstance(implementation, str):
        return implementation
    owner = declaring_class(config)
    module_name, name = split_name(implementation)
    module = sys.modules[owner.__module__]
    if module_name:
        module = _import(module_name, name, module)
    if not hasattr(module, name):
        problem = f"module '{module.__name__}' has no class '{name}'"
        raise UsageError(f"{_setting_of(owner)}: {problem}")
    cls: type[Any] = getattr(module, name)
    return cls


def _import(module_name: str, name: str, importing: ModuleType) -> ModuleType:
    """Imports a module as an import statement in another module does.

    The statement of a plugin file finds modules in the file's folder, with an importer of the file.
    """
    scope = vars(importing)
    available: Any = scope.get("__builtins__", builtins)
    namespace = available if isinstance(available, dict) else vars(available)
    absolute_name = module_name.lstrip(".")
    level = len(module_name) - len(absolute_name)
    module: ModuleType = namespace["__import__"](
        absolute_name, scope, None, (name,), level
    )
    return module


def _setting_of(owner: type[Any]) -> str:
    return f"{owner.__qualname__}.implementation = {vars(owner)['implementation']!r}"
