"""Weights of classes, and samples drawn equally often from every class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from runner.plugin.config import Config
from runner.system.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ClassWeights = Literal["balanced"] | list[Annotated[float, Field(gt=0)]]
"""``balanced``, or a weight for each class."""


class ClassWeightsConfig(Config):
    """Adds ``class_weights`` to the settings of a learner; derive from it first.

    The learner multiplies the loss of a sample by ``context.class_weights[label]``.
    """

    omitted: ClassVar[frozenset[str]] = frozenset({"class_weights"})

    class_weights: ClassWeights | None = None
    """Weights of the classes in the training's loss: balanced (in inverse proportion to their
    training samples), or a list; null weights all samples equally. Evaluation has no weights.
    """

    @field_validator("class_weights", mode="wrap")
    @classmethod
    def _one_problem(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Reports one problem instead of one for each alternative."""
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(
                f"should be balanced or a list of positive numbers, got {value!r}"
            ) from None


def weights_of_classes(
    setting: str | Sequence[float], counts: Sequence[int] | None, classes: int | None
) -> list[float]:
    """Returns the weight of each class.

    Balanced weights are samples / (classes * samples of the class), over the classes that have
    samples, so that the mean weight of a sample is 1.

    Args:
        setting: The value of ``class_weights``.
        counts: Training samples of each class; None if the data have no labels.
        classes: Number of classes; None if the data do not report it.

    Raises:
        ValueError: The setting does not fit the data.
    """
    if setting != "balanced":
        weights = [float(weight) for weight in setting]
        if classes is not None and len(weights) != classes:
            raise ValueError(
                f"has {len(weights)} weights, and the data have {classes} classes"
            )
        return weights
    if counts is None:
        raise ValueError(
            "balanced needs a label for each training sample; use a list of weights"
        )
    present = sum(count > 0 for count in counts)
    if not present:
        raise ValueError("balanced needs training samples with a label")
    total = sum(counts)
    return [total / (present * count) if count else 0.0 for count in counts]


def labels_of(data: Any, name: str, attribute: str = "targets") -> Tensor | None:
    """Returns the class of every sample [N] on the host; None if the data have no labels.

    Args:
        data: Rows, or a map-style dataset.
        name: Name of the tensor with labels among rows.
        attribute: Attribute of a map-style dataset with labels, by default that of torchvision.

    Raises:
        UsageError: A dataset has another number of labels than of samples.
    """
    import torch
    from torch.utils.data import ConcatDataset, Subset

    from runner.plugin.rows import SelectedRows, TensorRows

    if isinstance(data, SelectedRows | Subset):
        index = data.index if isinstance(data, SelectedRows) else data.indices
        complete = data.rows if isinstance(data, SelectedRows) else data.dataset
        inner = labels_of(complete, name, attribute)
        return None if inner is None else inner[torch.as_tensor(index, device="cpu")]
    if isinstance(data, ConcatDataset):
        parts = [labels_of(dataset, name, attribute) for dataset in data.datasets]
        known = [labels for labels in parts if labels is not None]
        return torch.cat(known) if len(known) == len(parts) else None
    labels = getattr(data, attribute, None)
    if isinstance(data, TensorRows):
        labels = data.tensors.get(name)
    if labels is None:
        return None
    try:
        labels = torch.as_tensor(labels).cpu()
    except (RuntimeError, TypeError, ValueError):
        # Text, for example.
        return None
    is_class = (
        labels.dim() == 1 and not labels.is_floating_point() and not labels.is_complex()
    )
    if not is_class:
        return None
    refuse_other_length(labels, data, f"{type(data).__name__}.{attribute}")
    return labels.long()


def refuse_other_length(labels: Tensor, data: Any, origin: str) -> None:
    """Raises a UsageError if there is not one label for each sample.

    Args:
        labels: The labels [N].
        data: Rows or a dataset.
        origin: Where the labels are from, for the message.
    """
    # A stream may have no length.
    if hasattr(data, "__len__") and len(labels) != len(data):
        problem = f"has {len(labels):,} labels for {len(data):,} samples"
        raise UsageError(
            f"data: {origin} {problem}: return one for each sample, in their order"
        )


def count_labels(labels: Tensor, classes: int | None) -> list[int]:
    """Returns the number of samples of each class; a negative label is unknown."""
    import torch

    counts: list[int] = torch.bincount(
        labels[labels >= 0], minlength=classes or 0
    ).tolist()
    return counts


def balanced_order(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draws as many samples as there are, with replacement: first a class, then one of its samples.

    Args:
        labels: Class of every sample [N]; samples with a negative label are never drawn.
        generator: On the host.

    Returns:
        Numbers of samples [N].
    """
    import torch

    # Sorted by class, the samples of a class are a range.
    order = labels.argsort(stable=True)
    order = order[(labels < 0).sum() :]
    counts = torch.bincount(labels[order])
    starts = counts.cumsum(0) - counts
    present = counts.nonzero()[:, 0]
    draws = torch.rand(2, len(labels), generator=generator, dtype=torch.float64)
    drawn_classes = present[(draws[0] * len(present)).long()]
    positions = (draws[1] * counts[drawn_classes]).long()
    return order[starts[drawn_classes] + positions]
