"""What the stages share: the network behind the slot ``forward``, what it is asked, and what was made of it before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from runner.api import GradientLearner, Pipeline, UsageError, map_tensors, replacing, stored_tensors


class Question(NamedTuple):
    """One call of the slot ``forward``."""

    inputs: tuple[Any, ...]
    output: Any


class _Enough(Exception):  # noqa: N818 (it is no error)
    """That the first call has been seen."""


def settled(pipeline: Pipeline, kind: str) -> GradientLearner:
    """The learner, with its averaged parameters for good if it has some: a finished run goes on without.

    Raises:
        UsageError: it is not a module and a loss.
    """
    learner = pipeline.learner
    if not isinstance(learner, GradientLearner):
        raise UsageError(f"{kind}: learner '{learner.config.kind}' is not one network, but {len(learner.roles)}")
    with learner.evaluating():
        weights = {name: tensor.clone() for name, tensor in learner.module.state_dict().items()}
    learner.averages = None
    learner.module.load_state_dict(weights)
    return learner


def replaced(learner: GradientLearner, module: nn.Module) -> None:
    """Lets the learner answer by another module of the same form."""
    learner.module = learner.model.module = module.to(learner.device)


@contextmanager
def asking(learner: GradientLearner, answer: Any) -> Iterator[None]:
    """Inside the ``with``, the slot ``forward`` is ``answer``."""
    slots = learner.slots
    before = slots.forward
    vars(slots)["forward"] = answer
    try:
        yield
    finally:
        vars(slots)["forward"] = before


def asked(pipeline: Pipeline, learner: GradientLearner, kind: str) -> Question:
    """What ``predict`` asks the network first, for a batch, and its answer.

    Raises:
        UsageError: it never asks.
    """
    return next(iter(questions(pipeline, learner, kind, 1)))


def questions(pipeline: Pipeline, learner: GradientLearner, kind: str, count: int) -> Iterator[Question]:
    """The same of so many batches."""
    found: list[Question] = []

    def answer(*inputs: Any) -> NoReturn:
        with learner.slots.precision():
            copies = map_tensors(lambda tensor: tensor.clone(), inputs)  # a source may use its memory again
            found.append(Question(copies, learner.module(*inputs)))
        raise _Enough

    batches = pipeline.batches()
    for _ in range(count):
        batch, _ = next(batches)
        with asking(learner, answer):
            try:
                learner.predict(learner.inputs(batch))
            except _Enough:
                yield found.pop()
            else:
                raise UsageError(f"{kind}: learner '{learner.config.kind}' answers without its slot 'forward'")


# --- weights ----------------------------------------------------------------------------------------------------------


def parameters(module: nn.Module) -> int:
    """How many numbers it has learnt."""
    return sum(parameter.numel() for parameter in module.parameters())


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module of that name, or one that it is in, is meant."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


# --- files ------------------------------------------------------------------------------------------------------------


def place_of(pipeline: Pipeline, stage: Any) -> Path:
    """The pipeline's folder, or one that lasts as long as the stage."""
    if pipeline.folder is None:
        stage.temporary = TemporaryDirectory()
        return Path(stage.temporary.name)
    pipeline.folder.mkdir(parents=True, exist_ok=True)
    return pipeline.folder


def digest(module: nn.Module, *settings: Any) -> str:
    """Sixteen hexadecimal digits that follow from weights and settings."""
    found = hashlib.sha256(json.dumps([torch.__version__, *settings], sort_keys=True, default=str).encode())
    for name, tensor in module.state_dict().items():
        found.update(f"{name} {tuple(tensor.shape)}".encode())
        for part in stored_tensors(tensor):
            found.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def trained(pipeline: Pipeline, name: str, module: nn.Module, train: Callable[[], None]) -> None:
    """Trains a module, unless what became of it is in the pipeline's folder; in evaluation mode in the end."""
    path = None if pipeline.folder is None else pipeline.folder / f"{name}.safetensors"
    module.train()
    if path is None or not _loaded(module, path):
        train()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                save_file({key: tensor.contiguous() for key, tensor in module.state_dict().items()}, partial)
    module.eval()


def _loaded(module: nn.Module, path: Path) -> bool:
    """Whether weights were there, whole, and fit."""
    try:
        module.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError):  # none yet, or damaged
        return False
    return True
