import math
import re
from pathlib import Path

import mlflow
import pytest
from interrupted import flat
from running import RECIPES, tiny, train_here

from runner.plugin.registry import Registry
from runner.plugins.stages.amp import AmpConfig
from runner.recipe.loader import load
from runner.recipe.rendering import render
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import DivergedError, UsageError
from runner.tracking import Workspace
from runner.training import checkpoint
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.signals import Stop

pytestmark = pytest.mark.usefixtures("migrated_workspace")
SHIPPED = sorted(path.stem for path in RECIPES.glob("*.yaml"))
BRIEF = ("train.env_steps=88",)
"""Six updates and an evaluation."""


def learnt(result):
    """The metrics that depend on recipe and seed alone."""
    return {name: value for name, value in result.metrics.items() if name.startswith(("train/", "eval/"))}


@pytest.mark.parametrize("name", [name for name in SHIPPED if not name.endswith("phase3")])
def test_every_shipped_recipe_trains_and_is_tracked(name):
    result, recipe = train_here(name), tiny(name)
    client = mlflow.MlflowClient(result.tracking_uri)
    run = client.get_run(result.run_id)
    assert result.status == run.info.status == "FINISHED"
    assert run.data.params["model.kind"] == recipe.model.kind
    assert run.data.tags["recipe.name"] == name
    assert all(report.active or report.reason for report in result.stages)
    assert {report.kind for report in result.stages} == recipe.stages.keys()
    assert all(math.isfinite(value) for value in learnt(result).values())
    assert recipe.headline
    assert {f"eval/{name}" for name in (*recipe.headline, recipe.objective.name)} <= run.data.metrics.keys()
    assert {artifact.path for artifact in client.list_artifacts(result.run_id)} >= {"recipe.lock.yaml", "recipe.yaml"}
    loss = {"masac": "train/critic_loss", "radiance_gan": "train/g_loss"}.get(recipe.model.kind, "train/loss")
    assert len(client.get_metric_history(result.run_id, loss)) >= 2
    # The newest two, and the best if it is neither.
    assert len(checkpoint.checkpoints(Path(result.run_dir) / "checkpoints")) in (2, 3)


def description(result):
    tags = mlflow.MlflowClient(result.tracking_uri).get_run(result.run_id).data.tags
    return dict(line.removeprefix("* **").split("**: ", 1) for line in tags["mlflow.note.content"].splitlines())


def test_a_run_describes_itself(monkeypatch):
    monkeypatch.setattr(AmpConfig, "inactive", lambda *_: None)  # on any processor
    result = train_here("marl_phase2", "seed=3")
    told, digits = description(result), result.run_id[:8]
    assert result.run_name == f"marl_phase2-{digits}"
    assert told["recipe"].startswith("`marl_phase2`, from `")
    assert "`seed=3`" in told["overridden"]
    assert told["stages"] == "`forward_cache`, `merged_critic_loss`, `amp`, `stacked_agents`"
    assert told["inactive"] == "`async_transfer`: nothing to do on a CPU: batches are where they are used"
    assert told["result"].startswith("FINISHED at 120 env_steps; eval/return ")
    assert "test/return " in told["result"]
    assert "continue it" not in told
    assert told["compare it"] == f"`runner compare {digits} OTHER_RUN`"
    tags = mlflow.MlflowClient(result.tracking_uri).get_run(result.run_id).data.tags
    assert tags["kind"] == "run"
    assert "seed=3" in tags["overrides"].split(", ")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in SHIPPED if name.endswith("phase3")])
def test_phase_3_trains_with_everything_but_the_compiler(name):
    result = train_here(name, "optimization.compile=off")
    reports = {report.kind: report for report in result.stages}
    assert reports["fused_optimizer"].active
    assert not reports["cuda_graph"].active
    assert "CUDA" in reports["cuda_graph"].reason


def test_the_same_recipe_and_seed_give_the_same_digits_and_another_seed_others():
    first, second, other = (train_here("marl_phase2", *BRIEF, f"seed={seed}") for seed in (3, 3, 4))
    assert learnt(first) == learnt(second)
    assert learnt(first) != learnt(other)


def test_phase_1_gives_the_same_digits_as_the_baseline():
    assert learnt(train_here("marl_baseline", *BRIEF)) == learnt(train_here("marl_phase1", *BRIEF))


def test_a_pipeline_restored_from_a_checkpoint_holds_the_same_state():
    result = train_here("marl_phase2")
    newest = checkpoint.load(checkpoint.checkpoints(Path(result.run_dir) / "checkpoints")[-1])
    pipeline = assemble(tiny("marl_phase2"))
    pipeline.context.generator("noise"), pipeline.context.generator("policy")
    pipeline.load_state_dict(newest["pipeline"])
    assert flat(pipeline.state_dict()) == flat(newest["pipeline"])


def test_the_best_checkpoint_is_kept():
    sets = ("train.env_steps=240", "train.evaluate_every=40", "train.checkpoint_every=40")
    result = train_here("marl_baseline", *sets)
    kept = checkpoint.checkpoints(Path(result.run_dir) / "checkpoints")
    history = mlflow.MlflowClient(result.tracking_uri).get_metric_history(result.run_id, "eval/return")
    best = max(point.value for point in history)
    scores = {int(path.name.removeprefix("step-")): checkpoint.read_manifest(path)["score"] for path in kept}
    assert best in scores.values()
    assert [point.step for point in history if point.value == best][-1] in scores


