"""Modes of torch that observe the operations of a step, or change how they are computed."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.proof.difference import TOLERANCE, differing
from runner.proof.isolation import Frame
from runner.system.tensor_trees import as_float64

# Operations that add numbers.
_ADDS = re.compile(r"sum|mean|var|norm|conv|mm|loss|dot")
# Functions that have a kernel for each memory format.
_BY_FORMAT = re.compile(r"conv\d?d|batch_norm|group_norm|instance_norm|pool")
# Dimensions of a batch of images.
_IMAGE = 4
# p (1 - p) below which 1 - p has lost the digits of a gradient in float64.
_SATURATED = 1e-9


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the first operation that makes numbers of fewer digits from float64, and its
    place.
    """

    narrowest: torch.dtype | None = None
    line = ""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.narrowest is None:
            inputs = {tensor.dtype for tensor in _tensors((args, kwargs))}
            if torch.float64 in inputs or torch.complex128 in inputs:
                self.narrowest = _first_narrow_type(output)
            if self.narrowest is not None:
                self.line = calling_line()
        return output

    def explain(self, baseline: Frame, changed: Frame) -> bool:
        """Returns whether the two differ, and by no more than what is rounded away there."""
        if self.narrowest is None:
            return False
        tolerance = min(1000 * torch.finfo(self.narrowest).eps, 0.1)
        if not any(differing(baseline, changed, TOLERANCE)):
            return False
        return not any(differing(baseline, changed, tolerance))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _first_narrow_type(output: Any) -> torch.dtype | None:
    """Returns the first floating-point or complex type with fewer digits than float64."""
    for tensor in _tensors(output):
        is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if is_number and torch.finfo(tensor.dtype).bits < 64:
            return tensor.dtype
    return None


def calling_line() -> str:
    """Returns the innermost line of code that is neither torch's nor a comparison's."""
    excluded = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    stack = traceback.extract_stack()
    frames = [frame for frame in stack if not frame.filename.startswith(excluded)]
    last = frames[-1]
    return f"{Path(last.filename).name}:{last.lineno}, in {last.name}"


class NarrowTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the 16-bit types to which numbers of more digits are rounded, with the first
    place of each type.

    A number that has all of its digits in the narrow type is not rounded: a mask may have any type.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        # A graph that is captured must not be read.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return output
        narrow = [leaf for leaf in tree_leaves(output) if _has_bits(leaf, at_most=16)]
        inputs = tree_leaves((args, kwargs))
        wide = [leaf for leaf in inputs if _has_bits(leaf, at_least=32)]
        for tensor in narrow:
            name = str(tensor.dtype)
            if name in self.places:
                continue
            if any(_is_rounded(source, tensor) for source in wide):
                self.places[name] = calling_line()
        return output


def _has_bits(leaf: Any, at_least: int = 0, at_most: int = 128) -> bool:
    """Returns whether a leaf is a tensor of floating-point numbers with a number of bits
    between the limits.
    """
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return False
    if leaf.layout != torch.strided:
        return False
    return at_least <= torch.finfo(leaf.dtype).bits <= at_most


def _is_rounded(source: Tensor, narrow: Tensor) -> bool:
    """Returns whether a tensor has fewer digits than the one from which it was made."""
    if source.shape != narrow.shape:
        # An operation with numbers of both types, whose result is rounded.
        return source.numel() > 0
    widened = narrow.to(source.dtype)
    return bool(((widened != source) & source.isfinite()).any())


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the largest number of terms that an operation adds to one number."""

    terms = 1.0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if _ADDS.search(str(func)):
            # The quotient of the sizes is the number of terms of each result.
            largest = max((tensor.numel() for tensor in _tensors(args)), default=0)
            counts = [tensor.numel() for tensor in _tensors(output) if tensor.numel()]
            self.terms = max(self.terms, largest / min(counts, default=math.inf))
        return output


class OtherFormat(TorchFunctionMode):
    """Gives normalisations and convolutions images in the other memory format.

    That is pixel by pixel, or channel by channel if the first image is pixel by pixel.
    """

    format: torch.memory_format | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _BY_FORMAT.search(getattr(func, "__name__", "")):
            args, kwargs = tree_map_only(Tensor, self._convert, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _convert(self, tensor: Tensor) -> Tensor:
        if tensor.dim() != _IMAGE or tensor.layout != torch.strided:
            return tensor
        if self.format is None:
            is_pixelwise = tensor.is_contiguous(memory_format=torch.channels_last)
            if is_pixelwise and not tensor.is_contiguous():
                self.format = torch.contiguous_format
            else:
                self.format = torch.channels_last
        return tensor.contiguous(memory_format=self.format)


class Probabilities(TorchFunctionMode):
    """Observes the probabilities in ``binary_cross_entropy``: its gradient ends where
    p (1 - p) is 1e-12.
    """

    saturated = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "binary_cross_entropy" and args:
            share = as_float64(args[0])
            self.saturated |= bool((share * (1 - share) < _SATURATED).any())
        return func(*args, **(kwargs or {}))
