"""Base class of the settings of plugins."""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

from runner.plugin.config import Config


class PluginConfig(Config, ABC):
    """The settings of a plugin and its implementation. The docstring is its card."""

    kind: ClassVar[str]
    """The name under which it is registered: ``model.kind``, ``data.kind``, ``lr_scheduler.kind``,
    or the key under ``optimization`` or ``callbacks``.
    """
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Settings that matter only at the start of a training: a resumed run refuses another value."""
    implementation: ClassVar[str | type[Any]]
    """The ``Learner``, ``Source``, ``Stage``, ``Callback`` or ``ScheduleState``: the class itself,
    or its name.

    ``Net`` is a class in the module of the settings, ``.net:Net`` one of another module, relative
    to theirs, which is imported when a pipeline is assembled.
    """
