"""The language of code and documents may only become plainer: each figure has a limit that may only fall."""

import language
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language import Figure, SourceFile

TOLERANCE = 0.06
"""Share of a limit by which a figure may exceed it: every change moves a rate a little."""
MARGIN = 0.25
"""Share of a limit that a figure may be better before the limit has to follow."""


@pytest.fixture(scope="module")
def figures():
    return language.measure()


def exceeds(figure, limit):
    return figure.rate > limit + max(TOLERANCE * limit, 1.05 * figure.one_occurrence)


def is_stale(figure, limit):
    return limit > language.GOALS[figure.kind] and figure.rate < limit - max(MARGIN * limit, 3 * figure.one_occurrence)


def compared(figures):
    """Package, figure and limit of everything that is measured."""
    limits = language.read_limits()
    for package, kinds in figures.items():
        for kind, figure in kinds.items():
            yield package, figure, language.limit_of(limits, package, kind)


def test_no_figure_exceeds_its_limit(figures):
    worse = [
        f"{package} {figure.kind}: {figure.rate:.1f} exceeds the limit {limit}; for the places, run "
        f"python tests/language.py --worst {package}"
        for package, figure, limit in compared(figures)
        if exceeds(figure, limit)
    ]
    assert worse == []


def test_limits_follow_what_was_gained(figures):
    stale = [
        f"{package} {figure.kind}: {figure.rate:.1f}, limit {limit}"
        for package, figure, limit in compared(figures)
        if is_stale(figure, limit)
    ]
    assert stale == [], "better than the limits: run python tests/language.py --lower and commit the file"
    assert language.read_limits().keys() <= figures.keys(), "run python tests/language.py --lower"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Returns the newest run.", 0),
        ("Raises if a file is missing.", 0),
        ("Who keeps what the training logs.", 1),
        ("Told the best value so far.", 1),
        ("The run goes on at once.", 2),
        ("'x' is no run: nothing but digits", 2),
        ("What if it fails?", 0),
        ("What fails.", 1),
    ],
)
def test_phrases_are_counted(text, count):
    assert len(language.phrases(text)) == count


@settings(max_examples=100)
@given(
    plain=st.lists(st.sampled_from(["returns", "model", "run", "file", "loads", "a", "checkpoint"]), min_size=1),
    word=st.sampled_from(sorted(language.WORDS)),
    position=st.integers(0, 100),
)
def test_a_word_is_counted_anywhere_in_a_sentence(plain, word, position):
    sentence = [*plain]
    sentence.insert(position % (len(plain) + 1), word)
    assert language.phrases(" ".join(plain)) == []
    assert word in language.phrases(" ".join(sentence).capitalize())


@pytest.mark.parametrize(
    ("line", "kind", "count"),
    [
        ("found = load()", "names", 1),
        ("runs = load()", "names", 0),
        ("for each in runs: pass", "names", 1),
        ("a, b = 1, 2", "parallel", 1),
        ("a, b = pair()", "parallel", 0),
        ("raise ValueError('the run was told to end')", "messages", 1),
        ("raise ValueError('stopped by a signal')", "messages", 0),
        ("pass  # nobody reads this", "comments", 1),
        ("def f():\n    '''Whether it fits.'''", "fragments", 1),
        ("def f():\n    '''Returns the size.'''", "fragments", 0),
        ("def f():\n    '''Asks for the size.'''", "docstrings", 1),
    ],
)
def test_a_file_is_measured(tmp_path, line, kind, count):
    path = tmp_path / "module.py"
    path.write_text(line + "\n")
    figures = {name: Figure(name) for name in language.SCALES}
    language.measure_source(SourceFile(path), figures)
    assert figures[kind].count == count
    assert figures["density"].size == 1


@settings(max_examples=100)
@given(count=st.integers(0, 200), size=st.integers(1000, 5000))
def test_limits_only_fall(count, size):
    figures = {"docs": {"documents": Figure("documents", count, size)}}
    limits = {"docs": {"documents": 20.0}, "gone": {"documents": 9.0}}
    result = language.lowered(figures, limits)
    assert "gone" not in result
    lowered = language.limit_of(result, "docs", "documents")
    assert language.GOALS["documents"] <= lowered <= 20.0
    assert not is_stale(figures["docs"]["documents"], lowered)
    if figures["docs"]["documents"].rate <= 20.0:
        assert not exceeds(figures["docs"]["documents"], lowered)


def test_code_in_a_page_is_not_prose(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Trains.\n\n```console\n$ echo nobody knows\n```\n\nNot `told`.\n")
    assert language.prose_of(page).split() == ["Trains.", "`code`", "Not", "`code`."]
    assert language.prose_of(page).count("\n") == page.read_text().count("\n")
