"""Every setting that is changed when a run is resumed is applied, or refused in one line."""

import re
from pathlib import Path

import pytest
from mlflow import MlflowClient
from toy_runs import TOYS, Notes, toy, toy_pipeline, trained

from runner.plugin.lr_scheduler import LinearConfig
from runner.plugin.optimizer import kinds, settings_of
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import drift, read_lock
from runner.recipe.recipe import Head, TrackingConfig, TrainConfig
from runner.recipe.resumption import refuse_fixed, rows, table
from runner.system.errors import UsageError
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking import RunFolder, Workspace
from runner.training.checkpoint import load as load_checkpoint
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.signals import Stop

PAGE = Path(__file__).parents[2] / "docs" / "resume.md"
BASE = ("train.epochs=4", "train.ema=0.9", "train.evaluate_every=2", "train.checkpoint_every=2")
BASE += ("optimizer={kind: adamw, lr: 1e-2, weight_decay: 0.1}", "lr_scheduler={kind: linear, floor: 0.1}")


def test_the_page_has_the_table_of_all_settings():
    shown = PAGE.read_text().partition("<!-- table -->\n")[2].partition("<!-- end -->")[0]
    assert shown.strip() == table(Registry()).strip()


def test_the_table_has_every_setting():
    paths = {path for path, _ in rows(Registry())}
    for prefix, config in (("train.", TrainConfig), ("tracking.", TrackingConfig), ("optimizer.", settings_of("sgd"))):
        assert {prefix + name for name in config.model_fields} <= paths
    assert Head.model_fields.keys() - {"tracking", "serve", "system"} <= paths
    assert {"model.kind", "data.kind", "model[gpt].width", "optimization.amp.dtype", "data[text].context"} <= paths


def half_way(folder, *sets):
    """What a checkpoint in the middle of a training holds."""
    states = []
    pipeline = toy_pipeline(folder, *BASE, *sets)
    notes = Notes()
    loop = Loop(pipeline, folder / "half", notes, notes, Stop())
    save = loop.writer.save

    def keep(step, state, score, done, scores):
        save(step, state, score, done, scores)
        loop.writer.wait()
        states.append(loop.writer.newest())

    loop.writer.save = keep
    loop.run()
    return load_checkpoint(states[0]), pipeline.recipe.values()


def resumed(folder, state, before, *sets):
    """A training that goes on from there with other settings to its end."""
    recipe = toy(folder, *BASE, *sets)
    refuse_fixed(before, recipe)
    pipeline = toy_pipeline(folder, *BASE, *sets)
    notes = Notes()
    loop = Loop(pipeline, folder / "resumed", notes, notes, Stop())
    loop.load_state_dict(state)
    loop.run()
    return loop, notes


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    state, before = half_way(folder)
    loop, notes = resumed(folder, state, before)
    return folder, state, before, loop.metrics["eval/loss"], notes


APPLIED = [
    "optimizer.lr=0.05", "optimizer.weight_decay=5.0", "optimizer.betas=[0.1, 0.1]", "optimizer.eps=0.1",
    "optimizer.max_grad_norm=0.001", "lr_scheduler.kind=constant", "lr_scheduler.floor=1.0",
    "lr_scheduler.warmup=0.9", "train.ema=0.5", "train.epochs=6", "model.dropout=0.9", "data.augmented=true",
    "optimizer.maximize=true",
]  # fmt: skip


@pytest.mark.parametrize("change", APPLIED)
def test_a_setting_that_is_applied_changes_what_is_trained(change, half):
    folder, state, before, unchanged, _ = half
    loop, _ = resumed(folder, state, before, change)
    assert loop.metrics["eval/loss"] != unchanged


@pytest.mark.parametrize(
    ("change", "name", "points"),
    [
        ("train.evaluate_every=1", "eval/loss", 2),
        ("train.log_every=1", "train/loss", 2),
        ("train.checkpoint_every=1", "perf/checkpoint_ms", 2),
    ],
)
def test_an_interval_that_is_applied_changes_what_is_logged(change, name, points, half):
    folder, state, before, unchanged, _ = half
    loop, notes = resumed(folder, state, before, change)
    assert len(notes.points[name]) == points
    assert loop.metrics["eval/loss"] == unchanged


@pytest.mark.parametrize("sets", [("optimization.gradient_accumulation={micro_batch: 4}",), ("device=cpu",)])
def test_a_stage_that_is_switched_on_or_off_is_applied(sets, half):
    folder, state, before, unchanged, _ = half
    loop, _ = resumed(folder, state, before, *sets)
    assert loop.metrics["eval/loss"] == pytest.approx(unchanged, rel=1e-4)
    assert set(loop.pipeline.stages) == {each.split(".")[1].partition("=")[0] for each in sets if "optim" in each}


