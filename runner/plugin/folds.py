"""Cross-validation: samples divided into folds, each of which is held out once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from runner.plugin.config import Config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runner.plugin.configs import DatasetConfig


GROUPS = "groups"
"""Attribute of a map-style dataset with the number of the group of every sample."""


class FoldsConfig(Config):
    """One fold of a cross-validation: all samples are divided again, and this fold is held out."""

    count: Annotated[int, Field(ge=2)] = 5
    """Number of folds."""
    index: Annotated[int, Field(ge=0)] = 0
    """The fold that is held out, from 0; ``runner run --folds`` trains all of them."""
    by: Literal["random", "class", "group"] = "random"
    """How samples are divided: random (by the recipe's seed), class (every fold has the same share
    of each class), or group (samples of one group stay together).
    """

    @model_validator(mode="after")
    def _index_below_count(self) -> Self:
        if self.index >= self.count:
            raise ValueError(
                f"index {self.index} exceeds the last of {self.count} folds"
            )
        return self


class Division(NamedTuple):
    """Samples with the numbers of those to train on and of those that are held out.

    Attributes:
        samples: All samples, as ``pool`` returns them.
        train: Numbers of samples to train on [train].
        held_out: Numbers of held-out samples [held-out].
    """

    samples: Any
    train: Tensor
    held_out: Tensor


def divide(
    config: DatasetConfig,
    folds: FoldsConfig,
    train: Any,
    held_out: Any,
    key: str,
    generator: torch.Generator,
    test: Any = None,
) -> Division:
    """Returns the division of all samples of which one fold is held out.

    Args:
        config: Settings of the source.
        folds: The fold, and how samples are divided.
        train: Samples that the source trains on.
        held_out: Samples that it holds out.
        key: Name of the tensor with classes or groups.
        generator: On the host; the same for every fold of a cross-validation.
        test: Samples that were set aside from those that the source holds out, if there are any.

    Raises:
        ValueError: The samples cannot be divided.
    """
    if not config.divisible:
        raise ValueError("it needs all of its samples together")
    import torch

    from runner.plugin.class_balance import labels_of

    samples = pool(train, held_out)
    keys = None
    if folds.by != "random":
        keys = labels_of(samples, key, "targets" if folds.by == "class" else GROUPS)
        if keys is None:
            raise ValueError(f"it has no {folds.by} of each sample; use by: random")
        tested = labels_of(test, key, GROUPS) if folds.by == "group" else None
        if tested is not None and torch.isin(tested, keys).any():
            raise ValueError(
                "a group of its test data has training samples, too; remove data.test, or hold "
                "out complete groups"
            )
    is_held_out = fold_numbers(len(samples), folds, generator, keys) == folds.index
    return Division(
        samples, (~is_held_out).nonzero()[:, 0], is_held_out.nonzero()[:, 0]
    )


def pool(train: Any, held_out: Any) -> Any:
    """Returns the samples of both sets as one, those for the training first.

    Raises:
        ValueError: They cannot be divided in another way.
    """
    from torch.utils.data import ConcatDataset, IterableDataset, Subset

    from runner.plugin.rows import Rows, TensorRows

    if type(train) is TensorRows and type(held_out) is TensorRows:
        return _joined_rows(train, held_out)
    if isinstance(train, Rows) or isinstance(held_out, Rows):
        raise ValueError("its samples may overlap or depend on each other")
    datasets = (train, held_out)
    if any(
        isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
        for data in datasets
    ):
        raise ValueError("its samples are a stream and have no numbers")
    # A part of the held-out samples may be set aside for a test.
    complete = [data.dataset if isinstance(data, Subset) else data for data in datasets]
    if type(complete[0]) is not type(complete[1]):
        raise ValueError(
            "its training samples and its held-out samples are of different types"
        )
    return ConcatDataset(datasets)


def _joined_rows(train: Any, held_out: Any) -> Any:
    import torch

    from runner.plugin.rows import TensorRows

    first, second = train.tensors, held_out.tensors
    described = [
        {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()}
        for tensors in (first, second)
    ]
    if described[0] != described[1]:
        raise ValueError(
            "its training samples and its held-out samples have different tensors"
        )
    return TensorRows({name: torch.cat([first[name], second[name]]) for name in first})


def fold_numbers(
    samples: int, folds: FoldsConfig, generator: torch.Generator, keys: Tensor | None
) -> Tensor:
    """Returns the fold of every sample, [samples].

    The sizes of folds differ by one sample at most, except by group: there, the largest groups come
    first, each in the fold that has the fewest samples.

    Args:
        samples: Number of samples.
        folds: How they are divided.
        generator: On the host; the same for every fold of a cross-validation.
        keys: Class or group of every sample [samples]; None if they are divided at random.

    Raises:
        ValueError: There are fewer samples or groups than folds.
    """
    import torch

    order = torch.randperm(samples, generator=generator)
    if folds.by == "group" and keys is not None:
        return _whole_groups(keys, order, folds.count)
    if samples < folds.count:
        raise ValueError(f"it has {samples} samples, and needs at least {folds.count}")
    if keys is not None:
        # Neighbours in this order are of one class, and go into different folds.
        order = order[keys[order].argsort(stable=True)]
    numbers = torch.empty(samples, dtype=torch.int64)
    numbers[order] = torch.arange(samples) % folds.count
    return numbers


def _whole_groups(keys: Tensor, order: Tensor, count: int) -> Tensor:
    import torch

    _, group_of_sample = torch.unique(keys, return_inverse=True)
    sizes = torch.bincount(group_of_sample)
    if len(sizes) < count:
        raise ValueError(f"it has {len(sizes)} groups, and needs at least {count}")
    # Groups of one size are in random order.
    shuffled = order.new_tensor(list(dict.fromkeys(group_of_sample[order].tolist())))
    largest_first = shuffled[sizes[shuffled].argsort(descending=True, stable=True)]
    fold_of_group = torch.empty(len(sizes), dtype=torch.int64)
    totals = torch.zeros(count, dtype=torch.int64)
    for group in largest_first.tolist():
        fold = int(totals.argmin())
        fold_of_group[group] = fold
        totals[fold] += sizes[group]
    return fold_of_group[group_of_sample]
