"""What a training looked like when a number stopped being finite: for a person, and as JSON for a program."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from runner.plugin.learner import Learner
from runner.plugin.source import Batch
from runner.system.files import write_durably

DIAGNOSIS_NAME = "diagnosis.json"


@dataclass(frozen=True)
class Finding:
    """The first tensor on the way through an update that holds a number that is not finite."""

    kind: Literal["batch", "slot", "gradient", "parameter", "loss"]
    tensor: str | None
    """Its name; None for a loss that only an earlier update returned."""
    slot: str | None = None
    """Which slot returned it."""

    def __str__(self) -> str:
        if self.kind == "batch":
            return f"tensor '{self.tensor}' of the batch is not finite"
        if self.kind == "gradient":
            return f"the gradient of '{self.tensor}' is not finite"
        if self.kind == "parameter":
            return f"parameter '{self.tensor}' is not finite"
        if self.tensor is None:
            return "a loss was not finite in an earlier update, and nothing in the last one shows from where"
        return f"slot '{self.slot}' returned a tensor '{self.tensor}' that is not finite"


def find(batch: Batch, outputs: Mapping[str, Any], learner: Learner) -> Finding | None:
    """Looks where the first number that is not finite came from.

    Args:
        batch: what was learnt from.
        outputs: what the slots returned last, in the order in which they did.
        learner: whose gradients and parameters to look through.

    Returns:
        None if all of them are finite.
    """
    for name, tensor in named_tensors(batch):
        if is_broken(tensor):
            return Finding("batch", name)
    for slot, output in outputs.items():
        for name, tensor in named_tensors(output):
            if is_broken(tensor):
                return Finding("slot", name, slot)
    for name, gradient in learner.gradients().items():
        if gradient is not None and is_broken(gradient):
            return Finding("gradient", name)
    for name, parameter in learner.named_parameters():
        if is_broken(parameter):
            return Finding("parameter", name)
    return None


def diagnosis(
    step: int,
    update: int,
    finding: Finding,
    losses: Mapping[str, Tensor],
    batch: Batch,
    outputs: Mapping[str, Any],
    learner: Learner,
) -> dict[str, Any]:
    """Everything worth knowing about an update that failed.

    Args:
        step: environment steps (of a simulator) or updates (of a dataset) so far.
        update: updates so far.
        finding: what was found first.
        losses: the scalars of the update by name.
        batch: what it learnt from.
        outputs: what the slots returned last.
        learner: after the update.

    Returns:
        Plain data that JSON can hold: numbers that are not finite are the strings NaN, Infinity and -Infinity.
    """
    return {
        "step": step,
        "update": update,
        "found": asdict(finding) | {"message": str(finding)},
        "losses": {name: _plain(loss.item()) for name, loss in losses.items()},
        "batch": _described(batch),
        "slots": {slot: _described(output) for slot, output in outputs.items()},
        "parameters": _parameters(learner),
    }


def write_diagnosis(folder: Path, content: Mapping[str, Any]) -> Path:
    """Writes ``diagnosis.json`` into a folder, which is made if need be.

    Returns:
        The path of the file.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / DIAGNOSIS_NAME
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return path


def is_broken(tensor: Tensor) -> bool:
    """Whether a tensor holds a NaN or an infinity."""
    return not bool(tensor.isfinite().all())


def named_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a slot returned, or that a batch holds, by name."""
    if isinstance(output, Tensor):
        return [("output", output)]
    if hasattr(output, "_asdict"):
        output = output._asdict()
    elif isinstance(output, tuple):
        output = {f"output {i}": tensor for i, tensor in enumerate(output)}
    fields = output if isinstance(output, dict) else {}
    return [(name, tensor) for name, tensor in fields.items() if isinstance(tensor, Tensor)]


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


def _described(output: Any) -> dict[str, Any]:
    return {name: statistics(tensor) for name, tensor in named_tensors(output)}


def _parameters(learner: Learner) -> dict[str, dict[str, Any]]:
    gradients = learner.gradients()
    described = {}
    for name, parameter in learner.named_parameters():
        gradient = gradients.get(name)
        described[name] = {
            **_size("parameter", parameter),
            **(_size("gradient", gradient) if gradient is not None else {"gradient_norm": None}),
        }
    return described


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
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number
