"""Measures the language of code and documents: names, sentences and density.

python tests/language.py                    # all figures beside their limits
python tests/language.py --worst docs       # the places behind the figures of one package
python tests/language.py --lower            # lowers the limits to today's figures
"""

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_suffix(".json")

VAGUE_NAMES = {
    "above", "after", "again", "alike", "among", "anew", "apart", "asked", "before", "began",
    "begun", "below", "beside", "beyond", "both", "chosen", "drawn", "each", "ended", "found",
    "given", "here", "inside", "kept", "known", "learnt", "left", "made", "mine", "now", "one",
    "other", "others", "outside", "own", "part", "parted", "place", "rest", "said", "shown",
    "since", "taken", "theirs", "there", "together", "told", "turn", "wanted", "what", "when",
    "where", "who", "whole", "whose", "why",
}  # fmt: skip
"""Pronouns, participles and adverbs: they do not name the value that a variable holds."""

WORDS = {
    "anew", "anybody", "apart", "ask", "asked", "asking", "asks", "began", "begin", "begins",
    "begun", "beside", "everybody", "hardly", "know", "knows", "lack", "lacking", "lacks",
    "learnt", "mostly", "nobody", "own", "perhaps", "said", "say", "says", "seldom", "somebody",
    "stand", "stands", "stood", "tell", "tells", "told", "untold", "who", "whoever", "whole",
    "whom",
}  # fmt: skip
"""Words that technical English replaces: CONTRIBUTING.md has a table of replacements."""

