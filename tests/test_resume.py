"""A run that is killed, at random moments and inside a save, comes out bit for bit like one that was not."""

import json
import shutil
import signal
import time

import pytest
from children import start
from interrupted import arguments, learnt, same, survives, train
from running import TRAINED, host_of, shipped, with_requirements
from toy_runs import written

from runner.plugin.registry import Registry
from runner.system.faults import POINTS
from runner.training import checkpoint

pytestmark = pytest.mark.usefixtures("migrated_workspace")
INSIDE = {
    "graf": "graf_memory", "grasp_latent": "grasp_diffusion",
    "marl_phase1": "marl_phase2", "marl_phase2": "marl_phase3",
    "shakespeare_gpt": "shakespeare_gpt_phase3", "mamba2_shakespeare": "mamba2_shakespeare_phase3",
}  # fmt: skip
"""Recipes all of whose stages are in another of the same model and data, which is killed for both."""
SHIPPED = sorted({*TRAINED} - INSIDE.keys())
STAGES = Registry().kinds("optimization")
CHEAP = {name: ("optimization.compile=off",) for name in SHIPPED if name.endswith("phase3")}
IN_SAVE = ("checkpoint.tensors=torn@2", "checkpoint.state=kill@2", "checkpoint.synced=kill@2", "checkpoint.pruned=kill")
OFTEN = ("train.log_every=12", "train.checkpoint_every=40")
KILLED_AT_RANDOM = {"marl_phase3", "digits_classifier"}
"""Also at a moment outside of a save: a simulator and a dataset; how a loop does that is no matter of a recipe."""
LONG = {
    "marl": ("train.env_steps=160", *OFTEN),
    **dict.fromkeys(("digits", "mlp"), ("train.epochs=4",)),
    **dict.fromkeys(("shakespeare", "gpt2"), ("train.tokens=5120", "train.log_every=128")),
    "mamba2": ("train.tokens=5120", "train.log_every=128"),
    **dict.fromkeys(("gcn", "emma"), ("train.epochs=12",)),
    **dict.fromkeys(("pgt", "gps", "graphgpt", "grasp", "cloud", "graf", "conv", "recall"), ("train.updates=12",)),
}
"""By the beginning of a recipe's name."""
SHORT = ("data.limit={train: 0.3, held_out: 0.2}", "train.epochs=4", "train.checkpoint_every=1")
"""Few samples: of a run that is killed at many points, only the number of checkpoints matters."""


def long_enough(name):
    return next(sets for beginning, sets in LONG.items() if name.startswith(beginning))


@pytest.mark.parametrize(("name", "other"), INSIDE.items())
def test_a_recipe_that_is_not_killed_is_inside_another(name, other):
    assert shipped(name).stages.keys() <= shipped(other).stages.keys()
    assert type(shipped(name).data) is type(shipped(other).data)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_that_ships_survives_kills(name, tmp_path, isolated_workspace):
    """The last checkpoints are compared too, so what is restored is also what is saved again."""
    command = arguments(name, *long_enough(name), *CHEAP.get(name, ()))
    kills = int(name in KILLED_AT_RANDOM)
    survives(tmp_path, command, isolated_workspace, kills, [IN_SAVE[SHIPPED.index(name) % len(IN_SAVE)]])


ON_IN_A_RECIPE = {kind for name in SHIPPED for kind in shipped(name).stages}
SEARCHED = {"algorithm_search", "plan_cache"}
"""Two runs select other algorithms; ``vision/test_search_stages.py`` kills them."""
KILLED_ELSEWHERE = {"compile", "bucketing", "propagation_cache", "merged_guidance", *SEARCHED}
"""They keep nothing that a training changes: ``experiments/soak`` kills them."""
INACTIVE = {"activation_offload", "compressed_gradients", "fsdp", "sample_cache", "synchronized_batch_norm"}
"""Inactive with all recipes that ship, in one process and with small models: ``experiments/scale/kills.py`` kills those
of several processes; the others keep nothing that a training changes.
"""


