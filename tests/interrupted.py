"""Trains in child processes that are killed, and compares what comes out with a training that was not."""

import json
import random
import signal
import time
from pathlib import Path

import mlflow
import torch
from children import start
from running import RECIPES, settings_of

from runner.plugin.ring import Ring
from runner.training import checkpoint


def arguments(name, *sets):
    """The command line that trains a recipe that ships, made small."""
    pairs = [part for setting in (*settings_of(name), *sets) for part in ("--set", setting)]
    return ["run", str(RECIPES / f"{name}.yaml"), "--resume", "--quiet", "--json", *pairs]


def train(folder, command, **variables):
    """Trains to the end; returns what ``--json`` printed."""
    return start(folder, *command, **variables).data()


def survives(folder, command, workspace, kills, faults, seed=0):
    """Trains once without and once with kills, and asserts that both come to the same.

    Args:
        folder: for the output of the processes.
        command: what trains.
        workspace: where the runs are.
        kills: how many times the training is killed at a random moment.
        faults: places inside a save at which it is killed, too; at least one, which comes first.
        seed: of the moments.
    """
    chance = random.Random(f"{seed} {command}")
    reference = train(folder, [part for part in command if part != "--resume"])
    length = (Path(reference["run_dir"]) / "spool.jsonl").stat().st_size
    others = set(workspace.glob("runs/*"))
    assert start(folder, *command, RUNNER_FAULTS=faults[0]).wait() == -signal.SIGKILL
    (run,) = set(workspace.glob("runs/*")) - others
    positions = [position for position, word in enumerate(command) if word == "--plugin"]
    plugins = [word for position in positions for word in command[position : position + 2]]
    spool, resume = run / "spool.jsonl", ["resume", run.name, "--quiet", "--json", *plugins]
    for fault in faults[1:]:
        assert start(folder, *resume, RUNNER_FAULTS=fault).wait() == -signal.SIGKILL
    for left in range(kills, 0, -1):
        size = spool.stat().st_size
        target = size + chance.randrange(max(1, (length - 300 - size) // left))
        kill_when(folder, resume, lambda target=target: spool.stat().st_size > target, chance)
    result = train(folder, resume)
    assert result["run_dir"] == str(run)
    same(learnt(result), learnt(reference))


def kill_when(folder, command, reached, chance):
    """Kills a training a moment after something has been reached, which is well before its end."""
    child = start(folder, *command)
    deadline = time.monotonic() + 120
    while child.running and time.monotonic() < deadline and not reached():
        time.sleep(0.001)
    time.sleep(chance.random() * 0.02)
    child.kill()
    assert child.process.exitcode == -signal.SIGKILL, child.stderr


def learnt(result):
    """Everything that must come out bit for bit: the last checkpoint and the history of what was learnt."""
    newest = checkpoint.checkpoints(Path(result["run_dir"]) / "checkpoints")[-1]
    state = checkpoint.load(newest)
    kept = {name: state[name] for name in ("pipeline", "generators", "gradients", "step")}
    return flat(kept), history(result)


def history(result):
    """Every point of the metrics that depend on recipe and seed alone, as MLflow has them."""
    client = mlflow.MlflowClient(result["tracking_uri"])
    run = client.get_run(result["run_id"])
    assert run.info.status == result["status"] == "FINISHED"
    names = sorted(name for name in run.data.metrics if name.startswith(("train/", "eval/")))
    return {
        name: [(point.step, repr(point.value)) for point in client.get_metric_history(result["run_id"], name)]
        for name in names
    }


def flat(value, path=""):
    """A state as one dictionary of plain values, with the bits of every tensor."""
    if isinstance(value, Ring):
        rows = [rows for _, rows in value.pieces()]
        return {f"{path}.written": value.written, **flat(torch.cat(rows) if rows else None, f"{path}.rows")}
    if isinstance(value, torch.Tensor):
        return {path: (str(value.dtype), list(value.shape), value.contiguous().view(-1).view(torch.uint8).tolist())}
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: each for key, item in pairs for name, each in flat(item, f"{path}/{key}").items()}
    return {path: json.dumps(value)}


def same(one, other):
    """Asserts that nothing differs, naming the first thing that does."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        differing = [name for name in mine if mine[name] != theirs[name]]
        assert differing == [], {name: (mine[name], theirs[name]) for name in differing[:3]}