EXPRESSIONS = re.compile(
    r"""
    \b(?: (?:go|goes|going|went|gone)[ ]on
        | (?:come|comes|came)[ ]to\b(?![ ]be)
        | so[ ](?:many|long|often|much)
        | (?:all|nothing|none)[ ]but | but[ ]for | no[ ].{1,30}[ ]but
        | of[ ](?:which|whom|what|those)
        | for[ ]want[ ]of | sees?[ ]to | in[ ]vain | by[ ]chance | at[ ]once
        | takes?[ ]hold | slots?[ ].{0,20}holds?
        | (?:is|are|was|were|be)[ ]no[ ][a-z]+
      )\b
    | ^What[ ](?!if) | ^As[ ]``
    """,
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
"""Expressions of several words that technical English replaces."""

FRAGMENT = re.compile(
    r"""
    (?: of|in|on|at|by|for|from|to|with|without|under|over|before|after|between|beside|as
      | what|who|whose|where|when|whether|how|which|that|this|these|those|it|its
      | nothing|nobody|everything|none|all|each|one|another|more|the[ ]same|told|asked|seen|made|kept
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
"""Beginnings of docstrings that are not sentences and do not stand alone."""

SCALES = {
    "names": 100,
    "docstrings": 1000,
    "comments": 1000,
    "messages": 1000,
    "documents": 1000,
    "fragments": 100,
    "density": 1,
    "parallel": 1000,
}
"""By kind of figure, the number of units to which a count is related.

names: vague names in 100 assignments. docstrings, comments, messages, documents: phrases in 1,000 words.
fragments: docstrings of 100. density: tokens in a line of code. parallel: ``a, b = x, y`` in 1,000 lines.
"""

GOALS = {
    "names": 1.0,
    "docstrings": 3.0,
    "comments": 3.0,
    "messages": 3.0,
    "documents": 3.0,
    "fragments": 3.0,
    "density": 8.5,
    "parallel": 2.0,
}
"""The limit of a new package, and the figure at which a limit need not fall further."""

Limits = dict[str, dict[str, float]]


@dataclass
class Figure:
    """Occurrences of something in a number of units."""

    kind: str
    count: int = 0
    size: int = 0

    @property
    def rate(self) -> float:
        return SCALES[self.kind] * self.count / max(1, self.size)

    @property
    def one_occurrence(self) -> float:
        return SCALES[self.kind] / max(1, self.size)

    def add(self, count: int, size: int) -> None:
        self.count += count
        self.size += size


@dataclass(frozen=True)
class SourceFile:
    """A Python file and what can be counted in it."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    def names(self) -> Iterator[tuple[int, str]]:
        """Line and name of every assignment."""
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id

    def docstrings(self) -> Iterator[tuple[int, str]]:
        """Line and text of every docstring, of those below an attribute as well."""
        for node in self.nodes:
            constant = node.value if isinstance(node, ast.Expr) else None
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                yield node.lineno, constant.value

    def summaries(self) -> Iterator[tuple[int, str]]:
        """Line and text of the docstrings of modules, classes and functions."""
        for node in self.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield node.body[0].lineno, docstring

    def comments(self) -> Iterator[tuple[int, str]]:
        for token in self.tokens:
            if token.type == tokenize.COMMENT and not re.search(r"noqa|type:|fmt:", token.string):
                yield token.start[0], token.string.lstrip("# ")

    def messages(self) -> Iterator[tuple[int, str]]:
        """Line and text of every string with words in it that is not a docstring."""
        docstring_lines = {line for line, _ in self.docstrings()}
        for node in self.nodes:
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            has_words = re.search(r"[a-z]{3}.* | .*[a-z]{3}", node.value)
            if has_words and node.lineno not in docstring_lines:
                yield node.lineno, node.value

    def parallel_assignments(self) -> Iterator[int]:
        for node in self.nodes:
            is_tuple = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            if is_tuple and isinstance(node.targets[0], ast.Tuple):
                yield node.lineno

    def code_tokens(self) -> list[int]:
        """Returns the line of every name, operator and number."""
        return [token.start[0] for token in self.tokens if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)]


def phrases(text: str) -> list[str]:
    """Returns the words and expressions in a text that technical English replaces."""
    words = [word for word in re.findall(r"[a-z]+", text.lower()) if word in WORDS]
    return words + [match.group().lower() for match in EXPRESSIONS.finditer(text)]


def prose_of(document: Path) -> str:
    """Returns a page with its code blanked, so that line numbers stay."""
    text = document.read_text(encoding="utf-8")
    code = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
    return code.sub(lambda match: "`code`" + "\n" * match.group().count("\n"), text)


def sources() -> dict[str, list[Path]]:
    """Returns the Python files of every package; modules directly in ``runner`` are the package ``runner``."""
    packages: dict[str, list[Path]] = {}
    for path in sorted([*(ROOT / "runner").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]):
        folders = path.relative_to(ROOT).parts[:-1]
        packages.setdefault("/".join(folders[:2]), []).append(path)
    return packages


def documents() -> dict[str, list[Path]]:
    """Returns the pages of every group: one group for each page at the top, one for each folder."""
    groups = {path.name: [path] for path in sorted(ROOT.glob("*.md"))}
    for name in ("docs", "experiments"):
        groups[name] = sorted((ROOT / name).rglob("*.md"))
    return groups


def measure_source(source: SourceFile, figures: dict[str, Figure]) -> None:
    """Adds the counts of one file."""
    names = [name for _, name in source.names()]
    figures["names"].add(sum(name in VAGUE_NAMES for name in names), len(names))

    for kind in ("docstrings", "comments", "messages"):
        for _, text in getattr(source, kind)():
            figures[kind].add(len(phrases(text)), len(text.split()))
    summaries = [text for _, text in source.summaries()]
    figures["fragments"].add(sum(bool(FRAGMENT.match(text)) for text in summaries), len(summaries))

    code = source.code_tokens()
    line_count = len(set(code))
    figures["density"].add(len(code), line_count)
    figures["parallel"].add(len(list(source.parallel_assignments())), line_count)


def measure() -> dict[str, dict[str, Figure]]:
    """Returns all figures, by package or group of documents and by kind."""
    figures: dict[str, dict[str, Figure]] = {}
    for package, paths in sources().items():
        figures[package] = {kind: Figure(kind) for kind in SCALES if kind != "documents"}
        for path in paths:
            measure_source(SourceFile(path), figures[package])
    for group, paths in documents().items():
        figures[group] = {"documents": Figure("documents")}
        for path in paths:
            text = prose_of(path)
            figures[group]["documents"].add(len(phrases(text)), len(text.split()))
    return figures


def occurrences(package: str) -> Iterator[tuple[str, str]]:
    """Place and text of everything that the figures of a package count."""
    for path in documents().get(package, []):
        for number, line in enumerate(prose_of(path).splitlines(), 1):
            for phrase in phrases(line):
                yield f"{path.relative_to(ROOT)}:{number}", phrase
    for path in sources().get(package, []):
        source = SourceFile(path)
        name = path.relative_to(ROOT)
        for number, variable in source.names():
            if variable in VAGUE_NAMES:
                yield f"{name}:{number}", f"variable {variable}"
        for kind in ("docstrings", "comments", "messages"):
            for number, text in getattr(source, kind)():
                for phrase in phrases(text):
                    yield f"{name}:{number}", phrase
        for number, text in source.summaries():
            if FRAGMENT.match(text):
                yield f"{name}:{number}", f"fragment: {text.splitlines()[0]}"
        for number in source.parallel_assignments():
            yield f"{name}:{number}", "parallel assignment"


def read_limits() -> Limits:
    limits: Limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    return limits


def limit_of(limits: Limits, package: str, kind: str) -> float:
    """Returns the limit of a figure; the file contains those above the goal."""
    return limits.get(package, {}).get(kind, GOALS[kind])


def lowered(figures: dict[str, dict[str, Figure]], limits: Limits) -> Limits:
    """Returns limits that follow today's figures down to the goals, without packages that are gone."""
    result: Limits = {}
    for package, kinds in figures.items():
        for kind, figure in kinds.items():
            limit = min(round(figure.rate, 1), limit_of(limits, package, kind))
            if limit > GOALS[kind]:
                result.setdefault(package, {})[kind] = limit
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", metavar="PACKAGE", help="list what the figures of this package count")
    parser.add_argument("--lower", action="store_true", help="lower the limits to today's figures")
    options = parser.parse_args()
    if options.worst:
        places = list(occurrences(options.worst))
        for place, text in places:
            print(f"{place}: {text}")
        print(Counter(text for _, text in places).most_common(20))
        return

    figures = measure()
    limits = read_limits()
    if options.lower:
        limits = lowered(figures, limits)
        LIMITS.write_text(json.dumps(limits, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for package, kinds in figures.items():
        columns = [f"{kind} {figure.rate:.1f} ({limit_of(limits, package, kind)})" for kind, figure in kinds.items()]
        print(f"{package:22} {'  '.join(columns)}")


if __name__ == "__main__":
    main()
