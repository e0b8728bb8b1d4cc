"""``runner evaluate``: the digits of the run's own evaluation, and pictures where the source draws them."""

import json
import signal
from pathlib import Path

import mlflow
import pytest
from children import start
from PIL import Image
from running import RECIPES, forked, result_of, settings_of, train_here

from runner.recipe.keeping import FEWEST
from runner.training import checkpoint

pytestmark = pytest.mark.usefixtures("migrated_workspace")
OFTEN = {
    "marl": ("train.env_steps=240", "train.evaluate_every=40", "train.checkpoint_every=80"),
    "digits": ("train.epochs=4", "optimizer.lr=0.003"),
    "shakespeare": ("train.evaluate_every=640", "train.ema=0.9"),
    "mamba2": ("train.evaluate_every=640", "train.ema=0.9"),
    **dict.fromkeys(("gcn", "emma", "pgt", "gps", "graphgpt", "grasp", "graf"), ("train.evaluate_every=2",)),
}
"""Settings with which several checkpoints are evaluated, by the beginning of a recipe's name."""


def often(name):
    return next(sets for beginning, sets in OFTEN.items() if name.startswith(beginning))


def history(result, name):
    """Values of a metric by step, spelled out."""
    points = mlflow.MlflowClient(result["tracking_uri"]).get_metric_history(result["run_id"], f"eval/{name}")
    return {point.step: repr(point.value) for point in points}


@pytest.mark.parametrize(
    "name", ["marl_phase2", "marl_spread", "digits_classifier", "shakespeare_gpt", "mamba2_shakespeare"]
)
def test_the_digits_are_those_of_the_run(name):
    trained = train_here(name, *often(name)).data()
    best = result_of(forked("evaluate", trained["run_name"], "--part", "validation", "--json"))
    last = result_of(forked("evaluate", trained["run_dir"], "--checkpoint", "last", "--part", "validation", "--json"))
    assert best["same_digits"] is last["same_digits"] is True
    assert best["metrics"]
    assert (best["step"], best["checkpoint"]) == (trained["best"]["step"], trained["best"]["checkpoint"])
    for metric, value in best["metrics"].items():
        assert history(trained, metric)[best["step"]] == repr(value)
        assert repr(trained["metrics"][f"eval/{metric}"]) == repr(last["metrics"][metric])


@pytest.mark.parametrize("name", ["marl_phase1", "digits_classifier"])
def test_the_best_checkpoint_is_the_one_with_the_best_objective(name):
    result = train_here(name, *often(name))
    best = result.best
    signs = {"marl_phase1": ("return", max), "digits_classifier": ("accuracy", max)}
    metric, choose = signs[name]
    assert best.metric == f"eval/{metric}"
    values = {step: float(value) for step, value in history(result.data(), metric).items()}
    assert best.value == choose(values.values())
    assert best.step == max(step for step, value in values.items() if value == best.value)


def test_the_best_checkpoint_survives_a_kill_and_what_is_written_after_it(tmp_path, migrated_workspace):
    sets = (*settings_of("marl_phase2"), *OFTEN["marl"], "train.checkpoint_every=20", "optimizer.actor.lr=0.3")
    command = ["run", str(RECIPES / "marl_phase2.yaml"), "--quiet", "--json", "--resume"]
    command += [part for setting in sets for part in ("--set", setting)]
    assert start(tmp_path, *command, RUNNER_FAULTS="checkpoint.state=kill@8").wait() == -signal.SIGKILL
    result = start(tmp_path, *command).data()
    assert result["resumed_at"]
    returns = history(result, "return")
    assert result["best"]["value"] == max(map(float, returns.values()))
    assert len(checkpoint.checkpoints(Path(result["run_dir"], "checkpoints"))) <= FEWEST + 1
    evaluated = result_of(forked("evaluate", "latest", "--part", "validation", "--json"))
    assert repr(evaluated["metrics"]["return"]) == returns[result["best"]["step"]]


