import csv
import random
from pathlib import Path

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Exact, Progress, Statistical
from runner.plugin.registry import Registry
from runner.plugins.molecules.smiles import Atom, Molecule, read
from runner.plugins.sequences.walks import END, JUMP, LONGEST, VOCABULARY, check, decode, encode
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError
from runner.training.pipeline import assemble, setting_of
from runner.training.step import Step

TABLE = Path(__file__).parent.parent / "boiling_points.csv"
SMALL = (
    "device=cpu", "model.layers=1", "model.width=16", "model.heads=2", "data.split=0", "data.file=" + str(TABLE),
    "train.batch_size=8", "train.updates=10", "optimization.fused_optimizer=off",
)  # fmt: skip
ATOMS = [Atom("C", False, 0), Atom("C", True, 0), Atom("N", False, 1), Atom("O", False, -1), Atom("Cl", False, 0)]


def pipeline(*sets, **options):
    return assemble(load("graphgpt_esol", [*SMALL, *sets], Registry()), **options)


def table_of(tmp_path, *smiles):
    """A table in which these molecules come after those that are known."""
    path = tmp_path / "table.csv"
    path.write_text(TABLE.read_text() + "".join(f"{each},0\n" for each in smiles))
    return f"data.file={path}"


def graph_of(molecule):
    graph = nx.Graph()
    graph.add_nodes_from((number, {"is": atom}) for number, atom in enumerate(molecule.atoms))
    graph.add_edges_from((*bond, {"is": kind}) for bond, kind in molecule.bonds.items())
    return graph


def same(one, other):
    def equal(mine, theirs):
        return mine == theirs

    return nx.is_isomorphic(graph_of(one), graph_of(other), node_match=equal, edge_match=equal)


@st.composite
def molecules(draw):
    """Trees and a few more bonds, in one component or in several."""
    count = draw(st.integers(1, 14))
    atoms = draw(st.lists(st.sampled_from(ATOMS), min_size=count, max_size=count))
    ends = [(draw(st.integers(-1, atom - 1)), atom) for atom in range(1, count)]  # -1 begins a component
    ends += draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=4))
    pairs = sorted({(min(pair), max(pair)) for pair in ends if min(pair) >= 0 and pair[0] != pair[1]})
    return Molecule(atoms, {pair: draw(st.integers(1, 4)) for pair in pairs})


@given(molecules(), st.randoms(use_true_random=False))
def test_a_walk_is_read_as_the_same_molecule(molecule, draw):
    check(molecule)
    tokens = encode(molecule, draw)
    assert same(decode(tokens), molecule)
    assert len(tokens) == len(encode(molecule, draw)) <= 5 * len(molecule.atoms) + 4 * len(molecule.bonds)
    assert max(tokens) < VOCABULARY <= 128
    assert tokens.count(JUMP) == nx.number_connected_components(graph_of(molecule)) - 1
    assert tokens[-1] == END


@given(molecules())
def test_no_walk_has_more_steps_than_networkx_needs(molecule):
    graph = graph_of(molecule)
    if not nx.is_connected(graph) or len(molecule.atoms) == 1 or nx.has_eulerian_path(graph):
        return
    steps = (len(encode(molecule, random.Random(0))) - len(molecule.atoms) - 2) / 2
    assert steps <= nx.eulerize(graph).number_of_edges()
    assert steps <= 2 * graph.number_of_edges()


@pytest.mark.parametrize("name", ["esol.csv", "freesolv.csv"])
def test_all_molecules_of_the_published_tables_come_back(published, name):
    with published(name).open(newline="") as file:
        found = [read(row["smiles"].strip()) for row in csv.DictReader(file)]
    draw, longest = random.Random(0), 0
    for molecule in found:
        tokens = encode(molecule, draw)
        longest = max(longest, len(tokens))
        assert same(decode(tokens), molecule)
    assert len(found) == {"esol.csv": 1128, "freesolv.csv": 642}[name]
    assert longest <= LONGEST


