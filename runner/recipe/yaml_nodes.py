"""Reads the YAML of recipes into nodes with their places."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from runner.recipe.scalars import Scalar, resolve
from runner.system.errors import DamagedError, ExitCode, UsageError
from runner.system.escapes import escape, escape_line
from runner.system.secrets import redact
from runner.system.suggestions import shown_path

SUFFIXES = (".yaml", ".yml")
"""Endings of the names of recipes and experiments."""
MAX_BYTES = 1_000_000
MAX_DEPTH = 32
# Aliases that are expanded can make a small file fill the memory.
MAX_NODES = 20_000
"""Largest number of keys and values, after the expansion of aliases; together they are within
``MAX_BYTES``.
"""
_LONGEST_EXCERPT = 120
"""Characters of a source line that are shown around the caret."""
_LONGEST_VALUE = 60
_NONFINITE = {"Infinity": ".inf", "-Infinity": "-.inf", "NaN": ".nan"}
"""Numbers in YAML that JSON does not have, by their spelling in Python's JSON."""
TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Place:
    """The place where a value was written.

    Attributes:
        source: A file, or the name of another origin (``OVERRIDE``, "default").
        line: Counted from 1; 0 for the entire source.
        column: Counted from 1, in characters.
        text: The complete line.
    """

    source: Path | str
    line: int = 0
    column: int = 0
    text: str = ""

    def __str__(self) -> str:
        if isinstance(self.source, str):
            return self.source
        path = escape_line(shown_path(self.source))
        return f"{path}:{self.line}:{self.column}" if self.line else path

    def cited(self) -> str:
        """The place in the middle of a sentence, where no excerpt follows."""
        return (
            f"{self} {self.text}"
            if isinstance(self.source, str) and self.text
            else str(self)
        )

    def excerpt(self) -> str:
        """The line and below it a caret; empty if the place has no line."""
        if not self.text.strip():
            return ""
        # The line is masked before it is cut, which could leave half of a secret, and escaped like
        # the printed text, so that the caret is below the place.
        text = escape(redact(self.text))
        text_before_column = escape(redact(self.text[: self.column - 1]))
        # Masking earlier text moves the column.
        column = min(len(text_before_column), len(text))
        start = 0
        if len(text) > _LONGEST_EXCERPT:
            start = max(0, column - _LONGEST_EXCERPT // 2)
        line = text[start : start + _LONGEST_EXCERPT].rstrip()
        # Tabs stay tabs, so that a terminal puts the caret below its character.
        margin = "".join(
            "\t" if character == "\t" else " " for character in text[start:column]
        )
        return f"    {line}\n    {margin}^"


MAPPING = "<mapping>"
"""The source of a mapping that a program passed instead of a file."""
DEFAULT = Place("default")
"""The origin of a default value."""
OVERRIDE = "override"
"""The source of an assignment of the command line."""


def is_lock(path: Path) -> bool:
    """Returns whether a file has the name of a lock, which contains its recipe under ``recipe``."""
    return path.name.endswith(".lock.yaml")


@dataclass(frozen=True)
class Problem:
    """A mistake in a recipe.

    Attributes:
        place: Where the value was written.
        path: Dotted path of the key; empty for the document.
        message: The problem and its fix.
    """

    place: Place
    path: str
    message: str

    def __str__(self) -> str:
        parts = (str(self.place), escape_line(self.path), self.message)
        first_line = ": ".join(filter(None, parts))
        return "\n".join(filter(None, (first_line, self.place.excerpt())))


class RecipeError(UsageError):
    """The mistakes in a recipe, without repetition and in the order of the files' lines."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        def sort_key(problem: Problem) -> tuple[bool, str, int, int]:
            position = problem.place
            return (
                isinstance(position.source, str),
                str(position.source),
                position.line,
                position.column,
            )

        self.problems = tuple(sorted(dict.fromkeys(problems), key=sort_key))
        super().__init__("\n".join(map(str, self.problems)))


class LockError(RecipeError):
    """The lock of a run is damaged, or the file is not a lock."""

    exit_code = ExitCode.NO_CHECKPOINT


@dataclass(frozen=True)
class Node:
    """A value of a document and where it was written.

    Attributes:
        value: A scalar, or the nodes of a mapping or a list.
        place: Place of the value.
        key: Place of its key, if it has one.
        leftover: Whether it was inherited from another kind; it is dropped if the new kind has no
            such key.
        spelled: A scalar as written in the document, with quotes and escapes.
        start: Index of its first character in the text.
    """

    value: "Scalar | dict[str, Node] | list[Node]"
    place: Place
    key: Place | None = None
    leftover: bool = False
    spelled: str = ""
    start: int = 0

    @property
    def children(self) -> "Mapping[Any, Node]":
        """Returns the children of a mapping or a list, by key or number; empty for a scalar."""
        if isinstance(self.value, dict):
            return self.value
        if isinstance(self.value, list):
            return dict(enumerate(self.value))
        return {}

    def plain(self) -> Any:
        """The value as plain dictionaries, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def get(self, *keys: str) -> "Node | None":
        """The value below these keys, or None if there is none."""
        node: Node | None = self
        for key in keys:
            if node is None:
                return None
            node = node.children.get(key)
        return node

    def items(self, *keys: str) -> "list[Node]":
        """The items of the list below these keys; none if there is none."""
        node = self.get(*keys)
        if node is None or not isinstance(node.value, list):
            return []
        return node.value

    @property
    def anchor(self) -> Place:
        """Returns the place to show for this value: its key if it has one."""
        return self.key or self.place

    def asked(self, path: str) -> Place:
        """Returns the place to show for a dotted path: its key, or the innermost section."""
        keys = path.split(".")
        for depth in range(len(keys), 0, -1):
            node = self.get(*keys[:depth])
            if node is not None:
                return node.anchor
        return self.place

    @property
    def shown(self) -> str:
        """The value as it would be written in a recipe, short enough for a message."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "nothing"

        if isinstance(self.value, str):
            return _shortened(f"'{escape_line(redact(self.value))}'")
        text = json.dumps(self.value)
        return _shortened(_NONFINITE.get(text, text))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def has_suffix(path: Path) -> bool:
    """Returns whether a file, and the target of a link, has a suffix of recipes and experiments."""
    return {path.suffix, path.resolve().suffix} <= set(SUFFIXES)


def read(path: Path, problems: list[Problem], quotes: bool = True) -> Node:
    """Reads a file that holds one YAML mapping; as ``parse``.

    Args:
        path: The file. A lock is a regular file, as the manifest next to it describes it if there
            is one.
        problems: Receives what is wrong without making the rest unreadable.
        quotes: Whether an error may quote lines of a file that holds no mapping. Of a file that is
            named otherwise than a recipe it never does, because it may be any file of this machine.

    Raises:
        RecipeError: The file cannot be read, or is none.
        LockError: The same of a lock.
    """
    try:
        text = _text(path)
        return _mapping(text, path, problems, quotes)
    except RecipeError as error:
        if is_lock(path):
            raise LockError(error.problems) from None
        raise


def _text(path: Path) -> str:
    def refusal(message: str) -> RecipeError:
        return RecipeError([Problem(Place(path), "", message)])

    try:
        if is_lock(path):
            # Only locks need this import.
            from runner.system.manifest import read_checked

            return read_checked(path, MAX_BYTES).decode("utf-8-sig")
        # A recipe may be a pipe: runner run <(COMMAND).
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise refusal(f"is larger than {MAX_BYTES:,} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        message = (
            "is a folder, not a file"
            if path.is_dir()
            else f"cannot be read: {error.strerror or error}"
        )
        raise refusal(message) from None
    except UnicodeDecodeError as error:
        raise refusal(f"is not UTF-8 text (byte {error.start})") from None
    except DamagedError as error:
        raise refusal(str(error).removeprefix(f"{path}: ")) from None


def _mapping(text: str, path: Path, problems: list[Problem], quotes: bool) -> Node:
    try:
        node = parse(text, path, problems)
        if node.value is None:
            raise RecipeError([Problem(Place(path), "", "is empty")])
        if not isinstance(node.value, dict):
            raise RecipeError(
                [Problem(node.place, "", "a recipe is a mapping of keys to values")]
            )
    except RecipeError as error:
        if quotes and has_suffix(path):
            raise
        position = replace(error.problems[-1].place, text="")
        raise RecipeError(
            [Problem(position, "", "is not a YAML mapping, so it is not a recipe")]
        ) from None
    return node


def parse(
    text: str, source: Path | str, problems: list[Problem], shown: str | None = None
) -> Node:
    """Parses one YAML document; a ``RecipeError`` if it is none, holds more than plain values, or
    exceeds a limit.

    ``problems`` receives what is wrong without making the rest unreadable: duplicate and merge
    keys. Errors quote ``shown`` instead of the text, column for column.
    """
    try:
        reader = _Reader(text, source, problems, shown or text)
        root = _composed(text, reader)
    except yaml.reader.ReaderError as error:
        preceding_lines = text[: error.position].split("\n")
        position = Place(source, len(preceding_lines), len(preceding_lines[-1]) + 1)
        message = f"invalid YAML: character U+{error.character:04X} is not allowed"
        raise RecipeError([*problems, Problem(position, "", message)]) from None
    except yaml.MarkedYAMLError as error:
        message = f"invalid YAML: {error.problem or error.context}"
        if error.problem and error.context and error.context_mark:
            message += (
                f" ({error.context} that starts on line {error.context_mark.line + 1})"
            )
        reader.fail(error.problem_mark or error.context_mark, message)
    return Node(None, Place(source)) if root is None else reader.node(root, None, ())


def _composed(text: str, reader: "_Reader") -> Any:
    """Returns PyYAML's nodes of a text; a command reads the lock of its run several times.

    Raises:
        RecipeError: The document exceeds a limit; with the source of this reader.
    """
    try:
        return _compose(text)
    except RecipeError:
        return reader.get_single_node()


@lru_cache(maxsize=64)
def _compose(text: str) -> Any:
    return _Reader(text, "", [], text).get_single_node()


class _Reader(yaml.SafeLoader):
    """PyYAML's parser without its idea of types, that stops as soon as a document is too deep or
    too long.
    """

    def __init__(
        self, text: str, source: Path | str, problems: list[Problem], shown: str
    ) -> None:
        self.source = source
        self.problems = problems
        self.text = text
        self.lines = shown.splitlines()
        self.depth = 0
        # Nodes are counted before and after the expansion of aliases: both can be too many.
        self.composed = 0
        self.count = 0
        self.characters = 0
        # The identities of the nodes around the present one: an alias may refer to one of them.
        self.open: set[int] = set()
        super().__init__(text)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """Returns a non-specific tag of YAML: ``?`` for plain values, ``!`` for quoted text."""
        return "?" if kind is not yaml.ScalarNode or implicit[0] else "!"

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        self.composed += 1
        too_long = self.composed > MAX_NODES
        if too_long or self.depth > MAX_DEPTH + 1:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            self._refuse_size(event.start_mark, too_long)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def node(self, node: Any, key: Place | None, path: tuple[str, ...]) -> Node:
        """Converts a node of PyYAML, with aliases expanded."""
        mark = node.start_mark
        is_scalar = isinstance(node, yaml.ScalarNode)
        self.count += 1
        self.characters += len(node.value) if is_scalar else 0
        too_long = self.count > MAX_NODES or self.characters > MAX_BYTES
        if too_long or len(path) > MAX_DEPTH:
            self._refuse_size(mark, too_long)
        if id(node) in self.open:
            self.fail(mark, "an alias that contains itself")
        if node.tag not in ("?", "!"):
            tag = node.tag.replace(TAG, "!!")
            self.fail(
                mark, f"tag '{tag}' is not allowed: a recipe holds plain values only"
            )
        if is_scalar:
            return self._scalar(node, key)

        self.open.add(id(node))
        children: list[Node] | dict[str, Node]
        if isinstance(node, yaml.MappingNode):
            children = self._mapping(node, path)
        else:
            children = [
                self.node(item, None, (*path, str(index)))
                for index, item in enumerate(node.value)
            ]
        self.open.discard(id(node))
        return Node(children, self._place(mark), key)

    def _scalar(self, node: yaml.ScalarNode, key: Place | None) -> Node:
        mark = node.start_mark
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            self.fail(mark, "half of a surrogate pair is not a character")
        value = resolve(node.value) if node.tag == "?" else str(node.value)
        # The mark of an anchored scalar is at its anchor, which is not part of the value.
        source = self.text[mark.index : node.end_mark.index]
        anchored = source.rstrip(" \t\r\n\x85\u2028\u2029")
        spelled = re.sub(r"^&\S+\s+", "", anchored)
        start = mark.index + len(anchored) - len(spelled)
        return Node(value, self._place(mark), key, spelled=spelled, start=start)

    def _mapping(
        self, node: yaml.MappingNode, path: tuple[str, ...]
    ) -> dict[str, Node]:
        value: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.fail(key_node.start_mark, "a key must be a word")
            # A key is a node, which counts for the limits.
            self.node(key_node, None, path)
            key = key_node.value
            position = self._place(key_node.start_mark)
            child = self.node(value_node, position, (*path, key))
            dotted = ".".join((*path, key))
            if key == "<<" and key_node.tag == "?":
                self.problems.append(
                    Problem(
                        position,
                        dotted,
                        "merge keys are not part of YAML 1.2 - use 'extends'",
                    )
                )
            elif key in value:
                first = value[key].anchor.line
                self.problems.append(
                    Problem(
                        position,
                        dotted,
                        f"duplicate key - the first is on line {first}",
                    )
                )
            else:
                value[key] = child
        return value

    def _place(self, mark: Any) -> Place:
        text = self.lines[mark.line] if mark.line < len(self.lines) else ""
        return Place(self.source, mark.line + 1, mark.column + 1, text)

    def _refuse_size(self, mark: Any, too_long: bool) -> NoReturn:
        if too_long:
            size = f"{MAX_NODES:,} keys and values, or {MAX_BYTES:,} characters"
            self.fail(mark, f"has more than {size}, aliases expanded")
        self.fail(mark, f"is nested deeper than {MAX_DEPTH} levels")

    def fail(self, mark: Any, message: str) -> NoReturn:
        """Gives the document up."""
        raise RecipeError(
            [*self.problems, Problem(self._place(mark), "", message)]
        ) from None
