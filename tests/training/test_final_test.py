"""The test part: measured once, by the best checkpoint, and without effect on anything else."""

import math
from pathlib import Path
from signal import SIGTERM
from types import MappingProxyType

import pytest
import torch
from interrupted import flat
from running import tiny, train_here
from toy_runs import RECIPE, TOYS
from toys import LENGTH, WORDS, WordsConfig

import runner
from runner.api import DatasetSource
from runner.plugin.registry import Registry
from runner.plugins.marl import simulator
from runner.recipe.loader import load
from runner.recipe.smoke import smoke_assignments
from runner.system.errors import RunnerError, UsageError
from runner.tracking import RunFolder, Workspace
from runner.tracking.spool import lines
from runner.training import checkpoint, run
from runner.training.evaluate import evaluate
from runner.training.evaluation import evaluated
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble

pytestmark = pytest.mark.usefixtures("migrated_workspace")
OFTEN = MappingProxyType({"train.updates": 12, "train.evaluate_every": 3, "train.checkpoint_every": 3})


class ThreePartsConfig(WordsConfig):
    """Sentences with test data of their own."""

    kind = "toy_three_parts"
    implementation = "ThreeParts"

    held_out_seed: int = 1
    """Of the words that evaluations read."""
    test_seed: int = 2
    """Of the words that the test reads."""


class ThreeParts(DatasetSource):
    def datasets(self, config):
        def words(seed, rows):
            generator = torch.Generator().manual_seed(seed)
            return {"words": torch.randint(WORDS, (rows, LENGTH), generator=generator)}

        return words(0, 40), words(config.held_out_seed, 10), words(config.test_seed, 10)


ThreePartsConfig.implementation = ThreeParts
PLUGINS = [TOYS, ThreePartsConfig]


@pytest.fixture
def train(tmp_path):
    """Trains a learner on the three parts."""

    def trained(model="toy", data="toy_three_parts", **sets):
        path = tmp_path / "toy.yaml"
        text = RECIPE.replace("kind: toy}", f"kind: {model}}}").replace("toy_words", data)
        path.write_text(text if model == "toy" else text.replace("optimizer: {lr: 1e-2}\n", ""))
        return runner.train(path, set=OFTEN | sets, plugins=PLUGINS)

    return trained


def named(result, prefix):
    return {name.removeprefix(prefix): value for name, value in result.metrics.items() if name.startswith(prefix)}


def states(result):
    """Learner and source in every checkpoint, with the bits of every tensor."""
    folder = Path(result.run_dir) / "checkpoints"
    return {path.name: flat(checkpoint.load(path)["pipeline"]) for path in checkpoint.checkpoints(folder)}


def logged(run_dir, prefix):
    """Values by name and step, in the order in which they were logged."""
    return [
        (name, line.step, value)
        for line, _ in lines(RunFolder(Path(run_dir)).spool)
        for name, value in line.metrics.items()
        if name.startswith(prefix)
    ]


@pytest.mark.parametrize("model", ["toy", "toy_pair"])
def test_test_data_change_nothing_but_the_test_and_validation_data_what_is_selected(model, train):
    first, other = train(model), train(model, **{"data.test_seed": 9})
    assert states(first) == states(other)
    for prefix in ("train/", "eval/"):
        assert named(first, prefix) == named(other, prefix)
    assert logged(first.run_dir, "eval/") == logged(other.run_dir, "eval/")
    if first.best is not None:
        assert (first.best.step, first.best.value) == (other.best.step, other.best.value)
    assert named(first, "test/").keys() == named(first, "eval/").keys()
    assert named(first, "test/") != named(other, "test/")

    # Validation data change only what is selected.
    other = train(model, **{"data.held_out_seed": 9})
    assert named(first, "train/") == named(other, "train/")
    assert logged(first.run_dir, "eval/") != logged(other.run_dir, "eval/")
    last = max(states(first))
    assert states(first)[last] == states(other)[last]