def test_walks_begin_and_turn_at_random_and_follow_from_their_seed():
    molecule = read("CC(=O)Oc1ccccc1C(=O)O")
    walks = [tuple(encode(molecule, random.Random(seed))) for seed in range(20)]
    assert len(set(walks)) == 20
    assert walks == [tuple(encode(molecule, random.Random(seed))) for seed in range(20)]
    assert len({decode(walk).atoms[0] for walk in walks}) > 1


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([], "no end"),
        ([7, 71, 3, 8, 71], "no end"),
        ([END], "1 at 0 is not the number of an atom"),
        ([7, 5, END], "5 at 1 describes no atom"),
        ([7, 71, 3, 9, 71, END], "9 at 3 is not the number"),
        ([7, 71, 71, END], "71 at 2 is neither a bond nor a jump nor the end"),
        ([7, 71, 3, 7, END], "3 before 3 cannot be a bond"),
        ([7, 71, 3, 8, 71, 4, 7, END], "4 before 6 cannot be a bond"),
    ],
)
def test_what_is_no_walk_is_refused(tokens, problem):
    with pytest.raises(ValueError, match=problem):
        decode(tokens)


@pytest.mark.parametrize(
    ("smiles", "problem"),
    [
        ("C" * 65, "65 atoms are more than the 64 that can be numbered"),
        ("[U]", "no token for U"),
        ("C[N+2]", r"no token for N with charge \+2"),
    ],
)
def test_a_molecule_without_a_walk_is_named_with_its_row(tmp_path, smiles, problem):
    with pytest.raises(UsageError, match=rf"data\.file: .*row 54: '.*' cannot be walked through: {problem}; remove"):
        pipeline(table_of(tmp_path, smiles))


def test_a_walk_that_is_too_long_is_refused():
    complete = Molecule([ATOMS[0]] * 20, {(one, other): 1 for other in range(20) for one in range(other)})
    with pytest.raises(ValueError, match="tokens, more than 256"):
        check(complete)


def test_batches_are_padded_walks():
    made = pipeline()
    batch = made.slots.next_batch(8, made.progress)
    tokens, length = batch["tokens"], batch["length"]
    assert tokens.shape[1] % 16 == 0
    assert tokens.shape[1] - length.max() < 16
    for row, count in zip(tokens.tolist(), length.tolist(), strict=True):
        assert decode(row).atoms
        assert row[count - 1] == END
        assert not any(row[count:])
    assert batch["target"].dtype == torch.float32


@pytest.mark.parametrize("walks", [1, 3])
def test_targets_are_standardised_and_errors_are_in_the_unit(walks):
    made = pipeline(f"data.walks={walks}")
    targets = torch.tensor(made.source.train.targets)
    torch.testing.assert_close(torch.stack([targets.mean(), targets.std(correction=0)]), torch.tensor([0.0, 1.0]))
    parts = list(made.source.held_out_batches())
    errors = torch.cat([made.learner.predict(made.learner.inputs(part)) - part["target"] for part in parts])
    boiling = [float(row["target"]) for row in csv.DictReader(TABLE.read_text().splitlines())]
    unit = (max(boiling) - min(boiling)) / (
        targets.max() - targets.min()
    ).item()  # both extremes are in the training part
    measured = made.source.evaluate(made.learner)
    assert set(measured) == {"rmse", "nats_per_token"}
    assert measured["rmse"] == pytest.approx(errors.square().mean().sqrt().item() * unit, rel=1e-4)
    if walks == 1:
        assert made.source.rehearse(made.learner, parts[0]) == measured  # one batch is all that is held out


