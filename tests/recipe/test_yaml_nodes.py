from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.recipe.yaml_nodes import MAX_BYTES, MAX_DEPTH, MAX_NODES, RecipeError, parse, read

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]\n" for below, name in zip("abcdefghi", "bcdefghij", strict=False)
)


def failure(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse(text, "text.yaml", [])
    return str(caught.value)


def test_every_value_knows_its_place(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("# comment\nmodel:\n  kind: net\n  hidden: [1, 2]\n")
    model = read(path, []).get("model")
    assert (model.key.line, model.key.column) == (2, 1)
    hidden = model.get("hidden")
    assert (hidden.key.line, hidden.key.column, hidden.place.line, hidden.place.column) == (4, 3, 4, 11)
    assert [str(item.place).rpartition("recipe.yaml:")[2] for item in hidden.value] == ["4:12", "4:15"]
    assert hidden.place.text == "  hidden: [1, 2]"


def test_duplicate_and_merge_keys_are_collected_with_their_path():
    problems = []
    node = parse("a:\n  b: 1\n  b: 2\n  <<: {c: 3}\na: 4\n'<<': 5\n", "x", problems)
    assert node.plain() == {"a": {"b": 1}, "<<": 5}
    assert [(p.path, p.place.line) for p in problems] == [("a.b", 3), ("a.<<", 4), ("a", 5)]
    assert "line 2" in problems[0].message
    assert "extends" in problems[1].message


def test_aliases_are_values_used_twice():
    assert parse("a: &x {b: 1}\nc: *x", "x", []).plain() == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.system [ls]", "tag '!!python/object/apply:os.system' is not allowed"),
        ("a: !secret x", "tag '!secret' is not allowed"),
        ("!!binary a: x", "tag '!!binary' is not allowed"),
        ("a: &a [*a]", "an alias that contains itself"),
        ("a: &a {b: *a}", "an alias that contains itself"),
        (LAUGHS, f"has more than {MAX_NODES:,} keys and values"),
        (f"a: &a {'x' * 1000}\nb: [{'*a, ' * 1000}]", f"or {MAX_BYTES:,} characters, aliases expanded"),
        ("[" * 5000, f"nested deeper than {MAX_DEPTH} levels"),
        ("{a: " * 5000, f"nested deeper than {MAX_DEPTH} levels"),
        ("\n".join(" " * i + "a:" for i in range(500)), f"nested deeper than {MAX_DEPTH} levels"),
        ("- 1\n" * (MAX_NODES + 1), "keys and values"),
        ("[a]: 1", "a key must be a word"),
        ("a: [1", "while parsing a flow sequence that starts on line 1"),
        ("a: *b", "found undefined alias"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: \x07", "character U+0007 is not allowed"),
        ('a: "\\ud800"', "surrogate"),
        ("\ta: 1", "cannot start any token"),
    ],
)
def test_what_no_recipe_holds_is_one_clear_line(text, message):
    lines = failure(text).splitlines()
    assert message in lines[0]
    assert len(lines) <= 3


def test_depth_counts_aliases_too():
    chain = "".join(f"k{i}: &k{i} {{x: *k{i - 1}}}\n" for i in range(1, MAX_DEPTH + 2))
    assert "nested deeper" in failure(f"k0: &k0 1\n{chain}")


def test_the_deepest_allowed_document():
    parse("{a: " * MAX_DEPTH + "1" + "}" * MAX_DEPTH, "x", [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n", "a recipe is a mapping"),
        (b"\xff\xfea", "is not UTF-8 text (byte 0)"),
        (b"x" * (MAX_BYTES + 1), "is larger than 1,000,000 bytes"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match="recipe") as caught:
        read(path, [])
    assert message in str(caught.value)


def test_a_folder_and_a_missing_file(tmp_path):
    with pytest.raises(RecipeError, match="is a folder"):
        read(tmp_path, [])
    with pytest.raises(RecipeError, match="No such file"):
        read(tmp_path / "x.yaml", [])


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\n")
    assert read(path, []).plain() == {"name": "x"}


@given(st.text(alphabet="ab:{}[]&*!<>|-?,\"'# \n\t\\0", max_size=60) | st.text(max_size=40))
@example("? |\n")
@example("&a *a")
@example("a: !<tag:x> b")
def test_any_text_is_read_or_refused(text):
    with suppress(RecipeError):
        parse(text, "x", [])
