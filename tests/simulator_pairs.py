"""What two processes do with a simulator that they divide; both call these functions."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from process_pairs import PLUGINS, mechanism, tiny_recipe
from running import tiny

from runner.distributed.gathered_state import gathered_states, send_state
from runner.plugin.context import Context
from runner.plugin.registry import Registry
from runner.plugin.ring import Ring
from runner.plugins.marl.simulator import SimulatorSource
from runner.system.errors import RunnerError
from runner.system.tensor_trees import map_tensors, widened
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble
from runner.training.step import Drawn, Step
from runner.verify.process_trainings import GroupTrainings, follow_trainings

SETS = ("data.envs=3", "data.warmup=9", "train.batch_size=5", "data.updates_per_step=1", "data.episode_limit=4")
"""Parts of two processes differ: 1 and 2 environments, 2 and 3 samples."""


class CountsOfPart(SimulatorSource):
    """Counts the environment steps of one process."""

    def counts(self, batch):
        counts = dict(SimulatorSource.real_counts(self, batch))
        return {name: count * self._envs // self.config.envs for name, count in counts.items()}


def _draw_in_one(self, batch_size, progress):
    """Draws a batch in the first process only."""
    batch = SimulatorSource.real_draw(self, batch_size, progress)
    return None if self._context.processes.rank else batch


@contextmanager
def _replaced(name, value):
    real = f"real_{name}"
    setattr(SimulatorSource, real, getattr(SimulatorSource, name))
    try:
        with patch.object(SimulatorSource, name, value):
            yield
    finally:
        delattr(SimulatorSource, real)


WRONG = {
    "": nullcontext,
    "same seed": lambda: patch.object(Context, "process_generator", Context.generator),
    "counts of a part": lambda: _replaced("counts", CountsOfPart.counts),
    "a draw in one process": lambda: _replaced("draw", _draw_in_one),
}


def train(group, name, sets=SETS, draws=12, wrong=""):
    """Draws and trains; returns what the processes have in common, and what each has alone."""
    try:
        with WRONG[wrong]():
            pipeline = assemble(tiny(name, *sets), processes=group)
            step = Step(pipeline)
            updates = [step.progress.updates for _ in range(draws) if step() is not None]
    except RunnerError as error:
        return str(error)
    source = pipeline.source
    return {
        "progress": pipeline.progress.state_dict(),
        "first": draws - len(updates),
        "statistics": source.statistics(),
        "parameters": {key: value.detach().clone() for key, value in pipeline.learner.named_parameters()},
        "envs": source._envs,
        "stored": len(source._replay),
        "observation": None if step.batch is None else step.batch["observation"],
        "evaluation": evaluated(pipeline),
    }


def train_sampler(group, path):
    """Trains a classifier on what the plugin of a file draws; returns the losses of all, and the first of this."""
    files = [*PLUGINS, path]
    sets = ("data.kind=sampled_images", "train.batch_size=5", "train.ema=null")
    recipe = tiny_recipe("images", *sets, registry=Registry(files))
    pipeline = assemble(recipe, files, processes=group)
    inputs = []
    pipeline.learner.slots.wrap(
        "forward_backward", lambda step: lambda *args, **options: (inputs.append(args), step(*args, **options))[1]
    )
    initial = pipeline.build_another_learner()
    step = Step(pipeline)
    losses = [output["loss"].sum.item() / 5 for output in (step() for _ in range(4))]
    loss = initial.loss(*inputs[0])
    return {
        "progress": pipeline.progress.state_dict(),
        "losses": losses,
        "sizes": [len(batch["label"]) for batch, *_ in inputs],
        "own_loss": loss.sum.item() / loss.count,
        "parameters": {key: value.detach().clone() for key, value in pipeline.learner.named_parameters()},
    }


def update_of_parts(group, name, sets, used="DividedDraws"):
    """Updates on the parts of two processes, and in one on the samples of both.

    Returns:
        Parameters and results of both, in float64.
    """
    recipe = tiny(name, *sets)
    # The simulator computes in float32.
    drawn = Step(assemble(recipe, processes=group)).next()
    part = map_tensors(widened, {"batch": drawn.batch, "noise": drawn.noise})
    parts = group.gather(part)
    whole = {
        section: {key: torch.cat([other[section][key] for other in parts], dimension) for key in part[section]}
        for section, dimension in (("batch", 0), ("noise", 1))
    }
    torch.set_default_dtype(torch.float64)
    try:
        with mechanism(used):
            divided = assemble(recipe, processes=group)
        single = assemble(recipe)
        results = []
        for pipeline, inputs in ((divided, part), (single, whole)):
            for _ in range(2):
                output = Step(pipeline).update(Drawn(inputs["batch"], inputs["noise"]))
            state = pipeline.learner.complete_state()
            scalars = {key: float(value) for key, value in output.items() if not value.dim()}
            results.append({"modules": state["model"], "targets": state["target_critics"], "outputs": scalars})
    finally:
        torch.set_default_dtype(torch.float32)
    return results


def prioritized_part(group, sets=SETS):
    """Samples from a buffer with known priorities; returns masses, weights and the expected draws."""
    pipeline = assemble(tiny("marl_baseline", *sets, "data.replay.kind=prioritized"), processes=group)
    source = pipeline.source
    for _ in range(6):
        source.collect(None)
    replay = source._replay
    stored = torch.arange(len(replay))
    replay.update_priorities(stored, (1.0 + group.rank) * (1 + stored))
    part = source._context.process_part(5)
    batch = replay.sample(part, 1.0)
    masses = replay._priorities.masses.double()
    expected = part * masses[batch["index"]] / masses.sum()
    return batch["weight"].double(), expected


def rings(group):
    """Sends a state with a ring, of which the first process reads some rows."""
    rows = torch.arange(6.0).reshape(6, 1) + 10 * group.rank
    state = {"part": {"rows": Ring(4, 6, lambda first, last: rows[first:last])}, "number": group.rank}
    if group.rank:
        send_state(group, state)
        return None
    with gathered_states(group) as (other,):
        ring = other["part"]["rows"]
        return other["number"], ring.first, ring.read(3, 5).flatten().tolist(), ring.read(5, 6).item()


def milestones(group, name, sets, seeds, length):
    """Trains with some seeds on one process and on both; returns the evaluations of the first process."""
    registry = Registry()
    recipe = tiny(name, *sets)
    if group.rank:
        return follow_trainings(recipe, registry, group)
    trainings = GroupTrainings(recipe, registry, group, 60.0, lambda _: None)
    orders = [trainings.single, trainings.divided]
    results = trainings.run(orders, seeds, length)
    assert trainings.are_over(orders, seeds, length)
    assert trainings.run(orders[1:], seeds[:1], length) == results[len(seeds) : len(seeds) + 1]
    trainings.end()
    return [milestone._replace(seconds=0.0, growing_seconds=0.0) for milestone in results]
