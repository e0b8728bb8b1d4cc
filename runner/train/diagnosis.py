"""What a training looked like when a number stopped being finite: for a person, and as JSON for a program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from runner.system.tree import leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.plugin.learner import Learner
    from runner.plugin.progress import Progress
    from runner.plugin.source import Batch


class Finding(NamedTuple):
    """The first tensor on the way through an update that holds a number that is not finite."""

    kind: str
    """Where it is: batch, slot, gradient, parameter or loss."""
    tensor: str | None
    """Its name; None for a loss that only an earlier update returned."""
    slot: str | None = None
    """Which slot returned it."""

    def __str__(self) -> str:
        match self.kind:
            case "batch":
                return f"tensor '{self.tensor}' of the batch is not finite"
            case "gradient":
                return f"the gradient of '{self.tensor}' is not finite"
            case "parameter":
                return f"parameter '{self.tensor}' is not finite"
        if self.tensor is None:
            return "a loss was not finite in an earlier update, and nothing in the last one shows from where"
        return f"slot '{self.slot}' returned a tensor '{self.tensor}' that is not finite"


def find(batch: Batch, outputs: Mapping[str, Any], learner: Learner, losses: Mapping[str, Tensor]) -> Finding:
    """Looks where the first number that is not finite came from.

    Args:
        batch: what was learnt from.
        outputs: what the slots returned last, in the order in which they did.
        learner: whose gradients and parameters to look through.
        losses: scalars of the update, to blame where nothing before them is.
    """
    for finding, tensor in _in_order(batch, outputs, learner, losses):
        if is_broken(tensor):
            return finding
    return Finding("loss", None, "update")


def _in_order(
    batch: Batch, outputs: Mapping[str, Any], learner: Learner, losses: Mapping[str, Tensor]
) -> Iterator[tuple[Finding, Tensor]]:
    yield from ((Finding("batch", name), tensor) for name, tensor in named_tensors(batch))
    for slot, output in outputs.items():
        yield from ((Finding("slot", name, slot), tensor) for name, tensor in named_tensors(output))
    for name, gradient in learner.gradients().items():
        if gradient is not None:
            yield Finding("gradient", name), gradient
    yield from ((Finding("parameter", name), parameter) for name, parameter in learner.named_parameters())
    yield from ((Finding("loss", name, "update"), loss) for name, loss in losses.items())


def diagnosis(
    progress: Progress, finding: Finding, losses: Mapping[str, Tensor], batch: Batch, outputs: Mapping[str, Any],
    learner: Learner,
) -> dict[str, Any]:  # fmt: skip
    """Everything worth knowing about an update that failed; arguments as those of ``find``.

    Returns:
        Plain data that JSON can hold: numbers that are not finite are the strings NaN, Infinity and -Infinity.
    """
    gradients = learner.gradients()
    parameters = {}
    for name, parameter in learner.named_parameters():
        gradient = gradients.get(name)
        described = {"gradient_norm": None} if gradient is None else _size("gradient", gradient)
        parameters[name] = _size("parameter", parameter) | described
    return {
        "step": progress.done,
        "update": progress.updates,
        "found": finding._asdict() | {"message": str(finding)},
        "losses": {name: _plain(loss.item()) for name, loss in losses.items()},
        "batch": {name: statistics(tensor) for name, tensor in named_tensors(batch)},
        "slots": {
            slot: {name: statistics(tensor) for name, tensor in named_tensors(output)}
            for slot, output in outputs.items()
        },
        "parameters": parameters,
    }


def is_broken(tensor: Tensor) -> bool:
    """Whether a tensor holds a NaN or an infinity."""
    return not bool(tensor.isfinite().all())


def named_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a slot returned, or that a batch holds, by name."""
    prefix = "" if isinstance(output, Mapping) or hasattr(output, "_asdict") else "output "
    named = ((f"{prefix}{path}".strip(), leaf) for path, leaf in leaves(output))
    return [(name, leaf) for name, leaf in named if isinstance(leaf, Tensor)]


def statistics(tensor: Tensor) -> dict[str, Any]:
    """Shape and type of a tensor, how many NaN and infinities it holds, and what the finite numbers are like.

    Returns:
        ``shape``, ``dtype``, ``nan``, ``inf``, and of the finite numbers ``min``, ``max``, ``mean`` and ``std`` (of the
        population), None if there are none.
    """
    values = _double(tensor)
    finite = values[values.isfinite()]
    counts = {"nan": int(values.isnan().sum()), "inf": int(values.isinf().sum())}
    described = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), **counts}
    if not len(finite):
        return described | dict.fromkeys(("min", "max", "mean", "std"))
    moments = {"min": finite.min(), "max": finite.max(), "mean": finite.mean(), "std": finite.std(correction=0)}
    return described | {name: _plain(value.item()) for name, value in moments.items()}


def _size(what: str, tensor: Tensor) -> dict[str, Any]:
    """The Euclidean norm of the finite numbers, None if there are none, and how many are not."""
    values = _double(tensor)
    finite = values[values.isfinite()]
    norm = _plain(finite.norm().item()) if len(finite) else None
    return {f"{what}_norm": norm, f"{what}_not_finite": len(values) - len(finite)}


def _double(tensor: Tensor) -> Tensor:
    """All numbers on the host, where there is memory left, and wide enough for sums of squares."""
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return parts.detach().to("cpu", torch.float64).flatten()


def _plain(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
