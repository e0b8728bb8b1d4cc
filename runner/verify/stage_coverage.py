"""Measures the coverage of stages' code during their checks: a verdict is not
valid for code that has not run.
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
from runner.verify.global_patches import Made

_WITHOUT_EFFECT = (
    ast.Raise,
    ast.Pass,
    ast.Import,
    ast.ImportFrom,
    ast.Global,
    ast.Nonlocal,
)
_WHILE_BUILT = ("__init__", "prepare", "attach")
_NOT_ASKED = (
    "closing_notes",
    "state_dict",
    "load_state_dict",
)  # of trainings that end, or are resumed
# Prefixes of settings of gradients and autocast, which have other checks.
_SEEN_OTHERWISE = ("torch.is_", "autocast ")

Function = ast.FunctionDef | ast.Lambda
Key = tuple[str, int]  # of a function in its file: its name, its first line
_Span = tuple[
    int, int, int, int
]  # of a text: line and column of its beginning, and of its end


class Reach:
    """Records which code of some stages runs: their methods, and the functions of
    their files that these name.

    For modules in the same folder that they import, it records the calls. It also records which of
    torch's settings differ when the code calls other functions.
    """

    def __init__(self, works: Iterable[type[Stage]]) -> None:
        stages = list(works)
        names = defaultdict[str, set[str]](set)
        for each in {
            base
            for stage in stages
            for base in stage.__mro__
            if issubclass(base, Stage)
        } - {Stage}:
            names[inspect.getfile(each)].add(each.__name__)
        own = {inspect.getfile(each) for each in stages}
        self._functions = {
            file: _by_key(_functions(file, of)) for file, of in names.items()
        }
        for file in {
            file for file in Made(own).files if file.endswith(".py")
        } - names.keys():  # others are compiled
            self._functions[file] = _by_key(
                _all_functions(ast.parse(Path(file).read_bytes()))
            )
        self._offers_more = self._functions.keys() - own  # than these stages use
        self._instructions = defaultdict[CodeType, set[int]](set)
        self._entered: dict[str, set[Key]] = {file: set() for file in self._functions}
        # That only run with a complete pipeline.
        self._later: dict[str, set[Key]] = {file: set() for file in self._functions}
        self._settings: dict[
            FrameType, dict[str, Any]
        ] = {}  # as the code found them, while it runs
        self.settings: dict[str, tuple[Any, Any]] = {}
        """Settings of torch that differ between the call of the code and its
        calls of other functions.
        """

    def watched(self, build: Build) -> Build:
        """Makes the same subjects, and remembers what runs while they are made and make their steps."""
        if not self._functions:
            return build

        def made() -> Subject:
            with self.watching():
                subject = build()

            def step(batch: Any) -> Any:
                with self.watching():
                    return subject.step(batch)

            return replace(subject, step=step)

        return made

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remembers what runs inside the ``with``; nothing if a debugger or the like looks already."""
        if sys.gettrace() is not None:
            yield
            return
        of_threads = threading.gettrace()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(of_threads)

    def _called(self, frame: FrameType, *_: Any) -> Any:
        code = frame.f_code
        file, key = code.co_filename, (code.co_name, code.co_firstlineno)
        found = (
            None if frame.f_back is None else self._settings.get(frame.f_back)
        )  # by code of stages that calls
        if (functions := self._functions.get(file)) is None:
            if found is not None:
                self._compare(found)
            return None
        if key in functions:
            self._entered[file].add(key)
            if key not in self._later[file] and not self._is_being_built(frame):
                self._later[file].add(key)
        self._settings[frame] = found or torch_settings.read()
        instructions = self._instructions[code]
        frame.f_trace_opcodes = True

        def ran(frame: FrameType, event: str, _: Any) -> Any:
            instructions.add(frame.f_lasti)
            if event == "return":
                self._settings.pop(frame, None)
            return ran

        return ran

    def _compare(self, before: dict[str, Any]) -> None:
        changed = {
            name: (before[name], now)
            for name, now in torch_settings.read().items()
            if now != before[name]
        }
        self.settings |= {
            name: pair
            for name, pair in changed.items()
            if not name.startswith(_SEEN_OTHERWISE)
        }

    def _is_being_built(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if (
                frame.f_code.co_filename in self._functions
                and frame.f_code.co_name in _WHILE_BUILT
            ):
                return True
            frame = frame.f_back
        return False

    @property
    def is_idle(self) -> bool:
        """Returns whether functions for a training never ran, and none ran when a
        pipeline was built.
        """
        seen = {
            file for file, entered in self._entered.items() if entered
        } - self._offers_more
        never = {
            key[0]
            for file in seen
            for key in self._functions[file].keys() - self._entered[file]
        }
        return bool(never - {*_NOT_ASKED, *_WHILE_BUILT}) and not any(
            self._later.values()
        )

    def missed(self) -> list[str]:
        """Statements, branches of expressions and nameless functions that never ran, as ``FILE:LINE``.

        Statements that only raise are excluded.
        """
        found = []
        for file, functions in self._functions.items():
            if not self._entered[file]:  # not observed
                continue
            known = self._entered[file] if file in self._offers_more else functions
            ran = self._ran(file)
            missed = {
                line
                for key in known
                for function in functions[key]
                for line in _missed(function, ran)
            }
            found += [f"{Path(file).name}:{line}" for line in sorted(missed)]
        return found

    def _ran(self, file: str) -> list[_Span]:
        """Returns the source positions of the instructions of a file that ran."""
        codes = [
            (code, ran)
            for code, ran in self._instructions.items()
            if code.co_filename == file
        ]
        numbered = (
            (ran, *each)
            for code, ran in codes
            for each in enumerate(code.co_positions())
        )
        spans = {position for ran, number, position in numbered if 2 * number in ran}
        return [
            (a, start, b, end)
            for a, b, start, end in spans
            if a and b and start is not None and end is not None
        ]


def _missed(function: Function, ran: Collection[_Span]) -> Iterator[int]:
    """Yields the lines of code that never ran."""

    def has_run(node: ast.stmt | ast.expr) -> bool:
        first, last = (
            (node.lineno, node.col_offset),
            (node.end_lineno, node.end_col_offset),
        )
        return any(first <= each[:2] and each[2:] <= last for each in ran)

    if isinstance(function, ast.Lambda):
        wholes: Iterable[ast.stmt | ast.expr] = [function.body]
    else:
        wholes = _statements(function) if function.name not in _NOT_ASKED else ()
    yield from (each.lineno for each in wholes if not has_run(each))
    for node in ast.walk(function):
        if isinstance(node, ast.IfExp | ast.BoolOp) and has_run(node):
            branches = (
                [node.body, node.orelse]
                if isinstance(node, ast.IfExp)
                else node.values[1:]
            )
            yield from (each.lineno for each in branches if not has_run(each))


def _by_key(functions: Iterable[Function]) -> dict[Key, list[Function]]:
    """Groups functions by key: several lambdas in a line differ only in their columns, which a
    frame does not contain.
    """
    found = defaultdict[Key, list[Function]](list)
    for each in functions:
        found[_key(each)].append(each)
    return dict(found)


def _key(function: Function) -> Key:
    if isinstance(function, ast.Lambda):
        return "<lambda>", function.lineno
    return function.name, min(
        [function.lineno, *(each.lineno for each in function.decorator_list)]
    )


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
    wanted = list(names)
    while wanted:
        node = nodes.pop(wanted.pop(), ast.Pass())
        yield from _all_functions(node)
        parts = [
            each
            for each in ast.iter_child_nodes(node)
            if each not in getattr(node, "decorator_list", ())
        ]
        wanted += [
            each.id
            for part in parts
            for each in ast.walk(part)
            if isinstance(each, ast.Name)
        ]


def _all_functions(tree: ast.AST) -> Iterator[Function]:
    return (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.Lambda)
    )


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the innermost statements that have an effect, without those of nested functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Match) or hasattr(child, "body"):
            if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                yield from _statements(child)
        elif isinstance(child, ast.stmt) and not _is_without_effect(child):
            yield child


def _is_without_effect(node: ast.stmt) -> bool:
    """Returns whether a statement only raises, imports, or is a text."""
    return isinstance(node, _WITHOUT_EFFECT) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
