from functools import reduce

import pytest
from faces import write_recipe

from runner.recipe.loader import find, layers, merge, shipped
from runner.recipe.yaml_nodes import RecipeError, parse


def composed(path, *sets):
    return reduce(merge, layers(path, sets, []))


def failure(path, *sets):
    with pytest.raises(RecipeError) as caught:
        composed(path, *sets)
    return str(caught.value)


def test_mappings_merge_and_everything_else_replaces(tmp_path):
    write_recipe(tmp_path, "a: {x: 1, y: [1, 2, 3]}\nb: {c: 1}\nd: 1\n", "base.yaml")
    path = write_recipe(tmp_path, "extends: base.yaml\na: {y: [4], z: 5}\nb: off\nd: {e: 1}\n")
    assert composed(path).plain() == {"a": {"x": 1, "y": [4], "z": 5}, "b": "off", "d": {"e": 1}}


def test_extends_is_relative_to_the_extending_file(tmp_path):
    (tmp_path / "deep").mkdir()
    write_recipe(tmp_path, "a: 1\nb: 1\n", "top.yaml")
    write_recipe(tmp_path / "deep", "extends: ../top.yaml\nb: 2\n", "middle.yaml")
    path = write_recipe(tmp_path, "extends: deep/middle.yaml\nc: 3\n")
    assert composed(path).plain() == {"a": 1, "b": 2, "c": 3}


def test_a_recipe_that_ships_is_extended_by_name(tmp_path):
    for name in ("marl_baseline", "marl_baseline.yaml"):
        path = write_recipe(tmp_path, f"extends: {name}\nseed: 9\n")
        node = composed(path)
        assert node.get("seed").value == 9
        assert node.get("model").place.source == shipped()["marl_baseline"]


def test_a_file_beside_comes_before_one_that_ships(tmp_path):
    write_recipe(tmp_path, "a: 1\n", "marl_baseline.yaml")
    assert composed(write_recipe(tmp_path, "extends: marl_baseline.yaml\n")).plain() == {"a": 1}


def test_a_circle_is_named(tmp_path):
    write_recipe(tmp_path, "extends: b.yaml\n", "a.yaml")
    write_recipe(tmp_path, "extends: a.yaml\n", "b.yaml")
    text = failure(tmp_path / "a.yaml")
    assert "b.yaml:1:10: extends: runs in a circle: a.yaml -> b.yaml -> a.yaml" in text
    write_recipe(tmp_path, "extends: self.yaml\n", "self.yaml")
    assert "circle: self.yaml -> self.yaml" in failure(tmp_path / "self.yaml")


def test_a_missing_parent_is_shown_where_it_is_named(tmp_path):
    write_recipe(tmp_path, "a: 1\n", "common.yaml")
    path = write_recipe(tmp_path, "name: x\nextends: comon.yaml\n")
    assert "recipe.yaml:2:10: extends: 'comon.yaml': no such file, and no recipe of that name ships" in failure(path)
    assert "did you mean 'common.yaml'?" in failure(path)
    for value in ("", "[[a.yaml]]", "3"):
        assert "extends: should be the path" in failure(write_recipe(tmp_path, f"extends: {value}\na: 1\n"))


def test_assignments_come_last_and_the_last_wins(tmp_path):
    path = write_recipe(tmp_path, "a: {b: 1, c: off}\n")
    sets = ("a.b=2", "a.b=1e-3", "a.c.d=[1, x]", "e.f=", 'g="1"')
    assert composed(path, *sets).plain() == {"a": {"b": 1e-3, "c": {"d": [1, "x"]}}, "e": {"f": None}, "g": "1"}


def test_an_assignment_knows_the_columns_of_its_text(tmp_path):
    node = composed(write_recipe(tmp_path, "a: 1\n"), "x=1", "b.see.d={e: 1}")
    see = node.get("b").get("see")
    assert (str(see.key), see.key.column, see.get("d").key.column) == ("override", 3, 7)
    e = see.get("d").get("e")
    assert (e.key.column, e.place.column, e.key.text) == (10, 13, "b.see.d={e: 1}")


@pytest.mark.parametrize("text", ["a", "=1", ".a=1", "a..b=1", "a .b=1", ""])
def test_what_is_no_assignment(tmp_path, text):
    assert "override: should be a.b.c=VALUE" in failure(write_recipe(tmp_path, "a: 1\n"), text)


def test_an_assignment_that_is_no_yaml(tmp_path):
    path = write_recipe(tmp_path, "a: 1\n")
    assert failure(path, "a=[1").startswith("override: invalid YAML")
    assert "extends is only valid in a file" in failure(path, "extends=b.yaml")


def test_another_kind_marks_what_it_inherits():
    base = parse("kind: a\nx: 1\ny: 1", "base", [])
    merged = merge(base, parse("kind: b\ny: 2\nz: 2", "over", []))
    assert {key: node.leftover for key, node in merged.value.items()} == {
        "kind": False, "x": True, "y": False, "z": False,
    }  # fmt: skip
    same = merge(base, parse("kind: a\ny: 2", "over", []))
    assert not any(node.leftover for node in same.value.values())
    assert same.place.source == "base"


def test_bare_names_are_recipes_that_ship(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find("marl_phase2") == find("marl_phase2.yaml") == shipped()["marl_phase2"]
    (tmp_path / "marl_phase2").mkdir()
    assert find("marl_phase2") == shipped()["marl_phase2"]
    write_recipe(tmp_path, "a: 1", "marl_phase2.yaml")
    assert str(find("marl_phase2.yaml")) == "marl_phase2.yaml"


def test_a_wrong_name_suggests_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"marl_phse2: no such file, and no .* did you mean 'marl_phase2'"):
        find("marl_phse2")
    (tmp_path / "recipes").mkdir()
    write_recipe(tmp_path / "recipes", "a: 1", "mine.yaml")
    with pytest.raises(RecipeError, match=r"recipes/mien.yaml: no such file - did you mean 'recipes/mine.yaml'\?"):
        find("recipes/mien.yaml")


def test_a_lock_is_read_as_the_recipe_in_it(tmp_path):
    path = write_recipe(tmp_path, "lock: 1\nrecipe: {a: 1}\nsource: {}\n", "recipe.lock.yaml")
    assert composed(path, "a=2").plain() == {"a": 2}
    broken = write_recipe(tmp_path, "a: 1\n", "other.lock.yaml")
    assert "recipe: is missing: this is not a lock file" in failure(broken)
