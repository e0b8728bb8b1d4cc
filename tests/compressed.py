"""What two processes do with the stage that compresses gradients."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from runner.distributed.reduction import sum_gradients
from runner.plugin.context import Slots
from runner.plugins.stages.compressed_gradients import CompressedGradientsConfig, bytes_of_powersgd

SHAPES = ((24, 30), (7,), (3, 2), (), (16, 4, 9))


def stage_of(settings, parameters):
    """Returns the stage, attached to a pipeline that has nothing else."""
    from runner.plugins.stages.compressed_gradients import CompressedGradients

    stage = CompressedGradients(CompressedGradientsConfig(**settings))
    slots = Slots()
    slots.define(sum_gradients=None)
    named = [(f"weight{number}", parameter) for number, parameter in enumerate(parameters)]
    stage.attach(SimpleNamespace(slots=slots, learner=SimpleNamespace(named_parameters=lambda: named)))
    return stage, slots


def gradients_of(rank, update, shapes=SHAPES, rank_of_matrices=None):
    """Returns the gradients of a process in an update."""
    draw = torch.Generator().manual_seed(100 * update + rank)
    gradients = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    if rank_of_matrices is not None:
        # The same column space in both processes, so that the sum has that rank, too.
        shared = torch.Generator().manual_seed(update)
        columns = [
            torch.randn((*shape[:1], rank_of_matrices), generator=shared, dtype=torch.float64) for shape in shapes
        ]
        rows = [torch.randn((rank_of_matrices, shape[1]), generator=draw, dtype=torch.float64) for shape in shapes]
        gradients = [left @ right for left, right in zip(columns, rows, strict=True)]
    return gradients


def sums(group, settings, updates, shapes=SHAPES, rank_of_matrices=None, interrupted_after=None, resumed_with=None):
    """Adds up gradients of several updates.

    Returns:
        The sums of each update, the state at the end, and the bytes: those that torch adds up, and those that the
        stage has counted.
    """
    parameters = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    stage, slots = stage_of(settings, parameters)
    results, handed = [], []
    add_up = dist.all_reduce

    def counted(tensor, *inputs, **options):
        handed.append(tensor.nbytes)
        return add_up(tensor, *inputs, **options)

    dist.all_reduce = counted
    try:
        for update in range(updates):
            for parameter, gradient in zip(
                parameters, gradients_of(group.rank, update, shapes, rank_of_matrices), strict=True
            ):
                parameter.grad = gradient
            sum_gradients(parameters, group, slots.sum_gradients)
            results.append([parameter.grad.clone() for parameter in parameters])
            if update + 1 == interrupted_after:
                state = stage.state_dict()
                stage, slots = stage_of(settings | (resumed_with or {}), parameters)
                stage.load_state_dict(state)
    finally:
        dist.all_reduce = add_up
    flags = updates * len(shapes) * 8
    return results, stage.state_dict(), (sum(handed) - flags, stage._sent, stage.closing_notes())


def computed_bytes(rank, shapes, updates):
    """Returns the bytes of PowerSGD by its formula, beside those of the first two updates, which are exact."""
    sizes = [torch.Size(shape) for shape in shapes]
    return 2 * bytes_of_powersgd(sizes, 8, None) + (updates - 2) * bytes_of_powersgd(sizes, 8, rank)