def test_held_out_molecules_are_predicted_by_the_mean_of_their_walks():
    single, several, again = (pipeline(f"data.walks={walks}") for walks in (1, 3, 3))
    (first,) = single.source.held_out_batches()
    batches = [*several.source.held_out_batches()]
    tokens = [walks for batch in batches for walks in batch["tokens"]]
    assert max(len(batch["tokens"]) for batch in batches) == 8 // 3
    for walks, alone, length in zip(tokens, first["tokens"], first["length"].tolist(), strict=True):
        assert torch.equal(walks[0, :length], alone[:length])
        molecules = [decode(walk[:length].tolist()) for walk in walks]
        assert all(same(molecules[0], molecule) for molecule in molecules[1:])
    assert any(len(walks.unique(dim=0)) == 3 for walks in tokens)
    for batch, repeated in zip(batches, again.source.held_out_batches(), strict=True):
        assert torch.equal(batch["tokens"], repeated["tokens"])

    learner = several.learner
    batch = batches[0]
    inputs = learner.inputs(batch)
    alone = [learner.predict({**inputs, "tokens": inputs["tokens"][:, walk]}) for walk in range(3)]
    torch.testing.assert_close(learner.predict(inputs), torch.stack(alone).mean(0))
    one_walk = {**batch, "tokens": batch["tokens"][:, 0]}
    assert learner.metrics(batch)["nats_per_token"] == learner.metrics(one_walk)["nats_per_token"]


def test_walks_are_drawn_anew_unless_told_and_held_out_ones_never_are():
    for redraw in (True, False):
        source = pipeline(f"data.redraw={redraw}").source
        assert (torch.equal(source.train[20].tokens, source.train[20].tokens)) is not redraw
        assert torch.equal(source.held_out[0].tokens, source.held_out[0].tokens)


