"""Descriptions of settings: the docstrings below the fields of their class."""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def setting_descriptions(config: type[BaseModel]) -> dict[str, str]:
    """Returns what the settings of a class mean; those without a text are missing.

    The source is read only here: pydantic would read it whenever a class is
    created, which takes an eighth of the time of a short command.
    """
    texts: dict[str, str] = {}
    for base in reversed(config.__mro__):
        # Modules of classes without settings, such as pydantic's, are not read.
        if inspect.get_annotations(base).keys() & config.model_fields.keys():
            texts |= _docstrings(base.__module__).get(base.__qualname__, {})
    described = {}
    for name, field in config.model_fields.items():
        text = field.description or texts.get(name)
        if text:
            described[name] = text
    return described


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings below annotated names, by qualified names of their classes.

    They are empty for a module without source, such as that of an interpreter.
    """
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    texts: dict[str, dict[str, str]] = {}
    scopes: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while scopes:
        prefix, scope = scopes.pop()
        for node in ast.iter_child_nodes(scope):
            match node:
                case ast.ClassDef():
                    texts[prefix + node.name] = _below_names(node)
                    scopes.append((f"{prefix}{node.name}.", node))
                case ast.FunctionDef():
                    scopes.append((f"{prefix}{node.name}.<locals>.", node))
                # Branches of an "if" or "try".
                case ast.stmt():
                    scopes.append((prefix, node))
    return texts


def _below_names(definition: ast.ClassDef) -> dict[str, str]:
    texts = {}
    for field, below in pairwise(definition.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = inspect.cleandoc(text)
    return texts