def test_a_person_sees_the_headline_first_and_what_the_run_measured():
    trained = train_here("marl_phase1", *OFTEN["marl"])
    child = forked("evaluate", trained.run_id[:6])
    assert child.returncode == 0, child.stderr
    title, _, first, *_ = child.stdout.splitlines()
    assert title.startswith(f"{trained.run_name}: step-")
    assert title.endswith("; on the test part")
    assert first.split() == ["success_rate", *first.split()[1:2] * 2]
    assert "\nSame digits as the run's test (" in child.stdout
    assert max(map(len, child.stdout.splitlines())) <= 80
    assert "\x1b[" not in child.stdout


def test_more_and_other_data_are_evaluated_where_the_source_has_them():
    train_here("marl_phase1")
    plain, more, other = (
        result_of(forked("evaluate", "--json", *options)) for options in ((), ("--size", "7"), ("--seed", "3"))
    )
    assert plain["same_digits"] is True
    assert more["same_digits"] is other["same_digits"] is False
    assert len({repr(each["metrics"]) for each in (plain, more, other)}) == 3
    assert plain["recorded"] == more["recorded"] == other["recorded"]
    child = forked("evaluate", "--set", "data.evaluation.episodes=7", "--json")
    assert json.loads(child.stdout)["metrics"] == more["metrics"]
    assert "drift: recipe.data.evaluation.episodes: 5 in the lock, 7 now" in child.stderr


def problems(child):
    """What was said beside how it goes."""
    return [line for line in child.stderr.splitlines() if not line.startswith("runner evaluate: ")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--size", "7"], "error: --size: 'digits' has no such setting; it always evaluates the same data"),
        (["--seed", "7"], "error: --seed: 'digits' has no such setting; it always evaluates the same data"),
        (["--render", "x.png"], "error: 'digits' has no picture of its evaluation to draw"),
        (["nothing"], "error: no run 'nothing' in "),
        (["optimizer.lr=1"], "error: optimizer.lr=1: an evaluation does not use 'optimizer'; only a training uses it"),
        (
            ["train.epochs=9"],
            "error: train.epochs=9: of 'train', an evaluation uses train.batch_size and train.ema only",
        ),
        (
            ["--set", "train={epochs: 9}"],
            "error: train={epochs: 9}: of 'train', an evaluation uses train.batch_size and train.ema only",
        ),
        (["tracking.experiment=a"], "error: tracking.experiment=a: an evaluation does not use 'tracking'; "),
        (
            ["--set", "inference={quantise: on}"],
            "error: inference={quantise: on}: an evaluation does not use 'inference'; "
            "runner verify RECIPE --of RUN compares the model with and without these stages",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(options, said):
    train_here("digits_classifier", "train.epochs=1")
    child = forked("evaluate", *options)
    assert (child.returncode, child.stdout) == (2, "")
    (line,) = problems(child)
    assert line.startswith(said)


def test_a_run_without_a_checkpoint_ends_with_its_own_code(migrated_workspace):
    result = train_here("digits_classifier", "train.epochs=1")
    for path in checkpoint.checkpoints(Path(result.run_dir, "checkpoints")):
        path.rename(path.with_name(f"away-{path.name}"))
    child = forked("evaluate")
    assert child.returncode == 7
    assert f"run {result.run_name} has no checkpoint that can be used" in child.stderr


def test_flights_are_drawn_as_png_and_as_gif(tmp_path):
    train_here("marl_phase2", "data.episode_limit=6")  # a frame for every step
    for name, frames in (("flights.png", 1), ("flights.gif", 2)):
        path = tmp_path / name
        result = result_of(forked("evaluate", "--render", str(path), "--json"))
        assert (result["picture"], result["same_digits"]) == (str(path), True)
        with Image.open(path) as picture:
            assert picture.format.lower() == path.suffix[1:]
            assert getattr(picture, "n_frames", 1) >= frames
            assert len(picture.convert("RGB").getcolors(2**20)) > 10
    for wrong, said in (
        (tmp_path / "flights.jpg", "draws .gif or .png, not 'flights.jpg'"),
        (tmp_path / "missing" / "flights.png", "no such folder"),
    ):
        child = forked("evaluate", "--render", str(wrong))
        assert child.returncode == 2
        (line,) = problems(child)
        assert said in line
