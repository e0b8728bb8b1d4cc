"""Small changes of a source file, one at a time, as a hand that slips makes them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.MatMult: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
TRANSPARENT = ("detach", "clone", "contiguous", "abs", "exp", "mean", "sum", "square", "sqrt", "clamp", "flatten")
"""Methods that a change leaves out: the value is then what they were asked of."""
SAYING = ("note", "warning", "debug", "UsageError", "ValueError", "TypeError", "RuntimeError")
"""Calls whose arguments are words for a person."""

NOT_ITS_OWN = ("annotation", "returns", "decorator_list", "body", "orelse", "finalbody", "handlers")
"""Parts of a statement that are others, or words."""


class Change(NamedTuple):
    """One of them."""

    function: str  # the qualified name; the line of a change would differ after every edit above it
    line: int
    first: int  # the lines of the statement it is in, by which one sees whether it is run
    last: int
    what: str


class _Site(NamedTuple):
    owner: ast.AST
    field: str
    index: int | None

    def put(self, value: Any) -> None:
        """Puts another node there."""
        if self.index is None:
            setattr(self.owner, self.field, value)
        else:
            getattr(self.owner, self.field)[self.index] = value


def functions(tree: ast.Module, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods whose qualified name is wanted, with it; those inside of others belong to them."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and wanted(prefix + node.name):
                yield prefix + node.name, node

    return inside(tree.body, "")


def changes(tree: ast.Module, wanted: Callable[[str], bool]) -> Iterator[Change]:
    """Makes each change in the tree; it is there until the next one is asked for."""
    seen: Counter[tuple[str, str]] = Counter()
    for name, function in functions(tree, wanted):
        for change in _of_decorators(function):
            yield _numbered(name, change, seen)
        for change in _of_body(function, function):
            yield _numbered(name, change, seen)


def _numbered(function: str, change: Change, seen: Counter[tuple[str, str]]) -> Change:
    """Returns a change with its function, and with a number unless it is the first of its kind there."""
    seen[function, change.what] += 1
    count = seen[function, change.what]
    what = change.what if count == 1 else f"{change.what} ({count})"
    return change._replace(function=function, what=what)


def _of_decorators(function: ast.FunctionDef) -> Iterator[Change]:
    for decorator in list(function.decorator_list):
        text = ast.unparse(decorator)
        if text not in ("staticmethod", "classmethod", "property", "contextmanager"):
            function.decorator_list.remove(decorator)
            yield Change("", decorator.lineno, function.body[0].lineno, function.body[-1].lineno, f"without @{text}")
            function.decorator_list.insert(0, decorator)


def _of_body(owner: ast.AST, function: ast.FunctionDef) -> Iterator[Change]:
    for field in ("body", "orelse", "finalbody"):
        for index, statement in enumerate(getattr(owner, field, ())):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if isinstance(statement, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert | ast.Pass):
                continue
            site = _Site(owner, field, index)
            yield from _of_statement(site, statement)
            for site in _expressions(statement):
                yield from _of_expression(site, statement)
            if isinstance(statement, ast.FunctionDef):
                yield from _of_decorators(statement)
            yield from _of_body(statement, function)


def _said(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    name = getattr(value, "func", None)
    return isinstance(statement, ast.Expr) and getattr(name, "attr", getattr(name, "id", "")) in SAYING


def _change(node: ast.AST, statement: ast.stmt, what: str) -> Change:
    head = statement.body[0].lineno - 1 if isinstance(getattr(statement, "body", None), list) else statement.end_lineno
    if isinstance(statement, ast.FunctionDef):
        return Change("", node.lineno, statement.body[0].lineno, statement.end_lineno or 0, what)
    return Change("", node.lineno, statement.lineno, max(statement.lineno, head or 0), what)


def _of_statement(site: _Site, statement: ast.stmt) -> Iterator[Change]:
    if isinstance(statement, ast.FunctionDef) or _said(statement):
        return
    shown = ast.unparse(statement).partition("\n")[0][:90]
    if isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Continue | ast.Break):
        yield from _put(site, ast.Pass(), statement, statement, f"without `{shown}`")
    elif isinstance(statement, ast.With | ast.Try):
        one = ast.If(ast.Constant(True), statement.body, [])
        yield from _put(site, one, statement, statement, f"without `{shown}` around it")
    elif isinstance(statement, ast.Return) and statement.value is not None:
        value = statement.value
        if isinstance(value, ast.Tuple) and len(value.elts) == 2:
            swapped = ast.Return(ast.Tuple(value.elts[::-1], ast.Load()))
            yield from _put(site, swapped, statement, statement, f"`{shown}` the other way round")
        if isinstance(value, ast.Dict):
            for number, key in enumerate(value.keys):
                rest = [(k, v) for i, (k, v) in enumerate(zip(value.keys, value.values, strict=True)) if i != number]
                less = ast.Return(ast.Dict([k for k, _ in rest], [v for _, v in rest]))
                yield from _put(site, less, value.values[number], statement, f"returned without {_text(key)}")


def _expressions(statement: ast.stmt) -> Iterator[_Site]:
    """Every expression of a statement itself, without those of the statements inside it, annotations and words."""

    def inside(owner: ast.AST) -> Iterator[_Site]:
        for field, value in ast.iter_fields(owner):
            if field in NOT_ITS_OWN and not (isinstance(owner, ast.Lambda | ast.IfExp) and field in ("body", "orelse")):
                continue
            values = value if isinstance(value, list) else [value]
            for index, each in enumerate(values):
                if isinstance(each, ast.expr | ast.comprehension | ast.keyword | ast.withitem | ast.arguments):
                    if isinstance(each, ast.expr):
                        yield _Site(owner, field, index if isinstance(value, list) else None)
                    name = getattr(getattr(each, "func", None), "attr", getattr(getattr(each, "func", None), "id", ""))
                    if not isinstance(each, ast.JoinedStr) and name not in SAYING:
                        yield from inside(each)

    if not _said(statement):
        yield from inside(statement)


def _text(node: ast.AST | None) -> str:
    return "**" if node is None else ast.unparse(node)


def _of_expression(site: _Site, statement: ast.stmt) -> Iterator[Change]:
    node = getattr(site.owner, site.field)
    node = node if site.index is None else node[site.index]
    for new in _instead(node, site):
        old, text = _text(node), _text(new)
        yield from _put(site, new, node, statement, f"`{old[:70]}` to `{text[:70]}`")


def _put(site: _Site, new: ast.AST, node: ast.AST, statement: ast.stmt, what: str) -> Iterator[Change]:
    old = getattr(site.owner, site.field)
    old = old if site.index is None else old[site.index]
    site.put(ast.fix_missing_locations(ast.copy_location(new, node)))
    yield _change(node, statement, what)
    site.put(old)


def _instead(node: ast.expr, site: _Site) -> Iterator[ast.expr]:
    """What may stand in place of an expression."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant):
        yield from _constants(node.value)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    if site.field == "test" and not isinstance(node, ast.Compare | ast.UnaryOp):
        yield ast.UnaryOp(ast.Not(), node)


def _constants(value: Any) -> Iterator[ast.expr]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
        yield ast.Constant(0 if value else -1)


def _calls(node: ast.Call) -> Iterator[ast.expr]:
    plain = [each for each in node.args if not isinstance(each, ast.Starred)]
    if len(node.args) >= 2 and len(plain) == len(node.args):
        yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
    for number in range(len(node.keywords)):
        yield ast.Call(node.func, node.args, [each for i, each in enumerate(node.keywords) if i != number])
    if isinstance(node.func, ast.Attribute) and node.func.attr in TRANSPARENT:
        yield node.func.value
