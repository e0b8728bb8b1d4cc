"""YAML as recipes use it: read into nodes that know their place, and written so that it reads back."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from runner.system.errors import UsageError
from runner.system.names import shown_path
from runner.system.secrets import redact

_EXCERPT = 120
"""Characters of a source line that are shown around the caret."""


@dataclass(frozen=True)
class Place:
    """Where a value was written."""

    source: Path | str
    """A file; or, for what stands in no file, its name (``--set #1``, ``default``)."""
    line: int = 0
    """Counted from 1; 0 if the place is the source as a whole."""
    column: int = 0
    """Counted from 1, in characters."""
    text: str = ""
    """The whole line."""

    def __str__(self) -> str:
        if isinstance(self.source, str):
            return self.source
        return f"{shown_path(self.source)}:{self.line}:{self.column}" if self.line else shown_path(self.source)

    def cited(self) -> str:
        """The place in the middle of a sentence, where no excerpt follows."""
        return f"{self} {self.text}" if isinstance(self.source, str) and self.text else str(self)

    def excerpt(self) -> str:
        """The line and below it a caret; empty if the place has no line."""
        if not self.text.strip():
            return ""
        text, before = redact(self.text), redact(self.text[: self.column - 1])  # before a cut hides half of one
        column = min(len(before), len(text))  # what is masked before it moves it
        start = max(0, column - _EXCERPT // 2) if len(text) > _EXCERPT else 0
        line = text[start : start + _EXCERPT].rstrip()
        # Tabs stay tabs, so that the caret stands where a terminal puts the character above it.
        margin = "".join("\t" if character == "\t" else " " for character in text[start:column])
        return f"    {line}\n    {margin}^"


DEFAULT = Place("default")
"""The origin of a value that nobody wrote."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a recipe."""

    place: Place
    path: str
    """Dotted path of the key; empty for the document as a whole."""
    message: str

    def __str__(self) -> str:
        headline = ": ".join(part for part in (str(self.place), self.path, self.message) if part)
        return "\n".join(part for part in (headline, self.place.excerpt()) if part)


class RecipeError(UsageError):
    """Everything that is wrong with a recipe, in the order of the files' lines."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(dict.fromkeys(problems), key=_position))
        super().__init__("\n".join(map(str, self.problems)))


def _position(problem: Problem) -> tuple[bool, str, int, int]:
    place = problem.place
    return isinstance(place.source, str), str(place.source), place.line, place.column


Scalar = bool | int | float | str | None

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_DECIMAL = re.compile(rf"[-+]?{_DIGITS}")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(?:inf|Inf|INF)")
_NAN = re.compile(r"\.(?:nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_LONGEST_NUMBER = 64
"""Characters; a longer run of digits is text, because reading it would take quadratic time."""


def resolve(text: str) -> Scalar:
    """The value of an unquoted scalar by the core schema of YAML 1.2.

    ``1e-3`` is a number and ``on``, ``off``, ``yes``, ``no`` are text. Beyond the schema, digits may be grouped by
    underscores (``60_000``). A number too large for a float is text.
    """
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return int(text, base=0)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", ""))
    return math.nan if _NAN.fullmatch(text) else text


class _Dumper(yaml.SafeDumper):
    """Quotes what ``resolve`` would not read back as text, and nothing else."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _TAGS[type(resolve(value))]
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def represent_str(self, data: str) -> Any:
        # Line breaks beyond ASCII survive in double quotes only, and these two words mean something to YAML.
        special = data in ("<<", "=") or any(character in data for character in "\x85\u2028\u2029")
        style = '"' if special else None
        return self.represent_scalar(_TAGS[str], data, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_TAGS: dict[type, str] = {
    type(None): "tag:yaml.org,2002:null",
    bool: "tag:yaml.org,2002:bool",
    int: "tag:yaml.org,2002:int",
    float: "tag:yaml.org,2002:float",
    str: "tag:yaml.org,2002:str",
}


_Dumper.add_representer(str, _Dumper.represent_str)


def dump(values: Any) -> str:
    """Plain values as a YAML document that reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def dump_inline(value: Any) -> str:
    """A plain value as YAML on one line."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Keys and values of a document after its aliases have been expanded; all of them together within ``MAX_BYTES``."""

_BLANK = " \t\r\n\x85\u2028\u2029"
_ANCHOR = re.compile(r"^&\S+\s+")
_TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels"
_TOO_LONG = f"has more than {MAX_NODES:,} keys and values, or {MAX_BYTES:,} characters, aliases expanded"


@dataclass(frozen=True)
class Node:
    """A value of a document and where it was written."""

    value: "Scalar | dict[str, Node] | list[Node]"
    place: Place
    key: Place | None = None
    """Where the key of this value stands, if it has one."""
    leftover: bool = False
    """Inherited from a recipe whose section was of another kind; dropped if the new kind does not know it."""
    spelled: str = ""
    """A scalar as it stands in the document, with quotes and escapes."""

    def plain(self) -> Any:
        """The value as plain dictionaries, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def get(self, key: str) -> "Node | None":
        """The value of a key, or None if this is no mapping or the key is not there."""
        return self.value.get(key) if isinstance(self.value, dict) else None

    @property
    def anchor(self) -> Place:
        """Where a person would look for the value: at its key."""
        return self.key or self.place


def read(path: Path, problems: list[Problem]) -> Node:
    """Reads a file that holds one YAML mapping.

    Args:
        path: the file.
        problems: receives what is wrong without making the rest unreadable (duplicate keys).

    Raises:
        RecipeError: the file cannot be read, or is not one YAML mapping within the limits.
    """
    whole = Place(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        message = "is a folder, not a file" if path.is_dir() else f"cannot be read: {error.strerror or error}"
        raise RecipeError([Problem(whole, "", message)]) from None
    if len(data) > MAX_BYTES:
        raise RecipeError([Problem(whole, "", f"is larger than {MAX_BYTES:,} bytes")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError([Problem(whole, "", f"is not UTF-8 text (byte {error.start})")]) from None
    node = parse(text, path, problems)
    if node.value is None:
        raise RecipeError([Problem(whole, "", "is empty")])
    if not isinstance(node.value, dict):
        raise RecipeError([Problem(node.place, "", "a recipe is a mapping of keys to values")])
    return node


def parse(text: str, source: Path | str, problems: list[Problem], shown: str | None = None) -> Node:
    """Parses one YAML document.

    Args:
        text: the document.
        source: the file, or the name under which errors show it.
        problems: receives duplicate and merge keys.
        shown: what errors quote instead of the text, column for column.

    Raises:
        RecipeError: not YAML, not plain values, or beyond a limit.
    """
    return _Reader(text, source, problems, shown or text).document()


class _LimitError(yaml.MarkedYAMLError):
    """A document that is YAML, but more than a recipe needs."""


class _Composer(yaml.SafeLoader):
    """PyYAML's parser without its idea of types, that stops as soon as a document is too deep or too long."""

    depth = 0
    count = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """The non-specific tags of YAML: ``?`` for what is left to resolve, ``!`` for quoted text."""
        return "?" if kind is not yaml.ScalarNode or implicit[0] else "!"

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        self.count += 1
        if self.depth > MAX_DEPTH + 1 or self.count > MAX_NODES:  # the document itself is no level
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _LimitError(problem=_TOO_LONG if self.count > MAX_NODES else _TOO_DEEP, problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Reader:
    """Turns one document into nodes."""

    def __init__(self, text: str, source: Path | str, problems: list[Problem], shown: str) -> None:
        self.text = text
        self.lines = shown.splitlines()
        self.source = source
        self.problems = problems
        self.count = 0
        self.characters = 0
        self.open: set[int] = set()

    def document(self) -> Node:
        try:
            composer = _Composer(self.text)
            root = composer.get_single_node()
        except yaml.MarkedYAMLError as error:
            self._fail(self._place(error.problem_mark or error.context_mark), _explain(error))
        except yaml.reader.ReaderError as error:
            before = self.text[: error.position].split("\n")
            place = Place(self.source, len(before), len(before[-1]) + 1)
            self._fail(place, f"invalid YAML: character U+{error.character:04X} is not allowed")
        return Node(None, Place(self.source)) if root is None else self._node(root, None, ())

    def _node(self, node: yaml.Node, key: Place | None, path: tuple[str, ...]) -> Node:
        place = self._place(node.start_mark)
        self.count += 1
        self.characters += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        if self.count > MAX_NODES or self.characters > MAX_BYTES:
            self._fail(place, _TOO_LONG)
        if len(path) > MAX_DEPTH:
            self._fail(place, _TOO_DEEP)
        if id(node) in self.open:
            self._fail(place, "an alias that contains itself")
        if node.tag not in ("?", "!"):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._fail(place, f"tag '{tag}' is not allowed: a recipe holds plain values only")
        if isinstance(node, yaml.ScalarNode):
            spelled = _ANCHOR.sub("", self.text[node.start_mark.index : node.end_mark.index].rstrip(_BLANK))
            return Node(self._scalar(node, place), place, key, spelled=spelled)
        self.open.add(id(node))
        value = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        self.open.discard(id(node))
        return Node(value, place, key)

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> Scalar:
        if not node.value.isascii() and any("\ud800" <= character <= "\udfff" for character in node.value):
            self._fail(place, "half of a surrogate pair is not a character")
        return resolve(node.value) if node.tag == "?" else str(node.value)

    def _sequence(self, node: Any, path: tuple[str, ...]) -> list[Node]:
        return [self._node(item, None, (*path, str(index))) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Node]:
        value: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self._fail(place, "a key must be a word")
            self._node(key_node, None, path)
            key = key_node.value
            dotted = ".".join((*path, key))
            child = self._node(value_node, place, (*path, key))
            if key == "<<" and key_node.tag == "?":
                self.problems.append(Problem(place, dotted, "merge keys are not part of YAML 1.2 - use 'extends'"))
            elif key in value:
                first = value[key].anchor
                self.problems.append(Problem(place, dotted, f"duplicate key - the first is on line {first.line}"))
            else:
                value[key] = child
        return value

    def _place(self, mark: Any) -> Place:
        text = self.lines[mark.line] if mark.line < len(self.lines) else ""
        return Place(self.source, mark.line + 1, mark.column + 1, text)

    def _fail(self, place: Place, message: str) -> NoReturn:
        raise RecipeError([*self.problems, Problem(place, "", message)])


def _explain(error: yaml.MarkedYAMLError) -> str:
    if isinstance(error, _LimitError):
        return str(error.problem)
    message = f"invalid YAML: {error.problem or error.context}"
    if error.problem and error.context and error.context_mark:
        message += f" ({error.context} that starts on line {error.context_mark.line + 1})"
    return message
