"""Sums of gradients and of results over the processes of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from runner.plugin.contract import Mean
from runner.plugin.gradient_bucket import GradientBucket, Summing, real_pairs
from runner.system.errors import RunnerError
from runner.system.tensor_trees import summable

if TYPE_CHECKING:
    from collections.abc import Iterable


def sum_gradients(
    parameters: Sequence[Tensor],
    group: Summing,
    add: Callable[[GradientBucket], object] = GradientBucket.sum,
) -> None:
    """Replaces the gradients of parameters by their sums over all processes.

    A parameter without a gradient in every process stays without one, because an optimizer
    would otherwise step it.

    Args:
        parameters: The parameters.
        group: The processes.
        add: Adds up the gradients of one type, and the flags of parameters that have one.

    Raises:
        RunnerError: A gradient is sparse.
    """
    by_type: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]]
    by_type = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise RunnerError("several processes cannot add up sparse gradients; use dense ones")
        by_type[parameter.dtype, parameter.device].append(parameter)
    for members in by_type.values():
        bucket = GradientBucket.of(members, group)
        add(bucket)
        _take_over(bucket)


def _take_over(bucket: GradientBucket) -> None:
    """Gives the sums of a bucket to its parameters."""
    counts = bucket.flags.tolist()
    for parameter, total, count in zip(bucket.parameters, bucket.views(), counts, strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        real_pairs(parameter.grad).copy_(total)


class _Summand(NamedTuple):
    """A scalar result of an update, in numbers that can be added up.

    Attributes:
        total: Sum, or the value times the share of the samples.
        weight: Count of the sum, or that share.
        occurrences: 1 for each process that has it.
        means: 1 for each process in which it is a ``Mean``.
    """

    total: Any
    weight: Any
    occurrences: float
    means: float


_NUMBERS = len(_Summand._fields)


class ResultSums:
    """Adds up the results of updates over all processes.

    A ``Mean`` is the sum of the sums over the sum of the counts. Another scalar is the mean that
    is weighted with the samples of each process.

    Args:
        group: The processes.
        device: The device of the results.
        owner: The class whose update returns them, for messages.
    """

    def __init__(self, group: Summing, device: torch.device, owner: str) -> None:
        self._group = group
        self._device = device
        self._owner = owner
        # All processes add up results of the same names in the same order.
        self._names: list[str] = []

    def add_up(
        self, output: Mapping[str, Any], share: float, votes: Sequence[float]
    ) -> tuple[dict[str, Any], list[float]]:
        """Returns the results of the entire batch, and the sums of the votes.

        Args:
            output: The results of this process.
            share: Its share of the samples.
            votes: Further numbers to add up.

        Raises:
            RunnerError: A result has one row per sample.
        """
        self._refuse_rows(output)
        flat = self._sum(output, share, votes)
        # The first element counts the processes whose results have other names.
        if float(flat[0]):
            lists = self._group.gather([*self._names, *output])
            self._names = list(dict.fromkeys(name for names in lists for name in names))
            flat = self._sum(output, share, votes)
        end = 1 + len(votes)
        results: dict[str, Any] = {}
        for name, entry in zip(self._names, flat[end:].view(-1, _NUMBERS), strict=True):
            total, weight, occurrences, means = entry.unbind()
            if not float(occurrences):
                continue
            if float(means):
                example = output.get(name, Mean(0.0, 0.0))
                mean = Mean(_typed(total, example.sum), _typed(weight, example.count))
                results[name] = mean
            else:
                results[name] = _mean(total / weight, output.get(name, 0.0))
        return results, flat[1:end].tolist()

    def _sum(self, output: Mapping[str, Any], share: float, votes: Sequence[float]) -> Tensor:
        has_new_names = not output.keys() <= set(self._names)
        numbers: list[Any] = [float(has_new_names), *votes]
        for name in self._names:
            if name in output:
                numbers += _summand(output[name], share)
            else:
                numbers += [0.0] * _NUMBERS
        flat = _flat(numbers, self._device)
        self._group.sum_in_place(flat)
        return flat

    def _refuse_rows(self, output: Mapping[str, Any]) -> None:
        for name, value in output.items():
            if isinstance(value, Tensor) and value.dim():
                raise RunnerError(
                    f"{self._owner}.update returns '{name}' with dimensions, for the source's "
                    "feedback, which several processes do not give"
                )


def _flat(numbers: Iterable[Any], device: torch.device) -> Tensor:
    """Returns numbers and scalar tensors as one tensor in float64."""
    # Tensors on another device stay there, so that nothing waits for them.
    scalars = [torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers]
    return torch.stack(scalars)


def _summand(value: Any, share: float) -> _Summand:
    if isinstance(value, Mean):
        return _Summand(value.sum, value.count, 1.0, 1.0)
    return _Summand(summable(value) * share, share, 1.0, 0.0)


def _typed(total: Tensor, example: Any) -> Any:
    """Returns a sum in the type in which numbers like another one are added up."""
    if isinstance(example, Tensor):
        return total.to(summable(example).dtype)
    return type(example)(total.item())


def _mean(mean: Tensor, example: Any) -> Any:
    """Returns a mean of numbers like another one; that of integers is in float64."""
    is_integer = isinstance(example, Tensor) and not example.is_floating_point()
    return mean if is_integer else _typed(mean, example)
