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
    Batch,
    GradientLearner,
    Manifest,
    Pipeline,
    RunnerError,
    UsageError,
    map_tensors,
    stored_tensors,
)

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class ForwardCall(NamedTuple):
    """Inputs and output of a call of the slot ``forward``."""

    inputs: tuple[Any, ...]
    output: Any


class _Enough(Exception):  # noqa: N818 (it is not an error)
    """Raised when the first call has been recorded."""


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
        # Averaged parameters are in the module only while it is evaluated.
        weights = {
            name: map_tensors(torch.clone, module.state_dict())
            for name, module in learner.modules().items()
        }
    learner.averages = None
    for name, module in learner.modules().items():
        module.load_state_dict(weights[name])
    return learner


def replaced(learner: GradientLearner, module: nn.Module) -> None:
    """Replaces the learner's network by another module of the same form."""
    learner.module = learner.model.module = module.to(learner.device)


@contextmanager
def forward_replaced(learner: GradientLearner, answer: Any) -> Iterator[None]:
    """Replaces the slot ``forward`` by ``answer`` inside the ``with``."""
    slots = learner.slots
    original = slots.forward
    vars(slots)["forward"] = answer
    try:
        yield
    finally:
        vars(slots)["forward"] = original


def first_call(pipeline: Pipeline, learner: GradientLearner, kind: str) -> ForwardCall:
    """Returns the first call of the network by ``predict`` for a batch, with its output.

    Raises:
        UsageError: There is no call.
    """
    batches = (batch for batch, _ in pipeline.batches())
    return next(forward_calls(learner, kind, batches))


def forward_calls(
    learner: GradientLearner, kind: str, batches: Iterable[Batch]
) -> Iterator[ForwardCall]:
    """Yields the first call of the network by ``predict`` for each of the batches."""
    calls: list[ForwardCall] = []

    def answer(*inputs: Any) -> NoReturn:
        with learner.slots.precision():
            # A source may overwrite its memory with the next batch.
            copies = map_tensors(lambda tensor: tensor.clone(), inputs)
            calls.append(ForwardCall(copies, learner.module(*inputs)))
        raise _Enough

    for batch in batches:
        with forward_replaced(learner, answer):
            try:
                learner.predict(learner.inputs(batch))
            except _Enough:
                yield calls.pop()
            else:
                raise UsageError(
                    f"{kind}: learner '{learner.config.kind}' answers without its slot 'forward'"
                )


def fixed_batch(
    pipeline: Pipeline, learner: GradientLearner, kind: str, fits: Callable[..., bool]
) -> str | None:
    """Returns why a program answers only batches as large as the training's; None if it answers
    others.

    Args:
        pipeline: Its source cuts a batch.
        learner: The learner whose network the program replaces.
        kind: The stage, for messages.
        fits: Returns whether the program answers these inputs of the network.
    """
    batch, _ = next(pipeline.batches())
    size = pipeline.source.size(batch)
    try:
        pieces = [
            next(pipeline.source.split(batch, smaller))
            for smaller in {1, size - 1}
            if 0 < smaller < size
        ]
    except RunnerError:
        # Some batches cannot be cut.
        return None
    calls = forward_calls(learner, kind, pieces)
    if not pieces or any(fits(call.inputs) for call in calls):
        return None
    return (
        f"its program answers only batches of {size}: forward turns that size into a number; "
        f"use x.shape[0] instead of len(x) or int(x.shape[0])"
    )


def parameters(module: nn.Module) -> int:
    """Returns the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether the patterns match a module of that name or a module that contains it."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        for pattern in patterns
    )


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
    folder = pipeline.folder
    # A link could lead to files of another user.
    if folder is not None and folder.is_symlink():
        folder = None
    if folder is not None and _is_whole(folder / name):
        try:
            return use(folder / name)
        except Exception as error:
            # The exceptions of safetensors and ONNX Runtime have no common base class.
            reason = " ".join(str(error).split()) or type(error).__name__
            _log.warning("%s: %s; it is made again", folder / name, reason)
    # The file gets its name when it is complete, so that a crash leaves no partial file.
    workplace = _workplace(folder)
    weakref.finalize(stage, shutil.rmtree, workplace, ignore_errors=True)
    path = workplace / name
    try:
        make(path)
        if folder is not None and workplace.parent == folder:
            files = sorted(workplace.iterdir())
            Manifest.of(folder).adopt({folder / file.name: file for file in files})
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
    if not manifest.is_whole(path):
        return False
    return not manifest.names(weights) or manifest.is_whole(weights)


def _workplace(folder: Path | None) -> Path:
    """Returns a new folder inside of another one, or elsewhere if nothing can be written there."""
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            return Path(mkdtemp(prefix=".partial-", dir=folder))
    return Path(mkdtemp())


def digest(module: nn.Module, *settings: Any) -> str:
    """Returns sixteen hexadecimal digits that depend on weights and settings."""
    # The version is included, because another version may compute the stored file differently.
    text = json.dumps([torch.__version__, *settings], sort_keys=True, default=str)
    result = hashlib.sha256(text.encode())
    for name, tensor in module.state_dict().items():
        result.update(f"{name} {tuple(tensor.shape)}".encode())
        for storage in stored_tensors(tensor):
            flat = storage.detach().cpu().contiguous().view(-1)
            result.update(flat.view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:16]


def trained(
    pipeline: Pipeline,
    stage: Any,
    name: str,
    module: nn.Module,
    train: Callable[[], None],
) -> None:
    """Trains a module, unless its weights are stored in the pipeline's folder.

    The module is in evaluation mode afterwards.
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
