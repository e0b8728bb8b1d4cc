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
    from runner.plugin.plugin_config import PluginConfig

_LEARNER = "runner.plugin.learner.Learner"
_DATASET = "runner.plugin.dataset.DatasetSource"
_SOURCE = "runner.plugin.source.Source"


@dataclass(frozen=True)
class ClassDescription:
    """A class, according to its source code.

    Attributes:
        name: Name of the class.
        file: Path of its module.
        owners: By method, the class that defines it, with its module.
        abstract: Methods that are only declared.
    """

    name: str
    file: Path
    owners: dict[str, str]
    abstract: frozenset[str]

    def lacks(self, methods: Sequence[str]) -> str:
        """Returns a message that methods are missing."""
        names = ", ".join(f"'{name}'" for name in methods)
        plural = "s" if len(methods) > 1 else ""
        return f"{self} has no method{plural} {names}"

    def __str__(self) -> str:
        return f"class {self.name} in {shown_path(self.file)}"


def lacking(config: type[PluginConfig]) -> str | None:
    """Returns a message about missing methods of an implementation; None if it is
    complete or unreadable.

    A source that can draw declares that twice: by a method, and by the suffixes of
    files in its settings.
    """
    implementation = describe_implementation(config)
    if implementation is None:
        return None
    if implementation.abstract:
        return implementation.lacks(sorted(implementation.abstract))
    pictures = getattr(config, "pictures", None)
    renders = implementation.owners.get("render") != _SOURCE
    if pictures and not renders:
        declared = f"{config.__name__}.pictures contains {' and '.join(pictures)}"
        return f"{implementation.lacks(['render'])}, although {declared}"
    if pictures == () and renders:
        problem = f"{config.__name__}.pictures is empty"
        return f"{implementation} has the method 'render', and {problem}"
    return None


def unmeasured(model: type[PluginConfig], data: type[PluginConfig]) -> str | None:
    """Returns a message if a learner cannot be evaluated on the source's held-out
    batches; else None.
    """
    learner = describe_implementation(model)
    source = describe_implementation(data)
    if learner is None or source is None or learner.owners.get("metrics") != _LEARNER:
        return None
    if _DATASET not in (source.owners.get("evaluate"), source.owners.get("rehearse")):
        return None
    return f"{learner.lacks(['metrics'])}, with which {source.name} evaluates"


@cache
def describe_implementation(config: type[PluginConfig]) -> ClassDescription | None:
    """Returns the implementation of a config; None if it cannot be read."""
    implementation = config.implementation
    if isinstance(implementation, type):
        return describe_class(implementation)
    module = declaring_class(config).__module__
    module_name, name = split_name(implementation)
    try:
        if module_name:
            module = resolve_name(module_name, _package_of(module))
        return _class(module, name)
    # A class that is made at run time, a file that is gone, or code for another version of Python
    # is judged when it is imported.
    except (
        LookupError,
        OSError,
        TypeError,
        ValueError,
        SyntaxError,
        ImportError,
        RecursionError,
    ):
        return None


def declaring_class(config: type[PluginConfig]) -> type[Any]:
    """Returns the class that sets ``implementation``: relative names are those of its module."""
    return next(base for base in config.__mro__ if "implementation" in vars(base))


def split_name(implementation: str) -> tuple[str, str]:
    """Splits ``MODULE:CLASS``; the module is empty for a class in the module of the settings."""
    module_name, _, name = implementation.rpartition(":")
    return module_name, name


def _named(dotted: str, tree: ast.AST, module: str) -> ClassDescription:
    """Returns the class to which a name in a module refers.

    Args:
        dotted: The name, with dots if it is an attribute.
        tree: The part of the module in which it is used.
        module: Name of the module.

    Raises:
        LookupError: The class cannot be determined.
    """
    first, _, attribute = dotted.partition(".")
    target = _imports(tree, module).get(first)
    if target is not None:
        path = f"{target}.{attribute}".rstrip(".")
        module, _, dotted = path.rpartition(".")
    elif attribute:
        raise LookupError(dotted)
    return _class(module, dotted)


def _imports(tree: ast.AST, module: str) -> dict[str, str]:
    """Returns the targets of imported names, also of those that are imported only for
    annotations.
    """
    package = _package_of(module)
    targets = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                if alias.asname:
                    targets[alias.asname] = alias.name
                else:
                    targets[top] = top
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                targets[alias.asname or alias.name] = f"{base}.{alias.name}"
    return targets


def _package_of(module: str) -> str:
    """Returns the package to which relative imports in a module refer."""
    if hasattr(sys.modules.get(module), "__path__"):
        return module
    return module.rpartition(".")[0]


def _class(module: str, name: str) -> ClassDescription:
    """Returns a class of a module, from the module itself if it is imported already.

    Raises:
        LookupError: There is none that can be read.
    """
    if module in sys.modules:
        # Not by getattr, for which a module may import something.
        value = vars(sys.modules[module]).get(name)
        if isinstance(value, type):
            return describe_class(value)
    file, tree = _source(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_definition(node, file, tree, module)
    origin, _, original_name = _imports(tree, module)[name].rpartition(".")
    return _class(origin, original_name)


def _of_definition(
    node: ast.ClassDef, file: Path, tree: ast.AST, module: str
) -> ClassDescription:
    owners: dict[str, str] = {}
    abstract: set[str] = set()
    # A method of the first base precedes one of the second.
    for base in reversed(node.bases):
        expression = base.value if isinstance(base, ast.Subscript) else base
        inherited = _named(ast.unparse(expression), tree, module)
        owners |= inherited.owners
        abstract -= inherited.owners.keys()
        abstract |= inherited.abstract
    for statement in node.body:
        decorators = getattr(statement, "decorator_list", [])
        names = [ast.unparse(decorator) for decorator in decorators]
        is_abstract = any(name.endswith("abstractmethod") for name in names)
        for member in _bound(statement):
            owners[member] = f"{module}.{node.name}"
            abstract.discard(member)
            if is_abstract:
                abstract.add(member)
    return ClassDescription(node.name, file, owners, frozenset(abstract))


def describe_class(cls: type[Any]) -> ClassDescription:
    """Describes an imported class."""
    owners = {}
    for base in reversed(cls.__mro__):
        for name in vars(base):
            owners[name] = f"{base.__module__}.{base.__qualname__}"
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None) or cls.__module__
    abstract = frozenset(getattr(cls, "__abstractmethods__", ()))
    return ClassDescription(cls.__name__, Path(file), owners, abstract)


@cache
def _source(module: str) -> tuple[Path, ast.Module]:
    """Returns file and source of a module.

    Raises:
        LookupError: A package would have to be imported to find it.
    """
    package = module.rpartition(".")[0]
    if package and package not in sys.modules:
        raise LookupError(module)
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(module)
    file = Path(spec.origin)
    return file, ast.parse(file.read_text(encoding="utf-8"))


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yields the names that a statement in the body of a class binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    yield node.id
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
        if statement.value is not None and isinstance(target, ast.Name):
            yield target.id
