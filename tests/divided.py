"""Trainings whose parameters are divided between two processes, for tests of ``fsdp``."""

import contextlib
import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from process_pairs import PLUGINS, follow, tiny_recipe

from runner.plugins.stages.fsdp import DTensorSharding
from runner.system.errors import RunnerError
from runner.system.tensor_trees import map_tensors, tensors
from runner.training.guards import FiniteGuard, GradientGuard
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.training.update_metrics import UpdateMetrics

DIVIDED = "optimization.fsdp=on"


def built(group, name, sets, files=PLUGINS):
    """Returns the pipeline of a tiny recipe; several processes divide its parameters."""
    recipe = tiny_recipe(name, *sets, *((DIVIDED,) if group else ()))
    return assemble(recipe, files, processes=group)


def held(group, name, sets=()):
    """Returns how many numbers of parameters and moments this process holds after an update, and how many there are."""
    pipeline = built(group, name, sets)
    Step(pipeline)()
    learner = pipeline.learner
    counts = []
    for tree in (list(learner.module.parameters()), [optimizer.state_dict() for _, optimizer in learner.optimizers()]):
        divided = [tensor for tensor in tensors(tree) if tensor.dim()]
        counts.append((sum(learner.sharding.part_of(each).numel() for each in divided), _numbers(divided)))
    return counts


def _numbers(values):
    return sum(value.numel() for value in values)


def continued(group, name, sets=(), state=None, updates=2):
    """Returns the state of a training after some updates, from a state or from the beginning."""
    pipeline = built(group, name, sets)
    step = Step(pipeline)
    if state is not None:
        pipeline.load_state_dict(state)
        step.reset()
    for _ in range(updates):
        step()
    return map_tensors(lambda tensor: tensor.clone(), pipeline.state_dict())


def first_update(group, path, name="odd"):
    """Trains a learner of a plugin file."""
    from runner.plugin.registry import Registry

    recipe = tiny_recipe("images", f"model.kind={name}", DIVIDED, registry=Registry([*PLUGINS, path]))
    Step(assemble(recipe, [*PLUGINS, path], processes=group))()


def refusal(group, name, sets):
    """Returns the message about a recipe that cannot be trained."""
    try:
        Step(assemble(tiny_recipe(name, *sets), PLUGINS, processes=group))()
    except RunnerError as error:
        return str(error)
    return ""


@contextmanager
def summing(factor=1.0, norm_of_part=False):
    """Divides sums of gradients by another factor (None: by torch's), or clips by the norm of a process's part."""
    from torch.distributed.fsdp import FSDPModule

    clip = torch.nn.utils.clip_grad_norm_
    set_factor = FSDPModule.set_gradient_divide_factor

    def change(module, _):
        if factor is not None:
            set_factor(module, factor)

    def clip_part(parameters, max_norm):
        parts = [torch.nn.Parameter(DTensorSharding().part_of(parameter.detach())) for parameter in parameters]
        for part, parameter in zip(parts, parameters, strict=True):
            part.grad = DTensorSharding().part_of(parameter.grad)
        return clip(parts, max_norm)

    with patch.object(FSDPModule, "set_gradient_divide_factor", change):
        if norm_of_part:
            with patch("torch.nn.utils.clip_grad_norm_", clip_part):
                yield
        else:
            yield


def follow_divided(group, values, stages, options):
    """Mirrors the first process in a comparison, with the same incorrect sums."""
    with summing(**options):
        follow(group, values, PLUGINS, stages)


def observed(group, name, sets=()):
    """Returns what guards and metrics see of an update: norms, missing gradients, and where a number is not finite."""
    pipeline = built(group, name, sets)
    learner = pipeline.learner
    step = Step(pipeline)
    measured = UpdateMetrics(pipeline, 1)
    guard = GradientGuard(learner)
    for _ in range(2):
        measured.start()
        output = step()
        measured.finish()
        guard.check(pipeline.progress)
    found = {"metrics": measured.take(), "missing": sorted(guard.missing)}
    # A number in the last row of a parameter, which the first process does not have.
    with torch.no_grad():
        parameter = next(iter(learner.module.parameters()))
        broken = learner.whole(parameter).clone()
        broken[-1] = float("nan")
        parameter.copy_(broken if group is None else DTensorSharding().divided_like(broken, parameter))
    with tempfile.TemporaryDirectory() as folder:
        finite = FiniteGuard(pipeline.slots, learner, Path(folder))
        finite.outputs.clear()
        found["origin"] = finite.origin_of({}, output)["message"]
        with contextlib.suppress(RunnerError):
            finite.check(pipeline.progress, {}, output)
        found["sizes"] = json.loads(Path(folder, "diagnosis.json").read_text())["parameters"]
    return found
