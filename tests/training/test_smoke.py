"""Smoke tests, training on repeated batches, and parts of datasets."""

import math

import mlflow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import RECIPES
from toy_runs import TOYS, toy, toy_pipeline, trained, written
from typer.testing import CliRunner

from runner.api import Context, DatasetConfig, DatasetSource, Slots, UsageError
from runner.cli import app
from runner.plugin.configs import LimitConfig
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.smoke import smoke_assignments
from runner.recipe.yaml_nodes import RecipeError
from runner.tracking import RunFolder, Workspace
from runner.training.checkpoint import kept
from runner.training.model_versions import register
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.step import Step

CPU = torch.device("cpu")


# --- smoke tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sets",
    [
        ("train.epochs=50", "train.evaluate_every=1", "train.stop={patience: 3}"),
        ("train.updates=1000", "train.checkpoint_every=3"),
        ("train.samples=999",),
        ("train.tokens=5000", "data.limit={train: 0.5}"),
    ],
)
def test_any_length_becomes_a_few_updates_and_one_evaluation(sets, tmp_path):
    recipe = toy(tmp_path, *sets)
    smoke = toy(tmp_path, *sets, *smoke_assignments(recipe))
    assert smoke.length == ("updates", 8)
    assert smoke.train.smoke
    assert (smoke.data.limit.train, smoke.data.limit.held_out) == (0.01, 0.01)
    assert smoke.digest != recipe.digest
    loop, notes = trained(tmp_path, assemble(smoke, [TOYS]))
    assert loop.progress.updates == 8
    assert [step for step, _ in notes.points["eval/loss"]] == [8]
    assert [step for step, _ in notes.points["perf/checkpoint_ms"]] == [4, 8]


def test_a_simulator_is_evaluated_with_a_hundredth_of_its_episodes():
    path = RECIPES / "marl_baseline.yaml"
    recipe = load(path, ["data.evaluation.episodes=500"], Registry())
    smoke = load(path, ["data.evaluation.episodes=500", *smoke_assignments(recipe)], Registry())
    assert smoke.data.evaluation.episodes == 5
    assert smoke.length == ("updates", 8)


def test_a_dataset_that_needs_all_samples_is_complete_in_a_smoke_test():
    path = RECIPES / "pgt_cora.yaml"
    sets = ["data.synthetic=true"]
    smoke = load(path, [*sets, *smoke_assignments(load(path, sets, Registry()))], Registry())
    assert smoke.data.limit is None
    with pytest.raises(RecipeError, match=r"data\.limit: 'node_contexts' needs all of its samples; remove it"):
        load(path, [*sets, "data.limit={train: 0.5}"], Registry())


def test_a_smoke_test_is_marked_everywhere_and_not_registered(tmp_path, migrated_workspace):
    words = written(tmp_path, "train.epochs=20")
    words.remove("--json")
    result = CliRunner().invoke(app, [*words, "--smoke"])
    assert result.exit_code == 0, result.output
    assert "smoke     a few updates on a part of the data" in result.stdout
    (folder,) = Workspace().runs.iterdir()
    record = RunFolder(folder).record()
    assert record.smoke
    assert record.overrides["train.smoke"] == "true"
    listed = CliRunner().invoke(app, ["ls"]).stdout
    assert "smoke test: a few updates" in listed
    assert "smoke     a few updates" in CliRunner().invoke(app, ["show", folder.name]).stdout
    with pytest.raises(UsageError, match="is a smoke test, which trained for a few updates"):
        register(folder.name)
    tags = mlflow.MlflowClient(Workspace().resolved_uri(record.tracking_uri)).get_run(record.run_id).data.tags
    assert tags["smoke"] == "true"


def test_records_of_other_runs_are_as_before(tmp_path):
    values = toy(tmp_path, "train.epochs=1").values()
    assert not values["train"].keys() & {"smoke", "overfit_batches"}
    assert "limit" not in values["data"]


# --- the same batches all the time ------------------------------------------------------------------------------------


def drawn(pipeline, updates):
    step = Step(pipeline)
    batches = []
    while pipeline.progress.updates < updates:
        step()
        batches.append(step.batch["words"].clone())
    return batches


@pytest.mark.parametrize("data", ["", "data.augmented=true", "data={kind: toy_words, augmented: true, workers: 1}"])
def test_batches_are_repeated_also_in_a_resumed_run(data, tmp_path):
    sets = ("train.updates=11", "train.overfit_batches=3", *filter(None, [data]))
    batches = drawn(toy_pipeline(tmp_path, *sets), 11)
    for number, batch in enumerate(batches):
        assert torch.equal(batch, batches[number % 3])
    assert not torch.equal(batches[0], batches[1])

    pipeline = toy_pipeline(tmp_path, *sets)
    drawn(pipeline, 4)
    resumed = toy_pipeline(tmp_path, *sets)
    resumed.load_state_dict(kept(pipeline.state_dict()))
    for actual, expected in zip(drawn(resumed, 11), batches[4:], strict=True):
        assert torch.equal(actual, expected)


