"""What a training loop costs beside the training: the same small model in a bare loop, in the runner and in Lightning.

``pip install -e '.[bench]'``, then ``python experiments/peers/overhead.py``. Every training runs in a process of its
own, on one thread. After each block of its updates, the same process makes as many in a bare loop: where a process has
its memory moves the times of both by several microseconds. All trainings start again a few times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from runner.system.hardware import hardware
from runner.system.interval import student

BATCH, WIDTH, ROWS, LR = 16, 64, 4096, 1e-2
UPDATES = 10_000_000
"""More than anybody gets to."""


class Turns:
    """Lets a training and a bare loop take turns, and writes the times of their blocks.

    Attributes:
        blocks: Microseconds of an update by block, of the training and of the bare loop.
    """

    def __init__(self, rounds: int, updates: int, connection: Connection) -> None:
        self.rounds, self.updates, self.connection = rounds, updates, connection
        self.bare = bare_loop()
        self.blocks: list[tuple[float, float]] = []
        self.left, self.started = updates, time.perf_counter()

    def tick(self) -> None:
        """Called in every update of the training."""
        self.left -= 1
        if self.left:
            return
        training_s = time.perf_counter() - self.started
        # The bare loop calls this method as well, which takes a microsecond.
        self.left = self.updates + 1
        started = time.perf_counter()
        for _ in range(self.updates):
            next(self.bare)
            self.tick()
        bare_s = time.perf_counter() - started
        self.blocks.append((1e6 * training_s / self.updates, 1e6 * bare_s / self.updates))
        # The first block warms up.
        if len(self.blocks) > self.rounds:
            self.connection.send(self.blocks[1:])
            os._exit(0)  # in the midst of a training, which has nothing more to say
        self.left, self.started = self.updates, time.perf_counter()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to learn from."""
    x = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def model() -> nn.Module:
    """A step of it takes about 100 microseconds."""
    return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def bare_loop() -> Iterator[None]:
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
            yield


def bare(turns: Turns) -> None:
    """A second bare loop: the noise of the measurement."""
    for _ in bare_loop():
        turns.tick()


def bare_data_loader(turns: Turns) -> None:
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
            turns.tick()


PLUGIN = f'''
import overhead
from overhead import LR, ROWS, WIDTH, data, model
from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss

class Net(GradientLearner):
    def build(self, config, shapes, context):
        return model()
    def loss(self, batch, noise, progress):
        overhead.turns.tick()
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


def runner(turns: Turns) -> None:
    """``runner run`` with everything that is on by default: guards, metrics, progress, MLflow."""
    from rich.console import Console

    from runner.cli.progress import ProgressDisplay
    from runner.plugin.registry import Registry
    from runner.recipe.loader import load
    from runner.tracking.workspace import Workspace
    from runner.training.run import run

    sys.path.insert(0, str(Path(__file__).parent))
    # The plugin imports this module again, because here it is the program.
    import_module("overhead").turns = turns
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    (folder / "plugin.py").write_text(PLUGIN)
    sections = f"name: overhead\ndevice: cpu\nmodel: {{kind: net}}\ndata: {{kind: rows}}\ntrain: {{updates: {UPDATES}"
    (folder / "recipe.yaml").write_text(f"{sections}, batch_size: {BATCH}}}\n")
    registry = Registry([folder / "plugin.py"])
    recipe = load(folder / "recipe.yaml", (), registry)

    with ProgressDisplay(Console(stderr=True), recipe) as display:
        run(recipe, registry, Workspace(folder / "workspace"), display)


def _lightning(turns: Turns, **settings: object) -> None:
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
            turns.tick()

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=BATCH, shuffle=True)
    folder = tempfile.mkdtemp(prefix="overhead-")
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=UPDATES, max_epochs=-1, default_root_dir=folder, **settings
    )
    trainer.fit(Module(), loader)


def lightning_default(turns: Turns) -> None:
    """Lightning as it comes: progress bar, logger and checkpoints."""
    _lightning(turns)


def lightning_barebones(turns: Turns) -> None:
    """Lightning's own setting for the measurement of overheads: it logs nothing, shows nothing and saves nothing."""
    _lightning(turns, barebones=True)


def contestants() -> dict[str, Callable[[Turns], None]]:
    """Who can take part here."""
    found = {"second bare loop": bare, "bare loop, DataLoader": bare_data_loader, "runner": runner}
    if find_spec("lightning"):
        found |= {"Lightning": lightning_default, "Lightning, barebones": lightning_barebones}
    return found


def _begin(name: str, rounds: int, updates: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contestants()[name](Turns(rounds, updates, connection))


def measure(name: str, rounds: int, updates: int) -> list[tuple[float, float]]:
    """Returns the microseconds of an update of a training and of a bare loop beside it, by block."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_begin, args=(name, rounds, updates, sender))
    process.start()
    # So that the end of a process is not waited for.
    sender.close()
    blocks = receiver.recv()
    process.join()
    return blocks


def main() -> None:
    """Prints a table, and keeps the figures in ``overhead.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainings", type=int, default=6, help="of everybody")
    parser.add_argument("--rounds", type=int, default=40, help="in each training")
    parser.add_argument("--updates", type=int, default=250, help="in a block")
    options = parser.parse_args()
    trainings = defaultdict(list)
    for _ in range(options.trainings):
        for name in contestants():
            trainings[name].append(measure(name, options.rounds, options.updates))
    rows = {}
    for name, of_processes in trainings.items():
        means = [statistics.median(own - bare for own, bare in blocks) for blocks in of_processes]
        blocks = [block for process in of_processes for block in process]
        differences = sorted(own - bare for own, bare in blocks)
        interval = student(means)
        rows[name] = {
            "microseconds": round(statistics.median(own for own, _ in blocks), 1),
            "over_the_bare_loop": round(interval[0], 1),
            "interval": [round(bound, 1) for bound in interval[1:]],
            "quartiles": [round(differences[len(differences) * part // 4], 1) for part in (1, 3)],
            "by_training": [round(mean, 1) for mean in means],
            "ratio": round(statistics.median(own / bare for own, bare in blocks), 3),
        }
        print(f"{name:24} {json.dumps(rows[name])}")
    result = vars(options) | {"machine": hardware(), "contestants": rows}
    Path(__file__).with_name("overhead.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
