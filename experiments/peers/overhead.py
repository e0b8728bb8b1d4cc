"""What a training loop costs beside the training: the same small model in a bare loop, in the runner and in Lightning.

``pip install -e '.[bench]'``, then ``python experiments/peers/overhead.py``. Every contestant is a whole training in a
process of its own, on one thread, that is let go for a block of updates when it is its turn. All of them begin anew a
few times, because where a process finds its memory moves its times by several microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from runner.system.hardware import hardware

BATCH, WIDTH, ROWS, LR = 16, 64, 4096, 1e-2
UPDATES = 10_000_000
"""More than anybody gets to."""


class Turn:
    """Lets a training go on for a block of updates, and says how long they took."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.left, self.started = connection, 1, 0.0
        """The first update only says that it is ready."""

    def tick(self) -> None:
        """Called after every update."""
        self.left -= 1
        if self.left:
            return
        self.connection.send(time.perf_counter() - self.started)
        count = self.connection.recv()
        if count is None:
            os._exit(0)  # in the midst of a training, which has nothing more to say
        self.left, self.started = count, time.perf_counter()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to learn from."""
    x = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def model() -> nn.Module:
    """A step of it takes about 100 microseconds."""
    return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def bare(turn: Turn) -> None:
    """What a person writes who wants nothing but the training, and the mean of the loss."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    x, y = data()
    total, count = 0.0, 0
    while True:
        order = torch.randperm(ROWS)
        for start in range(0, ROWS, BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            loss = (net(x[rows]) - y[rows]).square().sum() / BATCH
            loss.backward()
            optimizer.step()
            total, count = total + loss.item(), count + 1
            turn.tick()


def bare_data_loader(turn: Turn) -> None:
    """The same with torch's ``DataLoader``, as Lightning has it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=BATCH, shuffle=True)
    total, count = 0.0, 0
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = (net(x) - y).square().sum() / BATCH
            loss.backward()
            optimizer.step()
            total, count = total + loss.item(), count + 1
            turn.tick()


PLUGIN = f'''
import overhead
from overhead import LR, ROWS, WIDTH, data, model
from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss

class Net(GradientLearner):
    def build(self, config, shapes, context):
        return model()
    def loss(self, batch, noise, progress):
        overhead.turn.tick()
        return Loss((self.slots.forward(batch["x"]) - batch["y"]).square().sum(), {BATCH})

class NetConfig(GradientLearnerConfig):
    """A small net."""
    kind, learns_from, roles = "net", "rows", {{"model": {{"kind": "sgd", "lr": LR}}}}
    implementation = "Net"

class Rows(DatasetSource):
    def datasets(self, config):
        x, y = data()
        return {{"x": x, "y": y}}, {{"x": x[:64], "y": y[:64]}}

class RowsConfig(DatasetConfig):
    """Random rows."""
    kind, provides, in_memory = "rows", "rows", True
    implementation = "Rows"
'''


def runner(turn: Turn) -> None:
    """``runner run`` with everything that is on by default: guards, metrics, progress, MLflow."""
    from rich.console import Console

    from runner.cli.progress import ProgressDisplay
    from runner.plugin.registry import Registry
    from runner.recipe.loader import load
    from runner.tracking.workspace import Workspace
    from runner.training.run import run

    sys.path.insert(0, str(Path(__file__).parent))
    # The plugin imports this module again, because here it is the program.
    import_module("overhead").turn = turn
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    (folder / "plugin.py").write_text(PLUGIN)
    sections = f"name: overhead\ndevice: cpu\nmodel: {{kind: net}}\ndata: {{kind: rows}}\ntrain: {{updates: {UPDATES}"
    (folder / "recipe.yaml").write_text(f"{sections}, batch_size: {BATCH}}}\n")
    registry = Registry([folder / "plugin.py"])
    recipe = load(folder / "recipe.yaml", (), registry)

    with ProgressDisplay(Console(stderr=True), recipe) as display:
        run(recipe, registry, Workspace(folder / "workspace"), display)


def _lightning(turn: Turn, **settings: object) -> None:
    import lightning

    warnings.simplefilter("ignore")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            x, y = batch
            loss = (self.net(x) - y).square().sum() / BATCH
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR)

        def on_train_batch_end(self, *arguments: object) -> None:
            turn.tick()

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=BATCH, shuffle=True)
    folder = tempfile.mkdtemp(prefix="overhead-")
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=UPDATES, max_epochs=-1, default_root_dir=folder, **settings
    )
    trainer.fit(Module(), loader)


def lightning_default(turn: Turn) -> None:
    """Lightning as it comes: progress bar, logger and checkpoints."""
    _lightning(turn)


def lightning_barebones(turn: Turn) -> None:
    """Lightning's own setting for the measurement of overheads: it logs nothing, shows nothing and saves nothing."""
    _lightning(turn, barebones=True)


def contestants() -> dict[str, Callable[[Turn], None]]:
    """Who can take part here."""
    found = {"bare loop": bare, "bare loop, DataLoader": bare_data_loader, "runner": runner}
    if find_spec("lightning"):
        found |= {"Lightning": lightning_default, "Lightning, barebones": lightning_barebones}
    return found


def _begin(name: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contestants()[name](Turn(connection))


def measure(rounds: int, updates: int) -> dict[str, list[float]]:
    """Microseconds of an update of everybody, block by block, in one training each."""
    context = multiprocessing.get_context("spawn")
    pipes, taken = {}, {}
    for name in contestants():
        pipes[name], theirs = context.Pipe()
        context.Process(target=_begin, args=(name, theirs), daemon=True).start()
        theirs.close()  # so that the end of a process is not waited for
        pipes[name].recv()
        taken[name] = []
    for turn in range(rounds + 1):
        for name in list(pipes)[:: 1 if turn % 2 else -1]:
            pipes[name].send(updates)
            seconds = pipes[name].recv() / updates
            if turn:  # the first block warms up
                taken[name].append(1e6 * seconds)
    for pipe in pipes.values():
        pipe.send(None)
    return taken


def main() -> None:
    """Prints a table, and keeps the figures in ``overhead.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainings", type=int, default=5, help="of everybody")
    parser.add_argument("--rounds", type=int, default=8, help="in each training")
    parser.add_argument("--updates", type=int, default=1500, help="in a block")
    options = parser.parse_args()
    trainings = [measure(options.rounds, options.updates) for _ in range(options.trainings)]
    rows = {}
    for name in contestants():
        extra = [[own - bare for own, bare in zip(each[name], each["bare loop"], strict=True)] for each in trainings]
        everything = sorted(itertools.chain(*extra))
        times, base = ([statistics.median(each[who]) for each in trainings] for who in (name, "bare loop"))
        rows[name] = {
            "microseconds": round(statistics.median(times), 1),
            "over_the_bare_loop": round(statistics.median(everything), 1),
            "quartiles": [round(everything[len(everything) * part // 4], 1) for part in (1, 3)],
            "by_training": [round(statistics.median(each), 1) for each in extra],
            "ratio": round(statistics.median(own / bare for own, bare in zip(times, base, strict=True)), 3),
        }
        print(f"{name:24} {json.dumps(rows[name])}")
    result = vars(options) | {"machine": hardware(), "contestants": rows}
    Path(__file__).with_name("overhead.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