def test_a_single_batch_is_learned(tmp_path):
    sets = (
        "train.updates=150",
        "train.overfit_batches=1",
        "optimizer.lr=0.1",
        "model.dropout=0.0",
        "train.log_every=30",
    )
    _, notes = trained(tmp_path, toy_pipeline(tmp_path, *sets))
    losses = [value for _, value in notes.points["train/loss"]]
    assert losses[-1] < 0.7 * losses[0]


def test_a_source_without_batches_to_repeat_refuses(tmp_path):
    plugin = tmp_path / "fresh.py"
    plugin.write_text(
        "from toys import Words, WordsConfig\n"
        "class FreshConfig(WordsConfig):\n    '''Draws.'''\n    kind = 'fresh'\n    implementation = 'Fresh'\n"
        "class Fresh(Words):\n    def draw(self, batch_size, progress):\n"
        "        return super().draw(batch_size, progress)\n"
    )
    recipe = load(
        {
            "name": "x",
            "model": {"kind": "toy"},
            "data": {"kind": "fresh"},
            "train": {"updates": 1, "overfit_batches": 1},
        },
        (),
        Registry([TOYS, plugin]),
    )
    with pytest.raises(RecipeError, match=r"train\.overfit_batches: 'fresh' has no batches that could be repeated"):
        assemble(recipe, [TOYS, plugin])


# --- parts of data ----------------------------------------------------------------------------------------------------


class NumbersConfig(DatasetConfig):
    """Numbers."""

    kind = "numbers"
    implementation = "Numbers"
    provides = "numbers"
    form: str = "rows"
    train: int = 10
    held: int = 10


class Listed(torch.utils.data.Dataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {"x": self.numbers[index]}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.tensor(1.0)}] * 9)


class Numbers(DatasetSource):
    def datasets(self, config):
        makers = {"rows": lambda numbers: {"x": numbers}, "listed": Listed, "stream": lambda _: Stream()}
        make = makers[config.form]
        return make(torch.arange(config.train).float()), make(torch.arange(config.held).float())


def source(seed=0, batch_size=4, **settings):
    return Numbers(NumbersConfig(**settings), Context(CPU, Slots(), seed, batch_size))


def samples(numbers):
    """Returns the numbers of one epoch, and those that are held out."""
    batches = numbers._batches(1, 0, epochs_count=False)
    train = sorted(int(next(batches)["x"]) for _ in range(numbers.epoch_samples(1)))
    held_out = [int(value) for batch in numbers.held_out_batches() for value in batch["x"]]
    return train, held_out


@given(
    form=st.sampled_from(["rows", "listed"]),
    counts=st.tuples(st.integers(4, 60), st.integers(1, 60)),
    shares=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)),
)
def test_a_limit_takes_a_share_of_the_samples_of_any_dataset(form, counts, shares):
    limit = LimitConfig(train=shares[0], held_out=shares[1])
    settings = {"form": form, "train": counts[0], "held": counts[1], "limit": limit}
    train, held_out = samples(source(**settings))
    for numbers, count, share in ((train, counts[0], shares[0]), (held_out, counts[1], shares[1])):
        assert len(numbers) == max(math.ceil(share * count), min(4, count))
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) <= set(range(count))
        assert numbers == sorted(numbers)
    assert samples(source(seed=1, **settings)) == (train, held_out)
    assert source(**settings).fingerprint() == source(**{**settings, "limit": None}).fingerprint()


def test_a_stream_has_no_part():
    with pytest.raises(UsageError, match=r"data\.limit\.train: 'numbers' is a stream, whose samples have no numbers"):
        source(form="stream", limit=LimitConfig(train=0.5))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("data.limit={train: 0}", "data.limit.train: should be greater than 0"),
        ("data.limit={train: 1.5}", "data.limit.train: should be less than or equal to 1"),
        ("data.limit={tran: 0.5}", "data.limit.tran: unknown key - did you mean 'train'?"),
        ("data.limit=0.5", "data.limit: should be a mapping"),
        ("train.overfit_batches=0", "train.overfit_batches: should be greater than or equal to 1"),
        ("train.smoke=1", "train.smoke: should be true or false"),
    ],
)
def test_a_mistake_names_its_setting(setting, expected, tmp_path):
    with pytest.raises(RecipeError) as caught:
        toy(tmp_path, "train.updates=1", setting)
    assert expected in str(caught.value)


def test_a_limited_training_is_resumed_to_the_bit(tmp_path, migrated_workspace):
    sets = ("train.updates=6", "data.limit={train: 0.5, held_out: 0.5}")
    complete = toy_pipeline(tmp_path, *sets)
    drawn(complete, 6)
    half = toy_pipeline(tmp_path, *sets)
    drawn(half, 3)
    resumed = toy_pipeline(tmp_path, *sets)
    resumed.load_state_dict(kept(half.state_dict()))
    drawn(resumed, 6)
    for (name, left), (_, right) in zip(
        complete.learner.named_parameters(), resumed.learner.named_parameters(), strict=True
    ):
        assert torch.equal(left, right), name
    result = run(toy(tmp_path, *sets), Registry([TOYS]), Workspace(), NoOutput())
    assert result.status == "FINISHED"
    assert not result.smoke