BROKEN = """
from runner.api import Exact, Stage, StageConfig

class PoisonConfig(StageConfig):
    "Makes one reward a NaN."
    kind = "poison"
    implementation = "Poison"
    phase = 1
    wraps = frozenset({"transfer"})

    def contract(self, setting):
        return Exact()

class Poison(Stage):
    def attach(self, pipeline):
        def poisoned(step):
            def transfer(batch):
                batch = step(batch)
                batch["reward"] = batch["reward"] * float("nan")
                return batch
            return transfer
        pipeline.slots.wrap("transfer", poisoned)
"""


def test_a_nan_ends_the_run_as_failed_and_names_step_and_tensor(tmp_path):
    plugin = tmp_path / "poison.py"
    plugin.write_text(BROKEN)
    with pytest.raises(DivergedError, match="update 1: tensor 'reward' of the batch"):
        train_here("marl_baseline", "optimization.poison=on", registry=Registry([plugin]))
    client = mlflow.MlflowClient(Workspace().tracking_uri)
    (run,) = client.search_runs([client.get_experiment_by_name("marl").experiment_id])
    assert run.info.status == "FAILED"
    assert re.search(r"\* \*\*result\*\*: FAILED at \d+ env_steps: .*update 1: ", run.data.tags["mlflow.note.content"])
    assert f"`runner resume {run.info.run_name} --plugin " in run.data.tags["mlflow.note.content"]


IGNORES = """
from runner.api import Exact, Stage, StageConfig

class IgnoresConfig(StageConfig):
    "Has a setting that it never reads."
    kind = "ignores"
    implementation = "Ignores"
    phase = 1
    depth: int = 1

    def contract(self, setting):
        return Exact()

class Ignores(Stage):
    def attach(self, pipeline):
        pass
"""


def test_a_value_that_no_plugin_reads_is_an_error(tmp_path):
    plugin = tmp_path / "ignores.py"
    plugin.write_text(IGNORES)
    registry = Registry([plugin])
    train_here("marl_baseline", "train.env_steps=80", "optimization.ignores=on", registry=registry)
    with pytest.raises(RecipeError, match=r"optimization\.ignores\.depth: no plugin reads this value"):
        train_here("marl_baseline", "train.env_steps=80", "optimization.ignores.depth=2", registry=registry)


def test_settings_of_a_stage_without_an_effect_need_not_be_read(tmp_path):
    """Its reason is reported, as without the settings."""
    plugin = tmp_path / "ignores.py"
    plugin.write_text(IGNORES.replace("pass", "pipeline.deactivate('nothing to do')"))
    registry = Registry([plugin])
    result = train_here("marl_baseline", "train.env_steps=80", "optimization.ignores.depth=2", registry=registry)
    (report,) = result.stages
    assert (report.active, report.reason) == (False, "nothing to do")


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="CUDA devices"):
        assemble(tiny("marl_baseline", "device=cuda:7"))


@pytest.mark.usefixtures("copied_children")
def test_batch_autotune_tries_real_steps_in_child_processes():
    sets = ("optimization.batch_autotune={largest: 32, gain: 0.0}", "train.batch_size=16")
    pipeline = assemble(tiny("marl_phase1", *sets))
    (note,) = pipeline.reports["batch_autotune"].notes
    assert 16 <= pipeline.batch_size <= 32  # which one is fastest depends on the machine, and on what else it does
    assert str(pipeline.batch_size) in note


def test_the_speed_of_a_resumed_training_counts_what_it_has_done_itself():
    result = train_here("marl_phase1", "train.log_every=1000")
    state = checkpoint.load(checkpoint.checkpoints(Path(result.run_dir) / "checkpoints")[0])
    recipe = tiny("marl_phase1", "train.log_every=1000")
    loop = Loop(assemble(recipe), Path(result.run_dir), NoOutput(), NoOutput(), Stop())
    loop.load_state_dict(state)
    loop.report()
    assert loop.progress.state_dict() == state["pipeline"]["progress"]
    assert loop.progress.done == state["step"]
    assert (loop.metrics["perf/env_steps_per_second"], loop.metrics["perf/updates_per_second"]) == (0.0, 0.0)
    means = state["means"]
    expected = means["sums"]["critic_loss"] / means["counts"]["critic_loss"]
    assert loop.metrics["train/critic_loss"] == pytest.approx(expected)


def test_a_lock_and_a_printed_recipe_with_defaults_that_nothing_reads_train_the_same_again(tmp_path):
    first = train_here("mlp", "train.epochs=1")
    registry = Registry()
    again = run(load(first.lock, (), registry), registry, Workspace(), NoOutput())
    assert learnt(again) == learnt(first)
    printed = tmp_path / "printed.yaml"
    printed.write_text("\n".join(render(load(first.lock, (), registry).printable())))
    assert learnt(run(load(printed, (), registry), registry, Workspace(), NoOutput())) == learnt(first)
    with pytest.raises(RecipeError, match=r"data\.workers: no plugin reads this value"):
        run(load(first.lock, ["data.workers=1"], registry), registry, Workspace(), NoOutput())
