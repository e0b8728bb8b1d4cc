"""Common functions of the stages: the network of the slot ``forward``, its inputs, and
stored files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from runner.api import (
    GradientLearner,
    Manifest,
    Pipeline,
    UsageError,
    map_tensors,
    stored_tensors,
)

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class Question(NamedTuple):
    """One call of the slot ``forward``."""

    inputs: tuple[Any, ...]
    output: Any


class _Enough(Exception):  # noqa: N818 (it is no error)
    """The first call has been recorded."""


def settled(pipeline: Pipeline, kind: str) -> GradientLearner:
    """Returns the learner; if it has averaged parameters, they replace the others permanently.

    Raises:
        UsageError: it is not a module and a loss.
    """
    learner = pipeline.learner
    if not isinstance(learner, GradientLearner):
        raise UsageError(
            f"{kind}: learner '{learner.config.kind}' is not one network, but {len(learner.roles)}"
        )
    with learner.evaluating():
        weights = {
            name: tensor.clone() for name, tensor in learner.module.state_dict().items()
        }
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
    """Returns the first call of the network by ``predict`` for a batch, with its output.

    Raises:
        UsageError: There is no call.
    """
    return next(iter(questions(pipeline, learner, kind, 1)))


def questions(
    pipeline: Pipeline, learner: GradientLearner, kind: str, count: int
) -> Iterator[Question]:
    """Yields the same for ``count`` batches."""
    found: list[Question] = []

    def answer(*inputs: Any) -> NoReturn:
        with learner.slots.precision():
            # A source may use its memory again.
            copies = map_tensors(lambda tensor: tensor.clone(), inputs)
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
                raise UsageError(
                    f"{kind}: learner '{learner.config.kind}' answers without its slot 'forward'"
                )


# --- weights ------------------------------------------------------------------------------------
# ----------------------


def parameters(module: nn.Module) -> int:
    """Returns the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a module of that name, or one that it is in, is meant."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        for pattern in patterns
    )


# --- files --------------------------------------------------------------------------------------
# ----------------------


def stored_file(
    pipeline: Pipeline,
    stage: Any,
    name: str,
    make: Callable[[Path], None],
    use: Callable[[Path], Result],
) -> Result:
    """Uses a file that a stage creates from the network: the one in the pipeline's folder if it is
    undamaged, else a new one.

    A file is read only if the manifest of its run names it; a damaged one is made again, with a
    warning. Where nothing can be written, the file is in a folder that lasts as long as the
    stage.

    Args:
        pipeline: Whose folder it is in, if it has one.
        stage: The stage.
        name: The name of the file, which follows from what it is made of.
        make: Writes it, and ``<name>.data`` next to it if it has large weights, at the path that
            it is given.
        use: Reads it. If that fails for a file that was there, the file is made again.

    Returns:
        What ``use`` returns.

    Raises:
        UsageError: the disk refuses the file.
    """
    folder = (
        None
        if pipeline.folder is None or pipeline.folder.is_symlink()
        else pipeline.folder
    )
    if folder is not None and _is_whole(folder / name):
        try:
            return use(folder / name)
        except Exception as error:
            # Whatever safetensors and ONNX Runtime raise.
            reason = " ".join(str(error).split()) or type(error).__name__
            _log.warning("%s: %s; it is made again", folder / name, reason)
    workplace = _workplace(folder)
    weakref.finalize(stage, shutil.rmtree, workplace, ignore_errors=True)
    path = workplace / name
    try:
        make(path)
        if folder is not None and workplace.parent == folder:
            Manifest.of(folder).adopt(
                {folder / file.name: file for file in sorted(workplace.iterdir())}
            )
            workplace.rmdir()
            path = folder / name
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{stage.config.kind}: {path} cannot be written: {cause}"
        ) from error
    return use(path)


def _is_whole(path: Path) -> bool:
    """Returns whether a file, and the one with its large weights, are as they were written."""
    manifest = Manifest.of(path.parent)
    weights = path.with_name(f"{path.name}.data")
    return manifest.is_whole(path) and (
        not manifest.names(weights) or manifest.is_whole(weights)
    )


def _workplace(folder: Path | None) -> Path:
    """Returns a new folder inside of another one, or elsewhere if nothing can be written there."""
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            return Path(mkdtemp(prefix=".partial-", dir=folder))
    return Path(mkdtemp())


def digest(module: nn.Module, *settings: Any) -> str:
    """Sixteen hexadecimal digits that follow from weights and settings."""
    found = hashlib.sha256(
        json.dumps([torch.__version__, *settings], sort_keys=True, default=str).encode()
    )
    for name, tensor in module.state_dict().items():
        found.update(f"{name} {tuple(tensor.shape)}".encode())
        for part in stored_tensors(tensor):
            found.update(
                part.detach()
                .cpu()
                .contiguous()
                .view(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
    return found.hexdigest()[:16]


def trained(
    pipeline: Pipeline,
    stage: Any,
    name: str,
    module: nn.Module,
    train: Callable[[], None],
) -> None:
    """Trains a module, unless its weights are stored in the pipeline's folder; in evaluation mode
    in the end.
    """
    module.train()

    def make(path: Path) -> None:
        train()
        save_file(
            {key: tensor.contiguous() for key, tensor in module.state_dict().items()},
            path,
        )

    stored_file(pipeline, stage, f"{name}.safetensors", make, partial(_load, module))
    module.eval()


def _load(module: nn.Module, path: Path) -> None:
    """Loads weights, or none of them if they are not those of the module."""
    weights = load_file(path)
    expected = module.state_dict()
    if weights.keys() != expected.keys():
        raise ValueError("its weights have other names than the module's")
    for name, tensor in weights.items():
        if (tensor.shape, tensor.dtype) != (expected[name].shape, expected[name].dtype):
            raise ValueError(
                f"{name!r:.80} has another shape or type than in the module"
            )
    module.load_state_dict(weights)