TOGETHER = (
    ("ray_cache", "merged_discriminator", "lazy_r1"),
    ("delete_tensors", "empty_cache", "set_to_none"),
    ("conv_backend", "workspace_pool"),
    ("walk_cache", "sorted_evaluation"),
)
"""Stages that work with the same recipe and are killed in one training."""
ALONE = [kind for kind in STAGES if kind not in ON_IN_A_RECIPE | KILLED_ELSEWHERE | INACTIVE | {*sum(TOGETHER, ())}]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kinds", [*((kind,) for kind in ALONE), *TOGETHER], ids="+".join)
def test_stages_that_no_recipe_switches_on_survive_kills(kinds, tmp_path, isolated_workspace):
    name = host_of(kinds[0])
    sets = [value for kind in kinds for value in with_requirements(kind, name)]
    moment = IN_SAVE[STAGES.index(kinds[0]) % len(IN_SAVE)]
    survives(tmp_path, arguments(name, *long_enough(name), *sets), isolated_workspace, 0, [moment])


TOYS_SETS = {
    "schedule, groups and averages": (
        "optimizer={kind: adamw, lr: 1e-2, weight_decay: 0.1, max_grad_norm: 1.0}",
        "lr_scheduler={kind: cosine, warmup: 0.1, floor: 0.1}",
        "train={epochs: 60, batch_size: 8, ema: 0.9, log_every: 7, evaluate_every: 11, checkpoint_every: 5}",
    ),
    "one cycle of SGD on augmented samples": (
        "optimizer={kind: sgd, lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 1e-3, spare: [biases]}",
        "lr_scheduler={kind: one_cycle}",
        "train={tokens: 7200, batch_size: 8, ema: 0.5, log_every: 500, evaluate_every: 1000, checkpoint_every: 400}",
        "data.augmented=true",
    ),
}


@pytest.mark.parametrize("name", TOYS_SETS)
def test_a_module_and_a_loss_survive_kills(name, tmp_path, isolated_workspace):
    command = [*written(tmp_path, *TOYS_SETS[name]), "--resume"]
    survives(tmp_path, command, isolated_workspace, 2, ["checkpoint.state=kill@4", "checkpoint.synced=kill@3"])


@pytest.mark.parametrize(
    ("length", "shown"),
    [("epochs: 20, checkpoint_every: 3", "9/20 epochs"), ("samples: 800", "0/800 samples")],
)
def test_the_list_of_runs_shows_what_a_killed_one_can_go_on_from(length, shown, tmp_path, isolated_workspace):
    command = written(tmp_path, f"train={{{length}, batch_size: 8, log_every: 1000}}")
    fault = "checkpoint.pruned=kill@3" if "checkpoint" in length else "checkpoint.begin=kill"
    assert start(tmp_path, *command, RUNNER_FAULTS=fault).wait() == -signal.SIGKILL
    (run,) = isolated_workspace.glob("runs/*")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"step": 0}))  # as if it had died before its first heartbeat
    look = start(tmp_path, "ls", COLUMNS="200")
    assert look.wait() == 0, look.stderr
    assert shown in look.stdout
    assert "KILLED" in look.stdout


@pytest.fixture(scope="session")
def train_elsewhere(tmp_path_factory, migrated_database):
    """Returns what a command's training results in that nothing interrupts, in a workspace of its own."""

    def train_elsewhere(command):
        root = tmp_path_factory.mktemp("uninterrupted")
        (root / "workspace").mkdir()
        (root / "workspace" / "mlflow.db").write_bytes(migrated_database.read_bytes())
        return learnt(train(root, command, RUNNER_WORKSPACE=str(root / "workspace")))

    return train_elsewhere


@pytest.fixture(scope="session")
def uninterrupted(train_elsewhere):
    """What the short run that the tests below interrupt comes to."""
    return train_elsewhere(SHORT_RUN)


