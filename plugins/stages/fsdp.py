"""Parameters, gradients and moments that are divided among processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import Close, Pipeline, RunnerError, Setting, Stage, StageConfig, UsageError, map_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

MIXED = "mixed torch.Tensor and DTensor"
"""In torch's message about an operator with a whole tensor and a part of another one."""
UNKNOWN = re.compile(r"sharding strategy registered|Sharding propagation failed")
"""In torch's message about an operator that cannot compute with parts."""
OPERATOR = re.compile(r"aten\.\w+")


class FsdpConfig(StageConfig):
    """Divides parameters, gradients and the state of optimizers among processes: torch's FSDP2 (``fully_shard``).

    Each process holds a part of every parameter. It collects the parameters of a block (``blocks``
    of the learner) before the block computes, forward and backward, and afterwards frees those of
    the others. Gradients are added up, and each process keeps the sum of its part.

    When it helps: a model that does not fit into the memory of one device. Of 57 million parameters
    with AdamW on a CPU, each of two processes held 433 MiB instead of 866 between two updates, and
    at most 728 instead of 1,203 (November 2026).
    When it hurts: a model that fits. Parameters are sent twice more in every update: with two
    processes on a machine with two cores, 0.72 times the speed without it for 19 million
    parameters, and 0.45 times for 0.8 million (November 2026).
    """

    kind: ClassVar[str] = "fsdp"
    implementation = "Fsdp"
    phase: ClassVar[int] = 2
    claims: ClassVar[frozenset[str]] = frozenset({"sum_gradients"})
    wraps: ClassVar[frozenset[str]] = frozenset({"clip", "update"})
    works_through: ClassVar[frozenset[str]] = frozenset()
    unplanned: ClassVar[str] = "its memory depends on the number of processes"

    def contract(self, setting: Setting) -> Close:
        """Returns Close: gradients and norms are sums in another order."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns why nothing is divided, or None.

        Raises:
            UsageError: The model, or another stage, reads parameters as a whole.
        """
        if setting.processes == 1:
            return "one process has all parameters"
        if len(setting.model.roles) > 1:
            roles = ", ".join(setting.model.roles)
            raise UsageError(
                f"'{setting.model.kind}' trains several networks ({roles}), which fsdp does not divide; switch it off"
            )
        if setting.data.division == "draws":
            raise UsageError(
                f"processes draw parts of the batches of '{setting.data.kind}', and the first evaluates alone, which "
                "needs all parameters; switch fsdp off"
            )
        for kind, stage in setting.stages.items():
            if stage.traces:
                raise UsageError(f"'{kind}' traces whole parameters, which a process does not have; switch one off")
        return None


class Fsdp(Stage):
    """Divides the modules of a learner."""

    def attach(self, pipeline: Pipeline) -> None:
        """Divides the blocks of each module, then what is left of it."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        learner = pipeline.learner
        processes = learner.context.processes
        assert processes is not None
        if any(settings.kind == "muon" for settings in learner.context.optimizers.values()):
            raise UsageError(
                "fsdp: Muon rounds products of whole matrices to bfloat16, which parts of them cannot repeat; "
                "use another optimizer"
            )
        mesh = init_device_mesh(pipeline.device.type, (processes.count,))
        for module in learner.modules().values():
            units = [*_blocks_inside(module, learner.blocks()), module]
            for unit in units:
                # Runs before the hooks of fully_shard.
                unit.register_forward_hook(_without_views)
                # Parameters of the outermost module are freed after its forward pass, too, because
                # an evaluation has no backward pass that would free them.
                divided = fully_shard(unit, mesh=mesh, reshard_after_forward=True)
                # Losses are divided by the count of the entire batch.
                divided.set_gradient_divide_factor(1.0)
                divided.set_force_sum_reduction_for_comms(enable=True)
        learner.sharding = DTensorSharding()
        self._update = f"{type(learner).__name__}.update"
        pipeline.slots.wrap("clip", _with_plain_norm)
        pipeline.slots.wrap("update", self._refusing)

    def _refusing(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the slot that raises a RunnerError where a part of a parameter would be used as if it were whole."""

        def refusing(*args: Any) -> Any:
            try:
                return update(*args)
            except RuntimeError as error:
                problem = _problem_of(str(error))
                if problem is None:
                    raise
                raise RunnerError(f"optimization.fsdp: {self._update} {problem}, or switch fsdp off") from error

        return refusing


class DTensorSharding:
    """Converts between whole tensors and the parts of processes, which are ``DTensor``s of torch."""

    def is_divided(self, tensor: Tensor) -> bool:
        """Returns whether a process has only a part of a tensor."""
        from torch.distributed.tensor import DTensor

        return isinstance(tensor, DTensor)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Returns the numbers of a tensor that this process has, in the same memory."""
        from torch.distributed.tensor import DTensor

        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns a tensor as a single process has it; all processes have to call it."""
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor

    def divided_like(self, tensor: Tensor, example: Tensor) -> Tensor:
        """Returns the part of a whole tensor that this process has, if the example is divided."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(example, DTensor) or isinstance(tensor, DTensor):
            return tensor
        # Every process has the whole tensor, so nothing is sent.
        return distribute_tensor(tensor.to(example.device), example.device_mesh, example.placements, src_data_rank=None)


def _blocks_inside(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the blocks that are parts of a module."""
    identities = {id(layer) for layer in module.modules()} - {id(module)}
    return [block for block in blocks if id(block) in identities]


def _problem_of(message: str) -> str | None:
    """Returns what an update does that parts of parameters do not allow, from torch's message; None
    if the message is about something else.
    """
    if MIXED in message:
        return (
            "reads a parameter outside of the forward pass of its module, where a process has only a "
            "part of it; read it in there"
        )
    if UNKNOWN.search(message):
        operator = OPERATOR.search(message)
        name = f" ({operator[0]})" if operator else ""
        return f"calls an operator that torch cannot compute with parts of parameters{name}; use another optimizer"
    return None


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Copies outputs that share memory with another tensor.

    A hook of ``fully_shard`` on an output starts the backward pass of its module. In-place
    operations replace the history of a view, and the hook with it.
    """
    return map_tensors(lambda tensor: tensor.clone() if tensor._base is not None else tensor, output)


def _with_plain_norm(clip: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the slot that clips gradients, with a norm that every process has."""
    sharding = DTensorSharding()

    def clipped(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        return norm if norm is None else sharding.whole(norm)

    return clipped
