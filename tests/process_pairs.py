"""A second process that trains together with the one of the tests."""

import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import tiny_learners
import torch
import torch.distributed as dist
from fork_server import CONTEXT, begin

from runner.distributed import data_parallel, divided_draws
from runner.distributed.data_parallel import DataParallel
from runner.distributed.divided_draws import DividedDraws
from runner.distributed.process_group import ProcessGroup
from runner.plugin.averages import AVERAGES
from runner.plugin.registry import Registry
from runner.recipe.loader import from_values, load
from runner.system.errors import RunnerError
from runner.system.tensor_trees import leaves
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.process_pair import mirror

SECONDS = 20
PLUGINS = [Path(tiny_learners.__file__)]
HEAD = "seed: 3\ndevice: cpu\ntracking: {system_metrics: false}\n"


class MeanOfMeans(DataParallel):
    """Divides the loss of each process by the count of that process."""

    def total_count(self, count):
        self.has_loss = True
        return count * self.group.count


class EarlyClipping(DataParallel):
    """Clips the gradient of each process before the gradients are added up."""

    def _wrap_unscale(self, step):
        return lambda optimizer: step(optimizer)


class RepeatedSamples(DataParallel):
    """Gives every process the first samples of a batch."""

    def rows(self, size):
        return slice(0, -(-size // self.group.count))


class MeanOfParts(DividedDraws):
    """Weights the losses of all processes equally, however many samples they have."""

    def _divide(self, batch, noise, progress):
        part = super()._divide(batch, noise, progress)
        return part._replace(size=(part.rows.stop - part.rows.start) * self.group.count)


MECHANISMS = {
    cls.__name__: cls for cls in (DataParallel, MeanOfMeans, EarlyClipping, RepeatedSamples, DividedDraws, MeanOfParts)
}


def mechanism(name):
    """Lets pipelines divide batches by the class of that name inside the ``with``."""
    if issubclass(MECHANISMS[name], DividedDraws):
        return patch.object(divided_draws, "DividedDraws", MECHANISMS[name])
    return patch.object(data_parallel, "DataParallel", MECHANISMS[name])


class Pair:
    """The group of this process, and the second process.

    Attributes:
        group: The first of two processes.
    """

    def __init__(self, group, connection):
        self.group = group
        self._connection = connection

    def call(self, function, *arguments):
        """Returns the results of a function in this process and in the second one."""
        self._connection.send((function, arguments))
        try:
            result = function(self.group, *arguments)
        finally:
            # An error of both is raised here.
            peer = self._connection.recv()
        if isinstance(peer, str):
            raise AssertionError(peer)
        return result, peer[0]

    def start(self, function, *arguments):
        """Calls a function in the second process alone."""
        self._connection.send((function, arguments))

    def wait(self):
        """Waits until the second process has returned."""
        return self._connection.recv()


@contextmanager
def started_pair():
    """Starts a second process that serves calls until the end of the ``with``."""
    begin()
    connection, peer_connection = CONTEXT.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/store"
        process = CONTEXT.Process(target=_serve, args=(path, peer_connection))
        process.start()
        try:
            yield Pair(_group(path, 0), connection)
            connection.send(None)
            process.join(SECONDS)
        finally:
            process.kill()
            process.join()
            dist.destroy_process_group()


def _group(path, rank):
    group = ProcessGroup(dist.FileStore(path, 2), rank, 2)
    group.connect("cpu", SECONDS)
    return group


def _serve(path, connection):
    torch.set_num_threads(1)
    group = _group(path, 1)
    while (call := connection.recv()) is not None:
        function, arguments = call
        try:
            result = (function(group, *arguments),)
        except Exception:
            result = traceback.format_exc()
        connection.send(result)


def tiny_recipe(name, *sets, registry=None):
    """Returns one of the recipes of the tiny learners, without dropout."""
    no_dropout = ["model.dropout=0"] if name == "tokens" else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.yaml")
        path.write_text(f"name: {name}\n{HEAD}{tiny_learners.RECIPES[name]}")
        return load(path, [*no_dropout, *sets], registry or Registry(PLUGINS))


def train(group, name, sets=(), updates=3, used="DataParallel"):
    """Trains in float64; returns the parameters, the averages, and the results of the updates."""
    recipe = tiny_recipe(name, *sets)
    torch.set_default_dtype(torch.float64)
    try:
        with mechanism(used):
            pipeline = assemble(recipe, PLUGINS, processes=group)
        step = Step(pipeline)
        outputs = [plain(step()) for _ in range(updates)]
    finally:
        torch.set_default_dtype(torch.float32)
    state = pipeline.learner.complete_state()
    return {"modules": state["modules"], "averages": state.get(AVERAGES, {}), "outputs": outputs}


def evaluate(group, name, *sets):
    """Returns the metrics of the initial model."""
    return evaluated(assemble(tiny_recipe(name, *sets), PLUGINS, processes=group))


def buffers(group, path):
    """Returns the buffers after three updates of the plugin 'odd' of a file, which is an image classifier."""
    files = [*PLUGINS, path]
    recipe = tiny_recipe("images", "model.kind=odd", "train.batch_size=5", registry=Registry(files))
    step = Step(assemble(recipe, files, processes=group))
    for _ in range(3):
        step()
    return {name: value.clone() for name, value in step.learner.module.named_buffers()}


def plain(output):
    """Returns the results of an update as numbers."""
    numbers = {}
    for name, value in output.items():
        numbers[name] = [float(part) for part in value] if isinstance(value, tuple) else [float(value)]
    return numbers


def refused(group, path, name, sets=()):
    """Returns the error of a training whose model is the plugin 'odd' of a file."""
    files = [*PLUGINS, path]
    recipe = tiny_recipe(name, "model.kind=odd", *sets, registry=Registry(files))
    try:
        step = Step(assemble(recipe, files, processes=group))
        for _ in range(2):
            step()
    except RunnerError as error:
        return str(error)
    return ""


def difference(first, second):
    """Returns the largest difference of two trees, which have to have the same leaves."""
    largest = 0.0
    for (name, a), (other_name, b) in zip(leaves(first), leaves(second), strict=True):
        assert name == other_name
        a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (a, b))
        assert a.shape == b.shape, name
        if a.numel():
            largest = max(largest, float((a - b).abs().max()))
    return largest


def follow(group, values, files, stages, used="DataParallel"):
    """Mirrors the first process in a comparison of the recipe with these values."""
    registry = Registry(files)
    recipe = from_values(values, "recipe", {}, registry)
    with mechanism(used):
        mirror(recipe, registry, stages, group)
