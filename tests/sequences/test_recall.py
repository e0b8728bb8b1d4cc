import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import tiny, train_here

from runner.plugin.progress import Progress
from runner.plugins.sequences.recall import sequences
from runner.plugins.sequences.recall_config import RecallConfig
from runner.recipe.yaml_nodes import RecipeError
from runner.training.pipeline import assemble


@st.composite
def tasks(draw):
    keys = draw(st.integers(1, 12))
    pairs = draw(st.integers(1, keys))
    return RecallConfig(keys=keys, values=draw(st.integers(1, 9)), pairs=pairs, queries=draw(st.integers(1, 20)))


def parts_of(config, row):
    """Returns the pairs of a sequence, and its queries with their answers."""
    couples = list(zip(row[::2], row[1::2], strict=True))
    return couples[: config.pairs], couples[config.pairs :]


@settings(deadline=None, max_examples=50)
@given(tasks(), st.integers(0, 2**31))
def test_every_answer_is_determined_by_the_pairs_before_it(config, seed):
    tokens = sequences(config, 7, torch.Generator().manual_seed(seed))
    assert tokens.shape == (7, config.length())
    for row in tokens.tolist():
        pairs, queries = parts_of(config, row)
        assert len({key for key, _ in pairs}) == config.pairs
        for first in range(0, config.queries, config.pairs):
            queried = [key for key, _ in queries[first : first + config.pairs]]
            assert len(set(queried)) == len(queried)
        assert all(dict(pairs)[key] == answer for key, answer in queries)
        assert all(key < config.keys <= value < config.vocabulary() for key, value in pairs)


def test_nothing_but_the_pair_of_a_query_reveals_its_answer():
    """An answer is independent of its query, of all other pairs, and of the answers before it."""
    config = RecallConfig(keys=4, values=3, pairs=3, queries=2)
    tokens = sequences(config, 60_000, torch.Generator().manual_seed(0))
    answers = tokens[:, 9] - config.keys
    other_pairs = tokens[:, 0:6:2] != tokens[:, 8:9]
    other_value = (tokens[:, 1:6:2] * other_pairs).amax(1)
    for context in (tokens[:, 6], tokens[:, 7], tokens[:, 8], tokens[:, 0], other_value):
        for token in context.unique():
            after = answers[context == token]
            assert torch.bincount(after, minlength=3) / len(after) == pytest.approx([1 / 3] * 3, abs=0.02)


@settings(deadline=None, max_examples=30)
@given(tasks(), st.integers(0, 2**31), st.data())
def test_sequences_with_fewer_pairs_repeat_them_and_obey_the_rule(config, seed, data):
    fewest = data.draw(st.integers(1, config.pairs))
    tokens = sequences(config, 200, torch.Generator().manual_seed(seed), fewest)
    numbers = set()
    for row in tokens.tolist():
        pairs, queries = parts_of(config, row)
        numbers.add(len({key for key, _ in pairs}))
        # A key has one value, and those that come again are among the first.
        assert len(set(pairs)) == len(dict(pairs))
        assert all(dict(pairs)[key] == answer for key, answer in queries)
    assert numbers == {*range(fewest, config.pairs + 1)}


def test_the_task_itself_does_not_depend_on_fewer_pairs_in_the_training():
    plain, easier = source_of("data.fewest_pairs=null"), source_of("data.fewest_pairs=1")
    assert torch.equal(held_out(plain), held_out(easier))
    assert not torch.equal(drawn(plain), drawn(easier))


def test_more_fewest_pairs_than_pairs_are_refused():
    with pytest.raises(RecipeError, match="should be at most the number of pairs"):
        source_of("data.fewest_pairs=99")


def source_of(*sets):
    return assemble(tiny("recall_gpt", *sets)).source


def drawn(source):
    return source.draw(4, Progress("updates", 6))["tokens"]


def held_out(source):
    return torch.cat([batch["tokens"] for batch in source.held_out_batches()])


def test_training_sequences_are_always_new_and_follow_from_the_seed():
    source, same, other = source_of(), source_of(), source_of("seed=5")
    batches = [drawn(source) for _ in range(3)]
    assert len(torch.cat(batches).unique(dim=0)) == 12
    assert all(torch.equal(drawn(same), batch) for batch in batches)
    assert not torch.equal(drawn(other), batches[0])


def test_held_out_sequences_are_the_same_in_every_evaluation_and_for_every_seed():
    source, other = source_of(), source_of("seed=5")
    first = held_out(source)
    drawn(source)
    assert torch.equal(held_out(source), first)
    assert torch.equal(held_out(other), first)
    with source.testing():
        test = held_out(source)
    assert test.shape == first.shape
    assert len(torch.cat([first, test]).unique(dim=0)) == 2 * len(first)


class Recalling:
    """A learner that answers by the rule, or always with one token."""

    def __init__(self, config, answer=None):
        self.config, self.answer = config, answer

    def evaluating(self):
        return torch.no_grad()

    def inputs(self, batch):
        return batch["tokens"][:, :-1]

    def predict(self, tokens):
        logits = torch.zeros(*tokens.shape, self.config.vocabulary())
        for row, sequence in enumerate(tokens.tolist()):
            for position in range(2 * self.config.pairs, len(sequence), 2):
                recalled = sequence[sequence.index(sequence[position]) + 1]
                logits[row, position, recalled if self.answer is None else self.answer] = 20
        return logits


def test_the_answers_alone_are_measured():
    source = source_of()
    batches = list(source.held_out_batches())
    exact = source.answered(Recalling(source.config), batches)
    assert exact == {"accuracy": 1, "nats_per_answer": pytest.approx(0, abs=1e-6)}
    constant = source.answered(Recalling(source.config, answer=0), batches)
    assert constant == {"accuracy": 0, "nats_per_answer": pytest.approx(20, rel=1e-6)}


@pytest.mark.parametrize(
    "model", ["{kind: gpt, layers: 1, width: 8, heads: 1}", "{kind: mamba2, width: 8, head_width: 8}"]
)
def test_both_language_models_train_on_it(model):
    metrics = train_here("recall_gpt", f"model={model}", "optimization={}").metrics
    names = ("accuracy", "nats_per_answer", "nats_per_token")
    assert set(metrics) >= {f"{part}/{name}" for part in ("eval", "test") for name in names}
    assert 0 <= metrics["test/accuracy"] <= 1


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("{keys: 4, pairs: 5, queries: 1}", "should be at most the number of keys, 4"),
        ("{limit: {train: 0.5}}", "needs all of its samples"),
    ],
)
def test_impossible_tasks_are_refused(setting, problem):
    with pytest.raises(RecipeError, match=problem):
        tiny("recall_gpt", f"data={setting}")