REFUSED = {
    "name=other": "it names the run's folder",
    "seed=6": "random numbers",
    "model.kind=toy_misspelt": "another model",
    "train.batch_size=4": "counted in batches",
    "train.ema=null": "has the averages or it does not",
    "optimizer={kind: sgd, lr: 1e-2}": "is not valid for another",
    "optimizer.spare=[biases]": "parameter groups",
    "optimizer.weight_decay=0": "parameter groups",
    "optimizer.amsgrad=true": "what the optimizer keeps",
    "tracking.experiment=other": "that experiment",
    "system.threads=7": "keeps its number of threads",
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_setting_that_cannot_change_is_refused_in_one_line(change, half):
    folder, _, before, _, _ = half
    with pytest.raises(UsageError, match=REFUSED[change]) as error:
        refuse_fixed(before, toy(folder, *BASE, change))
    assert re.match(r"[\w.]+: .+ cannot become .+; start a new run", str(error.value))
    assert "\n" not in str(error.value)


def test_another_unit_is_refused(half):
    folder, _, before, _, _ = half
    train = {name: value for name, value in before["train"].items() if name != "epochs"}
    with pytest.raises(UsageError, match=r"^train\.\w+: .*one unit"):
        refuse_fixed(before | {"train": train | {"updates": 20}}, toy(folder, *BASE))


def refusal(before, recipe):
    """Why a recipe cannot be resumed with; empty if it can."""
    try:
        refuse_fixed(before, recipe)
        assemble(recipe, [TOYS])
    except UsageError as error:
        return str(error)
    return ""


def other(value):
    """Another value of the same kind; None if there is none that any optimizer accepts."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value / 2 if value else 0.5
    return [other(item) for item in value] if isinstance(value, tuple) and None not in value else None


OF_OPTIMIZERS = [
    (kind, name)
    for kind in kinds()
    if kind not in ("sparseadam", "muon")  # which do not take these parameters
    for name in settings_of(kind).model_fields
]


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("kind", "name"), OF_OPTIMIZERS)
def test_every_setting_of_every_optimizer_is_applied_or_refused(kind, name, tmp_path):
    value = other(getattr(settings_of(kind)(lr=0.01), name))
    if value is None:
        return
    base = f"optimizer={{kind: {kind}, lr: 0.01}}"
    sets = (base, f"optimizer.{name}={value}".replace("True", "true").replace("False", "false"))
    first = toy_pipeline(tmp_path, "train.updates=1", base)
    loop, _ = trained(tmp_path, first)
    try:
        recipe = load(tmp_path / "toy.yaml", ["train.updates=1", *sets], Registry(first.plugin_files))
    except UsageError:
        return  # no recipe can have it
    reason = refusal(first.recipe.values(), recipe)
    if reason:
        # One that torch refuses is shown where it was written.
        assert reason.removeprefix("override: ").startswith((f"optimizer.{name}: ", "optimizer: torch.optim."))
        return
    second = assemble(recipe, first.plugin_files)
    second.load_state_dict(loop.state_dict()["pipeline"])
    for _, optimizer in second.learner.optimizers():
        for group in optimizer.param_groups:
            spared = name == "weight_decay" and group[name] == 0
            assert spared or group[name] == (tuple(value) if isinstance(value, list) else value)
    second.learner.update(second.source.draw(8, second.progress), {}, second.progress)  # with the state that it has


def test_a_fixed_setting_of_a_plugin_is_refused():
    paths = dict(rows(Registry()))
    assert paths["data[uav_path_planning].warmup"].action == "refused"
    assert paths["data[uav_path_planning].episode_limit"].action == "applied"
    assert paths["optimization.batch_autotune"].action == "refused"
    assert LinearConfig.model_fields.keys() <= {path.rpartition(".")[2] for path in paths}


CHANGED = {
    "optimizer.lr": (0.01, 0.05),
    "optimizer.weight_decay": (0.1, 0.2),
    "optimizer.betas": ([0.9, 0.999], [0.5, 0.9]),
    "train.ema": (0.9, 0.5),
    "model.dropout": (0.25, 0.5),
}
"""Settings with what they are before and after a resumption."""


@pytest.mark.usefixtures("migrated_workspace")
def test_lock_list_and_mlflow_have_the_values_that_are_trained(tmp_path):
    registry, workspace = Registry([TOYS]), Workspace()
    base = ("train.updates=4", "lr_scheduler.kind=constant", "optimizer.weight_decay=0.1", "train.ema=0.9")
    first = run(toy(tmp_path, *base), registry, workspace, NoOutput())
    folder = RunFolder(Path(first.run_dir))
    lock = folder.path / LOCK_NAME
    changed = load(lock, ["train.updates=8", *(f"{path}={value}" for path, (_, value) in CHANGED.items())], registry)
    drifts = [f"recipe.{path}: {before} in the lock, {now} now" for path, (before, now) in CHANGED.items()]
    second = run(changed, registry, workspace, NoOutput(), folder, drifts)
    assert second.resumed_at == 4
    locked, until = read_lock(lock), read_lock(folder.path / "until-4.lock.yaml")["recipe"]
    assert locked["recipe"]["train"]["updates"] == 8
    assert not [each for each in drift(lock, load(lock, [], registry), registry) if each.matters]
    record = folder.record()
    assert (record.digest, record.goal) == (changed.digest, 8)
    tags = MlflowClient(first.tracking_uri).get_run(first.run_id).data.tags
    assert tags["recipe.digest"] == changed.digest
    for path, (before, now) in CHANGED.items():
        section, name = path.split(".")
        assert (until[section][name], locked["recipe"][section][name]) == (before, now)
        assert locked["origins"][path].startswith("override")
        assert record.overrides[path] == str(now)
        assert tags[f"changed.{path}"] == f"{before} until step 4, then {now}"
