"""Finds incomplete implementations of plugins before anything is built: from their source code,
because importing takes seconds.

Unreadable code counts as complete until it is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.system.suggestions import shown_path

if TYPE_CHECKING:
    from runner.plugin.configs import Face

_LEARNER, _DATASET = "runner.plugin.learner.Learner", "runner.plugin.dataset.DatasetSource"
_SOURCE = "runner.plugin.source.Source"


@dataclass(frozen=True)
class Works:
    """A class as its source shows it."""

    name: str
    file: Path
    owners: dict[str, str]
    """By the name of a method, the class that it is from, with its module."""
    abstract: frozenset[str]
    """Methods that are only declared."""

    def lacks(self, methods: Sequence[str]) -> str:
        """The message about them."""
        named = ", ".join(f"'{name}'" for name in methods)
        return f"class {self.name} in {shown_path(self.file)} has no method{'s' * (len(methods) > 1)} {named}"


def lacking(face: type[Face]) -> str | None:
    """Returns a message about missing methods of an implementation; None if it is
    complete or unreadable.

    A source that can draw declares that twice: by a method, and by the suffixes of
    files in its settings.
    """
    works = works_of(face)
    if works is None or works.abstract:
        return None if works is None else works.lacks(sorted(works.abstract))
    pictures, draws = getattr(face, "pictures", None), works.owners.get("render") != _SOURCE
    if pictures and not draws:
        return f"{works.lacks(['render'])}, although {face.__name__}.pictures contains {' and '.join(pictures)}"
    if pictures == () and draws:
        where = f"class {works.name} in {shown_path(works.file)}"
        return f"{where} has the method 'render', and {face.__name__}.pictures is empty"
    return None


def unmeasured(model: type[Face], data: type[Face]) -> str | None:
    """Returns a message if a learner cannot be evaluated on the source's held-out
    batches; else None.
    """
    learner, source = works_of(model), works_of(data)
    if learner is None or source is None or learner.owners.get("metrics") != _LEARNER:
        return None
    if _DATASET not in (source.owners.get("evaluate"), source.owners.get("rehearse")):
        return None
    return f"{learner.lacks(['metrics'])}, with which {source.name} evaluates"


@cache
def works_of(face: type[Face]) -> Works | None:
    """Returns the implementation of a configuration class; None if it cannot be read."""
    implementation = face.implementation
    if isinstance(implementation, type):
        return of_class(implementation)
    module = declaring_class(face).__module__
    module_name, name = split_name(implementation)
    try:
        return _class(resolve_name(module_name, _package_of(module)) if module_name else module, name)
    except (LookupError, OSError, TypeError, ValueError, SyntaxError, ImportError, RecursionError):
        return None


def declaring_class(face: type[Face]) -> type[Any]:
    """Returns the class that sets ``implementation``: relative names are those of its module."""
    return next(base for base in face.__mro__ if "implementation" in vars(base))


def split_name(implementation: str) -> tuple[str, str]:
    """Splits ``MODULE:CLASS``; the module is empty if the class is in the module of the settings."""
    module_name, _, name = implementation.rpartition(":")
    return module_name, name


def _named(dotted: str, tree: ast.AST, module: str) -> Works:
    """Returns the class to which a name in a part of a module refers; raises a LookupError if that
    cannot be determined.
    """
    first, _, rest = dotted.partition(".")
    target = _imports(tree, module).get(first)
    if target is not None:
        module, _, dotted = f"{target}.{rest}".rstrip(".").rpartition(".")
    elif rest:
        raise LookupError(dotted)
    return _class(module, dotted)


def _imports(tree: ast.AST, module: str) -> dict[str, str]:
    """Returns the targets of imported names, also of those that are imported only for
    annotations.
    """
    package = _package_of(module)
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                whole, first = each.name, each.name.partition(".")[0]
                found[each.asname or first] = whole if each.asname else first
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            found |= {each.asname or each.name: f"{base}.{each.name}" for each in node.names}
    return found


def _package_of(module: str) -> str:
    """Returns the package to which relative imports in a module refer."""
    return module if hasattr(sys.modules.get(module), "__path__") else module.rpartition(".")[0]


def _class(module: str, name: str) -> Works:
    """A class of a module, itself if it is imported already; a LookupError if there is none that can be read."""
    # Not by getattr, for which a module may import something.
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if isinstance(found, type):
        return of_class(found)
    file, tree = _source(module)
    node = next((each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == name), None)
    if node is None:
        return _class(*_imports(tree, module)[name].rpartition(".")[::2])
    owners, abstract = dict[str, str](), dict[str, bool]()
    for base in reversed(node.bases):
        inherited = _named(ast.unparse(base.value if isinstance(base, ast.Subscript) else base), tree, module)
        owners |= inherited.owners
        abstract |= {each: each in inherited.abstract for each in inherited.owners}
    for part in node.body:
        decorators = getattr(part, "decorator_list", [])
        for own in _bound(part):
            owners[own] = f"{module}.{name}"
            abstract[own] = any(ast.unparse(each).endswith("abstractmethod") for each in decorators)
    return Works(name, file, owners, frozenset(each for each, is_abstract in abstract.items() if is_abstract))


def of_class(found: type[Any]) -> Works:
    """Describes an imported class."""
    owners = {name: f"{each.__module__}.{each.__qualname__}" for each in reversed(found.__mro__) for name in vars(each)}
    file = Path(getattr(sys.modules.get(found.__module__), "__file__", None) or found.__module__)
    return Works(found.__name__, file, owners, frozenset(getattr(found, "__abstractmethods__", ())))


@cache
def _source(module: str) -> tuple[Path, ast.Module]:
    """The source of a module; a LookupError where a package would have to be imported to find it."""
    package = module.rpartition(".")[0]
    if package and package not in sys.modules:
        raise LookupError(module)
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(module)
    file = Path(spec.origin)
    return file, ast.parse(file.read_text(encoding="utf-8"))


def _bound(part: ast.stmt) -> Iterator[str]:
    """The names that a statement in the body of a class binds."""
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield part.name
    elif isinstance(part, ast.Assign):
        yield from (each.id for target in part.targets for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(part, ast.AnnAssign) and part.value is not None and isinstance(part.target, ast.Name):
        yield part.target.id