def test_episodes_of_a_test_are_others_and_change_nothing(monkeypatch):
    first = train_here("marl_baseline")
    monkeypatch.setattr(simulator, "TEST_SEED_OFFSET", 7)
    other = train_here("marl_baseline")
    assert states(first) == states(other)
    for prefix in ("train/", "eval/"):
        assert named(first, prefix) == named(other, prefix)
    assert named(first, "test/") != named(other, "test/")
    assert named(first, "test/") != named(first, "eval/")


def test_the_best_checkpoint_is_tested_once(train):
    result = train()
    assert result.untested is None
    assert len(logged(result.run_dir, "eval/loss")) == 4
    assert logged(result.run_dir, "test/") == [("test/loss", 12, result.metrics["test/loss"])]
    folder = RunFolder(Path(result.run_dir))
    assert folder.record().metrics["test/loss"] == result.metrics["test/loss"]

    registry = Registry(PLUGINS)
    recipe = load(Path(result.lock), (), registry)
    again = evaluate(recipe, registry, folder)
    assert (again.part, again.same_digits, again.step) == ("test", True, result.best.step)
    assert again.metrics == named(result, "test/")
    selected = evaluate(recipe, registry, folder, part="validation")
    assert (selected.part, selected.same_digits) == ("validation", True)
    assert selected.metrics["loss"] == result.best.value
    if result.best.step != 12:
        assert evaluate(recipe, registry, folder, "last").recorded is None


def test_a_test_after_which_the_run_fails_is_resumed_and_logged_once(train, monkeypatch):
    failing = {"run.tested"}

    def reach(point, *_):
        if point in failing:
            failing.clear()
            raise RunnerError("the machine is gone")

    monkeypatch.setattr(run, "reach", reach)
    with pytest.raises(RunnerError, match="the machine is gone"):
        train()
    (folder,) = (RunFolder(path) for path in Workspace().runs.iterdir() if path.is_dir())
    assert folder.record().status == "FAILED"
    tested = logged(folder.path, "test/")
    assert len(tested) == 1

    result = resumed(folder)
    assert result.status == "FINISHED"
    assert logged(folder.path, "test/") == tested
    assert result.metrics["test/loss"] == tested[0][2]


def test_a_failing_test_leaves_a_model_and_is_repeated_by_a_resumed_run(train, monkeypatch):
    measure = ThreeParts.testing

    def failing(source):
        raise UsageError("no such disk")

    monkeypatch.setattr(ThreeParts, "testing", failing)
    with pytest.raises(UsageError, match="no such disk"):
        train()
    (folder,) = (RunFolder(path) for path in Workspace().runs.iterdir() if path.is_dir())
    assert folder.record().status == "FAILED"
    assert (folder.path / "model").is_dir()
    monkeypatch.setattr(ThreeParts, "testing", measure)
    assert resumed(folder).metrics["test/loss"] == train().metrics["test/loss"]
    assert len(logged(folder.path, "test/")) == 1


def test_a_stopped_run_is_not_tested_and_a_resumed_one_is(train, monkeypatch):
    measure = Loop.evaluate

    def stopping(loop):
        measure(loop)
        if loop.progress.updates == 6:
            loop.stop.received = SIGTERM

    monkeypatch.setattr(Loop, "evaluate", stopping)
    result = train()
    assert (result.status, result.untested) == ("STOPPED", "the training is not finished")
    assert not named(result, "test/")
    monkeypatch.setattr(Loop, "evaluate", measure)
    complete = resumed(RunFolder(Path(result.run_dir)))
    assert named(complete, "test/") == named(train(), "test/")
    assert len(logged(result.run_dir, "test/")) == 1


def resumed(folder):
    registry = Registry(PLUGINS)
    recipe = load(folder.path / "recipe.lock.yaml", (), registry)
    return run.run(recipe, registry, Workspace(), NoOutput(), folder)


