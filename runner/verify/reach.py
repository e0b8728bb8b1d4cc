"""Which statements of stages have run while they were judged: of what has not run, a verdict says nothing."""

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
from types import FrameType
from typing import Any

from runner.compare.subject import Build, Subject
from runner.plugin.stage import Stage

_WITHOUT_EFFECT = (ast.Raise, ast.Pass, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
_WHILE_BUILT = ("__init__", "prepare", "attach")
_NOT_ASKED = ("closing_notes", "state_dict", "load_state_dict")  # of trainings that end, or are resumed

Function = ast.FunctionDef | ast.Lambda
Key = tuple[str, int]  # of a function in its file: its name, its first line


class Reach:
    """Remembers what runs of the code of some stages: their methods, and what these name of their own files."""

    def __init__(self, works: Iterable[type[Stage]]) -> None:
        stages = list(works)
        names = defaultdict[str, set[str]](set)
        for each in {base for stage in stages for base in stage.__mro__ if issubclass(base, Stage)} - {Stage}:
            names[inspect.getfile(each)].add(each.__name__)
        self._inherited = names.keys() - {inspect.getfile(each) for each in stages}  # which may offer more than is used
        self._functions = {file: {_key(each): each for each in _functions(file, of)} for file, of in names.items()}
        self._lines: dict[str, set[int]] = {file: set() for file in names}
        self._entered: dict[str, set[Key]] = {file: set() for file in names}
        self._later: dict[str, set[Key]] = {file: set() for file in names}  # when a pipeline was built already

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
        file, key = frame.f_code.co_filename, (frame.f_code.co_name, frame.f_code.co_firstlineno)
        lines = self._lines.get(file)
        if lines is None:
            return None
        if key in self._functions[file]:
            self._entered[file].add(key)
            if key not in self._later[file] and not self._is_being_built(frame):
                self._later[file].add(key)

        def ran(frame: FrameType, *_: Any) -> Any:
            lines.add(frame.f_lineno)
            return ran

        return ran(frame)

    def _is_being_built(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename in self._lines and frame.f_code.co_name in _WHILE_BUILT:
                return True
            frame = frame.f_back
        return False

    @property
    def is_idle(self) -> bool:
        """Whether it has functions for later that never ran, and none ran when a pipeline was built already."""
        seen = {file for file, entered in self._entered.items() if entered} - self._inherited
        never = {key[0] for file in seen for key in self._functions[file].keys() - self._entered[file]}
        return bool(never - {*_NOT_ASKED, *_WHILE_BUILT}) and not any(self._later.values())

    def missed(self) -> list[str]:
        """Statements and nameless functions that never ran, as ``FILE:LINE``, but for what raises."""
        found = []
        for file, functions in self._functions.items():
            if not self._entered[file]:  # nobody looked
                continue
            known = self._entered[file] if file in self._inherited else functions
            missed = {line for key in known for line in self._missed(file, functions[key])}
            found += [f"{Path(file).name}:{line}" for line in sorted(missed)]
        return found

    def _missed(self, file: str, function: Function) -> Iterator[int]:
        if isinstance(function, ast.Lambda):
            if _key(function) not in self._entered[file]:
                yield function.lineno
        elif function.name not in _NOT_ASKED:
            for first, last in _statements(function):
                if self._lines[file].isdisjoint(range(first, last + 1)):
                    yield first


def _key(function: Function) -> Key:
    if isinstance(function, ast.Lambda):
        return "<lambda>", function.lineno
    return function.name, min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _functions(file: str, names: Collection[str]) -> Iterator[Function]:
    """Those in classes and functions with these names, and in those of the file that they name."""
    tree = ast.parse(Path(file).read_bytes())
    nodes = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    wanted = list(names)
    while wanted:
        for node in ast.walk(nodes.pop(wanted.pop(), ast.Pass())):
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                yield node
            elif isinstance(node, ast.Name):
                wanted.append(node.id)


def _statements(node: ast.AST) -> Iterator[tuple[int, int]]:
    """First and last line of each that has an effect and none inside, but for those of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Match) or hasattr(child, "body"):
            if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                yield from _statements(child)
        elif isinstance(child, ast.stmt) and not _is_without_effect(child):
            yield child.lineno, child.end_lineno or child.lineno


def _is_without_effect(node: ast.stmt) -> bool:
    """Whether it only raises, imports, or is a text."""
    return isinstance(node, _WITHOUT_EFFECT) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
