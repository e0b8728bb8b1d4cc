"""Tells datasets the number of the epoch, if they have ``set_epoch``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from runner.plugin.attributes import attributes_of

_LARGEST_CONTAINER = 100
"""Longer lists hold samples."""


class _Record(NamedTuple):
    """The epoch that an object was told last.

    Attributes:
        reference: The object; another one may have its identity later.
        epoch: The number of the epoch.
        is_direct: Whether it was told here, not only by a dataset that contains it.
    """

    reference: weakref.ref[Any]
    epoch: int
    is_direct: bool


_records: dict[int, _Record] = {}
"""The epochs that objects were told in this process, by the identity of the object."""


def set_epoch(data: Any, epoch: int) -> None:
    """Tells a dataset, or those inside it (``Subset``, ``ConcatDataset``), the epoch, unless it is
    the one that they were told last, and so were the readers in their attributes.
    """
    for receiver in _receivers(data):
        record = _record_of(receiver)
        objects = _objects_with_epoch(receiver)
        inner_records = [_record_of(item) for item in objects]
        is_current = all(item is None or item.epoch == epoch for item in inner_records)
        if record is not None and record.is_direct and is_current:
            continue
        receiver.set_epoch(epoch)
        for item, previous in zip(objects, inner_records, strict=True):
            is_direct = item is receiver
            if previous is not None and previous.epoch == epoch:
                is_direct |= previous.is_direct
            # An object without weak references is told again.
            with suppress(TypeError):
                _records[id(item)] = _Record(weakref.ref(item), epoch, is_direct)


def _record_of(item: Any) -> _Record | None:
    """Returns the record of an object; None if it was told no epoch."""
    record = _records.get(id(item))
    return record if record is not None and record.reference() is item else None


def _objects_with_epoch(receiver: Any) -> list[Any]:
    """Returns a dataset and what has ``set_epoch`` in its attributes, and in theirs.

    Another dataset may read from the same objects, and be in another epoch.
    """
    objects = {id(receiver): receiver}
    pending = [receiver]
    while pending:
        for value in attributes_of(pending.pop()).values():
            is_list = type(value) in (list, tuple) and len(value) <= _LARGEST_CONTAINER
            for item in value if is_list else (value,):
                has_epoch = callable(getattr(type(item), "set_epoch", None))
                if has_epoch and id(item) not in objects:
                    objects[id(item)] = item
                    pending.append(item)
    return list(objects.values())


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
