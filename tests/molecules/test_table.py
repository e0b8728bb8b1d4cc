import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from runner.plugins.graphs.config import MoleculeGraphsConfig
from runner.plugins.molecules.scaffold import scaffold
from runner.plugins.molecules.smiles import read
from runner.plugins.molecules.synthetic import synthetic_molecules
from runner.plugins.molecules.table import Table
from runner.system.errors import UsageError

RINGS = ["C1CC1", "C1CCC1", "c1ccccc1", "C1=CC=CC=C1", "c1ccncc1", "C1CCOC1", "c1ccoc1", "c1ccc2ccccc2c1"]
CHAINS = ["C", "CC", "O", "CO", "N", "CCCl", "C(=O)O"]
ROWS = [f"{'C' * (n // 3 + 1)}{'ONF'[n % 3]},{n}" for n in range(60)]


@pytest.fixture
def table(tmp_path):
    """Makes a table of these lines and reads it with these settings."""

    def make(*lines, seed=0, **settings):
        path = tmp_path / "table.csv"
        path.write_text("\n".join(lines))
        return Table(MoleculeGraphsConfig.model_validate({"file": str(path), **settings}), seed)

    return make


def test_every_molecule_is_in_one_part_and_the_same_ones_are_together(table):
    lines = ["smiles,target", *ROWS, *ROWS]  # everything twice
    test, validation = (table(*lines, held_out=part) for part in ("test", "validation"))
    assert test.train == validation.train
    parts = [
        {each.smiles[row] for row in rows}
        for each, rows in ((test, test.train), (test, test.held_out), (validation, validation.held_out))
    ]
    assert [len(part) for part in parts] == [48, 6, 6]
    assert len(set.union(*parts)) == 60


def test_the_split_follows_the_recipes_seed_unless_told(table):
    lines = ["smiles,target", *ROWS]
    assert table(*lines, seed=1).held_out != table(*lines, seed=2).held_out
    assert table(*lines, seed=1, split=5).held_out == table(*lines, seed=2, split=5).held_out


def test_targets_are_standardised_on_what_is_trained_on(table):
    found = table("smiles,target", *ROWS)
    known = [found.targets[row] for row in found.train]
    assert found.mean == pytest.approx(sum(known) / len(known))
    assert found.measured({"squared_error": 4.0, "loss": 1.0}) == {"rmse": pytest.approx(2 * found.std), "loss": 1.0}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "has no column 'smiles', but nothing"),
        (["smiles,value", *ROWS], "data.target: * has no column 'target', but 'smiles', 'value'"),
        (["smiles,target", *ROWS, "C,many"], "row 62: 'many' is not a number in 'target'"),
        (["smiles,target", *ROWS, "C(C,1"], "row 62: 'C(C' cannot be read: a ')' is missing"),
        (["smiles,target", "C,1", "CC,2"], "has 2 molecules, too few"),
    ],
)
def test_a_bad_table_is_one_clear_line(table, lines, problem):
    with pytest.raises(UsageError) as error:
        table(*lines)
    first, _, last = problem.partition("*")
    assert first in str(error.value)
    assert last in str(error.value)
    assert "\n" not in str(error.value)


