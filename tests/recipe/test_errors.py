from pathlib import Path

from runner.recipe.yaml_nodes import Place, Problem, RecipeError
from runner.system.suggestions import nearest, shown_path, suggestion


def test_a_problem_shows_file_line_column_key_and_caret(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path / "recipes" / "x.yaml", 4, 3, "  batchsize: 128")
    problem = Problem(place, "train.batchsize", "unknown key")
    assert str(problem) == "recipes/x.yaml:4:3: train.batchsize: unknown key\n      batchsize: 128\n      ^"


def test_a_problem_of_a_whole_file_has_no_line():
    assert str(Problem(Place("override"), "", "is wrong")) == "override: is wrong"


def test_problems_are_sorted_by_file_and_line_and_said_once():
    problems = [
        Problem(Place("override", 1, 1), "", "last"),
        Problem(Place(Path("b.yaml"), 2, 1), "", "third"),
        Problem(Place(Path("b.yaml"), 1, 9), "", "second"),
        Problem(Place(Path("b.yaml"), 1, 9), "", "second"),
        Problem(Place(Path("a.yaml"), 30, 1), "", "first"),
    ]
    assert [p.message for p in RecipeError(problems).problems] == ["first", "second", "third", "last"]
    assert RecipeError(problems).exit_code == 2


def test_the_caret_stands_below_its_column_in_tabbed_and_in_long_lines():
    assert Place("x", 1, 3, "a\tb: 1").excerpt() == "    a\tb: 1\n     \t^"
    line, caret = Place("x", 1, 501, "a" * 500 + "X" + "b" * 500).excerpt().splitlines()
    assert line[caret.index("^")] == "X"
    assert len(line) < 130


def test_paths_outside_the_current_folder_are_absolute(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(Path("x.yaml")) == "x.yaml"
    assert shown_path(Path("..") / "x.yaml").startswith("/") or ".." in shown_path(Path("..") / "x.yaml")
    assert shown_path(tmp_path / "x.yaml") == str(tmp_path / "x.yaml")


def test_nearest_names():
    assert nearest("batchsize", ["batch_size", "seed"]) == "batch_size"
    assert nearest("Batch-Size", ["batch_size"]) == "batch_size"
    assert suggestion("qqq", ["b", "a"]) == " - known: a, b"
    assert suggestion("qqq", []) == " - none is known"