SHORT_RUN = arguments("mlp", *SHORT, "data.test=0.5")
RUN_WITH_BUFFER = arguments("marl_phase1", "train.env_steps=120", "train.checkpoint_every=40")
OF_BUFFER = "checkpoint.segment"
"""The point at which rows of a replay buffer are written, which the short run does not have."""
SEVERAL = {"checkpoint", "spool", "ship"}
"""What is passed more than once in a run."""


WRITING = ("spool.append", "checkpoint.tensors", "checkpoint.segment", "checkpoint.state", "checkpoint.manifest")
"""Points with a file that can be torn."""
ELSEWHERE = {"resume.loaded", "tuning.stored"}
"""Points that this run does not pass; ``training/test_tuned_runs.py`` kills there."""
ACTIONS = [*((each, "kill") for each in POINTS if each[:6] != "study."), *((each, "torn") for each in WRITING)]


@pytest.mark.parametrize(("point", "action"), [each for each in ACTIONS if each[0] not in {*ELSEWHERE, OF_BUFFER}])
def test_a_kill_at_any_point_leaves_a_run_that_resumes(point, action, tmp_path, isolated_workspace, uninterrupted):
    resumes_after(point, action, SHORT_RUN, uninterrupted, tmp_path, isolated_workspace)


def test_a_kill_while_a_buffer_is_written_leaves_a_run_that_resumes(tmp_path, isolated_workspace, train_elsewhere):
    expected = train_elsewhere(RUN_WITH_BUFFER)
    for point, action in (each for each in ACTIONS if each[0] == OF_BUFFER):
        resumes_after(point, action, RUN_WITH_BUFFER, expected, tmp_path, isolated_workspace)
        shutil.rmtree(isolated_workspace / "runs")


def resumes_after(point, action, command, expected, tmp_path, workspace):
    """Asserts that a training that is killed at a point leaves a run that resumes, and comes to what is expected."""
    visit = 2 if point.partition(".")[0] in SEVERAL else 1
    assert start(tmp_path, *command, RUNNER_FAULTS=f"{point}={action}@{visit}").wait() == -signal.SIGKILL
    (run,) = workspace.glob("runs/*")
    if point.startswith("checkpoint."):
        assert checkpoint.load_newest(run / "checkpoints") is not None
    same(learnt(train(tmp_path, command)), expected)


def test_a_resumed_run_that_is_killed_at_once_resumes(tmp_path, uninterrupted):
    assert start(tmp_path, *SHORT_RUN, RUNNER_FAULTS="checkpoint.renamed=kill@2").wait() == -signal.SIGKILL
    assert start(tmp_path, *SHORT_RUN, RUNNER_FAULTS="resume.loaded=kill").wait() == -signal.SIGKILL
    same(learnt(train(tmp_path, SHORT_RUN)), uninterrupted)


ENDS = [(signal.SIGTERM, "false", 143), (signal.SIGINT, "false", 130), (signal.SIGTERM, "true", 75)]


@pytest.mark.parametrize(("number", "preemptible", "code"), ENDS)
def test_a_signal_ends_the_run_after_a_checkpoint(
    number, preemptible, code, tmp_path, isolated_workspace, uninterrupted
):
    command = [*SHORT_RUN, "--set", f"train.preemptible={preemptible}"]
    child = stopped(tmp_path, command, isolated_workspace, number)
    assert child.wait() == code
    result = json.loads(child.stdout)
    assert result["status"] == ("PREEMPTED" if code == 75 else "STOPPED")
    (run,) = isolated_workspace.glob("runs/*")
    state = checkpoint.load_newest(run / "checkpoints")
    assert 0 < state["step"] == json.loads((run / "run.json").read_text())["step"]
    same(learnt(train(tmp_path, command)), uninterrupted)


def stopped(tmp_path, command, workspace, *numbers):
    """A child that gets these signals while it trains."""
    child = start(tmp_path, *command, "--set", "train.log_every=1")
    while child.running and b'"train/' not in b"".join(p.read_bytes() for p in workspace.glob("runs/*/spool.jsonl")):
        time.sleep(0.005)
    for number in numbers:
        child.send(number)
    return child