def test_a_foreign_encoding_is_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes("smiles,target\nC,1\n\u00e9".encode("latin1"))
    with pytest.raises(UsageError, match="is not a table in UTF-8"):
        Table(MoleculeGraphsConfig.model_validate({"file": str(path)}), 0)


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No published file is at hand."""
    monkeypatch.setenv("RUNNER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_table_that_is_nowhere_is_said(nowhere):
    with pytest.raises(UsageError, match=r"data\.file: .*mine\.csv"):
        Table(MoleculeGraphsConfig.model_validate({"file": "mine.csv"}), 0)


@pytest.mark.parametrize("file", ["esol.csv", "freesolv.csv"])
def test_synthetic_molecules_are_generated_on_request_only(nowhere, file):
    with pytest.raises(UsageError, match=f"runner data get {file}.*--download.*data.synthetic=true"):
        Table(MoleculeGraphsConfig.model_validate({"file": file}), 0)
    found = Table(MoleculeGraphsConfig.model_validate({"file": file, "synthetic": True}), 0)
    assert found.digest == "synthetic"
    assert len(found.smiles) == len(set(found.smiles)) > 500
    assert len(found.train) + 2 * len(found.held_out) >= 0.9 * len(found.smiles)
    assert synthetic_molecules()["ClCCCOF"] == pytest.approx(3 * -0.5 - 0.7 + 0.8 - 0.2)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_scaffold_is_in_two_parts_and_every_molecule_in_one(table, data):
    linked = st.tuples(st.sampled_from(CHAINS[:2]), *[st.sampled_from(RINGS)] * 2).map("{0[1]}{0[0]}{0[2]}".format)
    cyclic = st.tuples(linked | st.sampled_from(RINGS), st.sampled_from(CHAINS)).map("".join)
    molecules = data.draw(st.lists(cyclic, min_size=40, max_size=80)) + [chain + "C" for chain in CHAINS[:4]]
    lines = ["smiles,target", *(f"{text},{number}" for number, text in enumerate(molecules))]
    try:
        found = table(*lines, split_by="scaffold", seed=data.draw(st.integers(0, 9)))
    except UsageError:
        reject()
    parts = [found.train, found.held_out, found.test]
    assert sorted(row for part in parts for row in part) == list(range(len(molecules)))
    scaffolds = [{scaffold(read(molecules[row])) for row in part} for part in parts]
    assert len(set.union(*scaffolds)) == sum(map(len, scaffolds))
    share = len(molecules) // 10
    assert all(share / 2 <= len(part) <= share for part in parts[1:])


def test_the_seed_divides_scaffolds_and_the_order_of_the_rows_does_not(table):
    molecules = sorted({f"{left}{chain}{right}" for left in RINGS for right in RINGS for chain in CHAINS[:2]})

    def held_out(texts, split):
        found = table("smiles,target", *(f"{text},1" for text in texts), split=split, split_by="scaffold")
        return {found.smiles[row] for row in found.held_out}

    assert held_out(molecules, 1) == held_out(molecules[::-1], 1)
    assert held_out(molecules, 1) & held_out(molecules, 2) != held_out(molecules, 1)


@pytest.mark.parametrize("name", ["esol.csv", "freesolv.csv"])
@pytest.mark.parametrize("seed", range(3))
def test_scaffolds_of_the_published_tables_fill_a_tenth_each(name, seed, published):
    settings = {"file": str(published(name)), "split_by": "scaffold"}
    found = Table(MoleculeGraphsConfig.model_validate(settings), seed)
    assert len(found.held_out) == len(found.test) == len(found.smiles) // 10
    assert any(scaffold(read(found.smiles[row])) == "" for row in found.train)
    assert not any(scaffold(read(found.smiles[row])) == "" for row in [*found.held_out, *found.test])


def test_one_scaffold_for_all_is_one_clear_line(table):
    with pytest.raises(UsageError) as error:
        table("smiles,target", *ROWS, split_by="scaffold")
    assert str(error.value).startswith("data.split_by: 60 of the 60 molecules of ")
    assert "set data.split_by=molecule" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("setting", [{"folds": {"count": 3}}, {"test": 0.5, "held_out": "test"}])
def test_scaffolds_are_not_divided_again_at_random(setting):
    with pytest.raises(ValueError, match="divides molecules at random"):
        MoleculeGraphsConfig.model_validate({"split_by": "scaffold", **setting})


def test_the_default_is_no_part_of_a_stored_recipe():
    assert "split_by" not in MoleculeGraphsConfig().model_dump()
    stored = MoleculeGraphsConfig(split_by="scaffold").model_dump()
    assert MoleculeGraphsConfig.model_validate(stored).split_by == "scaffold"