def test_a_run_without_a_test_part_reports_why(train):
    result = train(data="toy_words")
    assert "results are of the data that selected the best checkpoint; data.test=0.5 sets half" in result.untested
    registry, folder = Registry(PLUGINS), RunFolder(Path(result.run_dir))
    recipe = load(Path(result.lock), (), registry)
    with pytest.raises(UsageError, match="--part test: 'toy_words' has no test part; use --part validation"):
        evaluate(recipe, registry, folder, part="test")
    assert train(data="toy_words", **{"train.evaluate_every": None}).untested == "the data have no test part"
    half = train(data="toy_words", **{"data.test": 0.5})
    assert math.isfinite(half.metrics["test/loss"])
    assert named(half, "train/") == named(result, "train/")


def test_a_smoke_test_measures_no_test_part():
    recipe = tiny("marl_baseline")
    result = train_here("marl_baseline", *smoke_assignments(recipe))
    assert result.untested == "a smoke test measures no result"
    assert not named(result, "test/")


@pytest.mark.parametrize("name", ["gcn_cora", "pgt_cora", "gps_esol", "graphgpt_esol"])
def test_published_parts_select_and_test(name):
    """What was evaluated with ``held_out: test`` is what the best checkpoint is tested on."""
    divided, published = (assemble(tiny(name, f"data.held_out={part}")) for part in ("validation", "test"))
    batches = [pipeline.source.draw(pipeline.batch_size, pipeline.progress) for pipeline in (divided, published)]
    assert flat(batches[0]) == flat(batches[1])
    assert evaluated(divided) != evaluated(divided, "test")
    assert evaluated(divided, "test") == evaluated(published)
    assert divided.source.has_test()
    assert not published.source.has_test()


@pytest.mark.parametrize("name", ["digits_classifier", "graf", "grasp_diffusion"])
def test_a_share_of_what_a_family_holds_out_is_tested(name):
    """The batches of the training stay, and the two parts have different samples."""
    divided, complete = (assemble(tiny(name, *sets)) for sets in (("data.test=0.5",), ()))
    batches = [pipeline.source.draw(pipeline.batch_size, pipeline.progress) for pipeline in (divided, complete)]
    assert flat(batches[0]) == flat(batches[1])
    source = divided.source
    with source.testing():
        tested = samples(source)
    assert tested
    validated = samples(source)
    assert validated
    assert not tested & validated
    assert evaluated(divided) != evaluated(divided, "test")


def samples(source):
    """The samples of the held-out part, as texts; of views the azimuths, of grasps those of every scene."""
    texts = set()
    for batch in source.held_out_batches():
        if "grasp" in batch:
            turned_back = batch["grasp"].flatten(0, 1)
            texts |= {repr(row[:3].tolist()) for row in turned_back}
        elif "pose" in batch:
            poses = zip(batch["label"].tolist(), batch["pose"][:, 0].tolist(), strict=True)
            texts |= {f"{label} {azimuth:.4f}" for label, azimuth in poses}
        else:
            texts |= {repr(row.tolist()) for row in next(iter(batch.values()))}
    return texts


def test_the_grasps_of_the_unseen_cube_are_divided_too():
    source = assemble(tiny("grasp_diffusion", "data.test=0.5")).source
    unseen = source.unseen
    with source.testing():
        assert not torch.equal(source.unseen["grasp"], unseen["grasp"])
    assert source.unseen is unseen


def test_the_end_of_a_text_is_tested():
    """A text repeats itself, so what is predicted is compared in its order."""
    divided, complete = (assemble(tiny("shakespeare_gpt", *sets)).source for sets in (("data.test=0.3",), ()))
    validated = predicted(divided)
    with divided.testing():
        tested = predicted(divided)
    assert validated + tested == predicted(complete)
    assert len(tested) == pytest.approx(0.3 * len(validated + tested), abs=2)


def predicted(source):
    """The tokens that an evaluation predicts, in order."""
    windows = [row for batch in source.held_out_batches() for row in batch["tokens"]]
    return torch.cat([row[1:] for row in windows]).tolist()
