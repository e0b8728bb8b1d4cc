"""Coverage of stages' code during their checks: a verdict is not valid for code that has
not run.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from runner.plugin.stage import Stage
from runner.proof.subject import Build, Subject
from runner.system import torch_settings
from runner.verify.global_patches import PluginObjects

_WITHOUT_EFFECT = (
    ast.Raise,
    ast.Pass,
    ast.Import,
    ast.ImportFrom,
    ast.Global,
    ast.Nonlocal,
)
_BUILDING = ("__init__", "prepare", "attach")
"""Methods of stages that run when a pipeline is built."""
# They are called at the end of a training, or when it is resumed.
_UNCALLED = ("closing_notes", "state_dict", "load_state_dict")
"""Methods of stages that a comparison need not call."""
_CHECKED_ELSEWHERE = ("torch.is_", "autocast ")
"""Prefixes of settings of gradients and autocast, which have other checks."""

Function = ast.FunctionDef | ast.Lambda
Key = tuple[str, int]
"""Name and first line of a function in its file."""
_Span = tuple[int, int, int, int]
"""Line and column of the beginning of a text, and of its end."""


class CodeCoverage:
    """Records which code of some stages runs: their methods, and the functions of
    their files that these name.

    For modules in the same folder that they import, it records the calls. It also
    records which of torch's settings differ when the code calls other functions.

    Args:
        works: The classes of the stages.

    Attributes:
        settings: Settings of torch that differ between the call of the code and its
            calls of other functions.
    """

    def __init__(self, works: Iterable[type[Stage]]) -> None:
        stages = list(works)
        classes = {base for stage in stages for base in stage.__mro__}
        names = defaultdict[str, set[str]](set)
        for base in classes - {Stage}:
            if issubclass(base, Stage):
                names[inspect.getfile(base)].add(base.__name__)
        self._functions = {
            file: _by_key(_functions(file, class_names))
            for file, class_names in names.items()
        }

        stage_files = {inspect.getfile(stage) for stage in stages}
        for file in PluginObjects(stage_files).files - names.keys():
            # Other files are compiled.
            if file.endswith(".py"):
                functions = _all_functions(ast.parse(Path(file).read_bytes()))
                self._functions[file] = _by_key(functions)
        self._shared_files = self._functions.keys() - stage_files
        """Files that contain more than these stages use."""

        self._instructions = defaultdict[CodeType, set[int]](set)
        self._entered: dict[str, set[Key]] = {file: set() for file in self._functions}
        self._later: dict[str, set[Key]] = {file: set() for file in self._functions}
        """Functions that ran after the pipeline was built."""
        self._settings: dict[FrameType, dict[str, Any]] = {}
        """Torch's settings when the code was called, while it runs."""
        self.settings: dict[str, tuple[Any, Any]] = {}

    def watched(self, build: Build) -> Build:
        """Makes the same subjects, and records what runs in them and when they are made."""
        if not self._functions:
            return build

        def build_watched() -> Subject:
            with self.watching():
                subject = build()

            def step(batch: Any) -> Any:
                with self.watching():
                    return subject.step(batch)

            return replace(subject, step=step)

        return build_watched

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records what runs inside the ``with``; nothing while a debugger traces."""
        if sys.gettrace() is not None:
            yield
            return
        trace_of_threads = threading.gettrace()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(trace_of_threads)

    def _called(self, frame: FrameType, *_: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        # The caller's settings exist if the caller is code of the stages.
        settings = None if frame.f_back is None else self._settings.get(frame.f_back)
        functions = self._functions.get(file)
        if functions is None:
            if settings is not None:
                self._compare(settings)
            return None

        key = code.co_name, code.co_firstlineno
        if key in functions:
            self._entered[file].add(key)
            if key not in self._later[file] and not self._is_being_built(frame):
                self._later[file].add(key)
        self._settings[frame] = settings or torch_settings.read()
        instructions = self._instructions[code]
        frame.f_trace_opcodes = True

        def record(frame: FrameType, event: str, _: Any) -> Any:
            instructions.add(frame.f_lasti)
            if event == "return":
                self._settings.pop(frame, None)
            return record

        return record

    def _compare(self, settings: dict[str, Any]) -> None:
        for name, value in torch_settings.read().items():
            is_checked = name.startswith(_CHECKED_ELSEWHERE)
            if value != settings[name] and not is_checked:
                self.settings[name] = settings[name], value

    def _is_being_built(self, frame: FrameType | None) -> bool:
        while frame is not None:
            code = frame.f_code
            if code.co_filename in self._functions and code.co_name in _BUILDING:
                return True
            frame = frame.f_back
        return False

    @property
    def is_idle(self) -> bool:
        """Returns whether functions for a training never ran, and none ran after a
        pipeline was built.
        """
        if any(self._later.values()):
            return False
        entered = {file for file, keys in self._entered.items() if keys}
        missed = {
            name
            for file in entered - self._shared_files
            for name, _ in self._functions[file].keys() - self._entered[file]
        }
        return bool(missed - {*_UNCALLED, *_BUILDING})

    def missed(self) -> list[str]:
        """Returns statements, branches of expressions and nameless functions that never
        ran, as ``FILE:LINE``.

        Statements that only raise are excluded.
        """
        places = []
        for file, functions in self._functions.items():
            entered = self._entered[file]
            # Without a function that ran, the file was not observed.
            if not entered:
                continue
            spans = self._spans(file)
            lines: set[int] = set()
            for key in entered if file in self._shared_files else functions:
                for function in functions[key]:
                    lines.update(_missed(function, spans))
            places += [f"{Path(file).name}:{line}" for line in sorted(lines)]
        return places

    def _spans(self, file: str) -> list[_Span]:
        """Returns the source positions of the instructions of a file that ran."""
        positions = set()
        for code, offsets in self._instructions.items():
            if code.co_filename != file:
                continue
            # Instructions have two bytes.
            for number, position in enumerate(code.co_positions()):
                if 2 * number in offsets:
                    positions.add(position)
        return [
            (line, column, last_line, last_column)
            for line, last_line, column, last_column in positions
            if line and last_line and column is not None and last_column is not None
        ]


def _missed(function: Function, spans: Collection[_Span]) -> Iterator[int]:
    """Yields the lines of code that never ran."""

    def has_run(node: ast.stmt | ast.expr) -> bool:
        start = (node.lineno, node.col_offset)
        end = (node.end_lineno, node.end_col_offset)
        return any(start <= span[:2] and span[2:] <= end for span in spans)

    nodes: Iterable[ast.stmt | ast.expr] = ()
    if isinstance(function, ast.Lambda):
        nodes = [function.body]
    elif function.name not in _UNCALLED:
        nodes = _statements(function)
    yield from (node.lineno for node in nodes if not has_run(node))

    for node in ast.walk(function):
        branches: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            branches = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            branches = node.values[1:]
        # Branches add nothing if the expression itself never ran.
        if isinstance(node, ast.expr) and branches and has_run(node):
            yield from (branch.lineno for branch in branches if not has_run(branch))


def _by_key(functions: Iterable[Function]) -> dict[Key, list[Function]]:
    """Groups functions by key: several lambdas in a line differ only in their columns,
    which a frame does not contain.
    """
    groups = defaultdict[Key, list[Function]](list)
    for function in functions:
        groups[_key(function)].append(function)
    return dict(groups)


def _key(function: Function) -> Key:
    if isinstance(function, ast.Lambda):
        return "<lambda>", function.lineno
    # The code of a function starts with its decorators.
    lines = [decorator.lineno for decorator in function.decorator_list]
    return function.name, min([function.lineno, *lines])


def _functions(file: str, names: Collection[str]) -> Iterator[Function]:
    """Yields functions in the named classes and functions, and in those of the
    file that they name, except as decorators.
    """
    tree = ast.parse(Path(file).read_bytes())
    nodes = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    remaining = list(names)
    while remaining:
        node = nodes.pop(remaining.pop(), ast.Pass())
        yield from _all_functions(node)
        decorators = getattr(node, "decorator_list", ())
        for child in ast.iter_child_nodes(node):
            if child not in decorators:
                children = ast.walk(child)
                remaining += [
                    name.id for name in children if isinstance(name, ast.Name)
                ]


def _all_functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the innermost statements that have an effect, without those of nested
    functions.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Match) or hasattr(child, "body"):
            if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                yield from _statements(child)
        elif isinstance(child, ast.stmt) and not _is_without_effect(child):
            yield child


def _is_without_effect(node: ast.stmt) -> bool:
    """Returns whether a statement only raises, imports, or is a text."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, _WITHOUT_EFFECT)