def test_padding_changes_no_prediction():
    made = pipeline()
    inputs = made.learner.inputs(made.slots.next_batch(8, made.progress))
    wanted = made.learner.predict(inputs)
    padded = {**inputs, "tokens": torch.nn.functional.pad(inputs["tokens"], (0, 32))}
    torch.testing.assert_close(made.learner.predict(padded), wanted, rtol=0, atol=1e-5)
    for row, length in enumerate(inputs["length"].tolist()):
        alone = {"tokens": inputs["tokens"][row : row + 1, :length], "length": inputs["length"][row : row + 1]}
        torch.testing.assert_close(made.learner.predict(alone)[0], wanted[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize("done", [0, 9])
def test_buckets_cost_what_the_batch_costs(done):
    made = pipeline()
    made.learner.module.double()
    made.learner._parameter = next(made.learner.module.parameters())
    batch, progress = made.slots.next_batch(32, made.progress), Progress("updates", 10, updates=done)
    buckets = list(made.source.buckets(batch))
    assert len(buckets) > 1
    assert sorted(torch.cat([rows for rows, _ in buckets]).tolist()) == list(range(32))
    whole = made.learner.loss(batch, {}, progress)
    parts = [made.learner.loss(part, {}, progress) for _, part in buckets]
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum, rtol=1e-10, atol=1e-10)
    assert sum(part.count for part in parts) == whole.count


def test_the_second_task_begins_after_its_share():
    made = pipeline("model.pretrained=0.3")
    batch = made.slots.next_batch(8, made.progress)
    walks, measured = (int(batch["length"].sum()) - 8, 8)
    counts = [made.learner.loss(batch, {}, Progress("updates", 10, updates=done)).count for done in range(10)]
    assert counts == [walks] * 3 + [measured] * 7
    scratch = pipeline("model.pretrained=0")
    assert scratch.learner.loss(batch, {}, Progress("updates", 10)).count == measured
    assert not scratch.learner.idle(Progress("updates", 10, updates=1))
    assert {bool(made.learner.idle(Progress("updates", 10, updates=done))) for done in (1, 2, 3)} == {True}
    assert not made.learner.idle(Progress("updates", 10, updates=4))


def test_walks_are_learnt_without_a_look_at_the_target():
    learner = pipeline().learner
    made = pipeline()
    batch = made.slots.next_batch(8, made.progress)
    costs = [learner.loss({**batch, "target": batch["target"] + by}, {}, Progress("updates", 10)).sum for by in (0, 9)]
    assert torch.equal(*costs)


@pytest.mark.parametrize("stop", [3, 7])
def test_a_training_goes_on_bit_for_bit_in_either_task(stop):
    sets = ("model.dropout=0.1", "optimization.bucketing=off", "optimization.walk_cache={variants: 2}")
    through, begun, resumed = (pipeline(*sets) for _ in range(3))
    whole, half = Step(through), Step(begun)
    wanted = [whole()["loss"].sum for _ in range(10)]
    for _ in range(stop):
        half()
    resumed.load_state_dict(begun.state_dict())
    rest = Step(resumed)
    got = [rest()["loss"].sum for _ in range(10 - stop)]
    assert all(torch.equal(*pair) for pair in zip(got, wanted[stop:], strict=True))


def test_it_learns_a_batch_by_heart():
    made = pipeline("train.updates=300", "lr_scheduler={kind: constant}", "optimizer.lr=1e-2")
    step, batch = made.slots.update, made.slots.next_batch(8, made.progress)
    losses = []
    for _ in range(300):
        loss = step(batch, {}, made.progress)["loss"]
        made.progress.advance({"updates": 1})
        losses.append(loss.sum / loss.count)
    assert losses[149] < 0.6 * losses[0]
    assert losses[-1] < 0.05


def test_a_cache_makes_every_walk_once():
    made = pipeline("optimization.walk_cache=on")
    rows, stage = len(made.source.train), made.stages["walk_cache"]
    samples = [made.source.train[row] for _ in range(3) for row in range(rows)]
    assert all(one is other for one, other in zip(samples[:rows], samples[rows : 2 * rows], strict=True))
    assert stage.closing_notes() == (f"walks: {rows} made, {2 * rows} found again",)


def test_a_cache_of_walks_that_are_not_redrawn_gives_the_same_batches():
    plain, kept = pipeline("data.redraw=false"), pipeline("data.redraw=false", "optimization.walk_cache=on")
    for _ in range(10):
        one, other = (each.slots.next_batch(8, each.progress) for each in (plain, kept))
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("redraw", "promise"), [("false", Exact()), ("true", Statistical())])
def test_a_cache_promises_bits_only_where_a_molecule_has_one_walk(redraw, promise):
    made = pipeline(f"data.redraw={redraw}", "optimization.walk_cache=on")
    assert made.recipe.stages["walk_cache"].contract(setting_of(made.recipe, made.device)) == promise
    assert made.recipe.data.draws_samples() is (redraw == "true")


def test_variants_follow_from_the_molecule_whatever_was_drawn_before():
    one, other = (pipeline("optimization.walk_cache={variants: 4}").source.train for _ in range(2))
    for _ in range(9):
        other[7]
    seen = [{tuple(kept[3].tokens.tolist()) for _ in range(60)} for kept in (one, other)]
    assert seen[0] == seen[1]
    assert len(seen[0]) == 4


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (["data.redraw=false", "optimization.walk_cache={variants: 2}"], "a molecule has one walk, and variants is 2"),
        (["model.heads=3"], r"model\.heads: should divide the width of 16"),
        (["model.pretrained=1"], r"model\.pretrained"),
    ],
)
def test_settings_that_do_not_fit_are_refused(sets, problem):
    with pytest.raises(RecipeError, match=problem):
        pipeline(*sets)


def test_a_cache_is_left_out_without_walks_and_with_workers():
    other = assemble(load("digits_classifier", ["device=cpu", "optimization.walk_cache=on"], Registry()))
    assert other.reports["walk_cache"].reason == "'digits' has no walks"
    report = pipeline("data.workers=1", "optimization.walk_cache=on").reports["walk_cache"]
    assert not report.active
    assert report.reason == "each of the 1 workers would cache walks separately; set data.workers: 0"
