"""Tells datasets the number of the epoch, if they have ``set_epoch``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

_epochs: MutableMapping[Any, int] = WeakKeyDictionary()
"""The epochs that datasets were told last in this process."""


def set_epoch(data: Any, epoch: int) -> None:
    """Tells a dataset, or those inside it (``Subset``, ``ConcatDataset``), the epoch, unless it is
    the one that they were told last.
    """
    for receiver in _receivers(data):
        try:
            if _epochs.get(receiver) == epoch:
                continue
            _epochs[receiver] = epoch
        # An object that has no hash or no weak references is told again.
        except TypeError:
            pass
        receiver.set_epoch(epoch)


def depends_on_epoch(data: Any) -> bool:
    """Returns whether a dataset or one inside it has ``set_epoch``."""
    return next(_receivers(data), None) is not None


def _receivers(data: Any) -> Iterator[Any]:
    if callable(getattr(data, "set_epoch", None)):
        yield data
        return
    # These are the attributes of torch's datasets that are made of others.
    inner = [getattr(data, "dataset", None)]
    several = getattr(data, "datasets", ())
    if isinstance(several, Mapping):
        inner += several.values()
    elif isinstance(several, list | tuple):
        inner += several
    for dataset in inner:
        if dataset is not None:
            yield from _receivers(dataset)
