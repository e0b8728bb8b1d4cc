"""Computes every sample once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from runner.api import DatasetConfig, Exact, Pipeline, Setting, Stage, StageConfig, UsageError

if TYPE_CHECKING:
    from runner.api import DatasetSource


class PreprocessOnceConfig(StageConfig):
    """Keeps every sample as it was made when it was first drawn: decoded, parsed, with its features.

    A sample is found again by its number, in the memory of the process that loads it; nothing is kept on disk, so
    nothing there can be out of date.

    When it helps: making a sample costs more than a look into a dictionary, and there are several epochs.
    When it hurts: all samples have to fit into memory, once for every worker.
    """

    kind: ClassVar[str] = "preprocess_once"
    implementation = "PreprocessOnce"
    phase: ClassVar[int] = 1

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: the same samples."""
        return Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if samples are not repeated, or in memory already."""
        if not isinstance(setting.data, DatasetConfig):
            return f"'{setting.data.kind}' is not a dataset: samples are never repeated"
        return "the data are in memory as they are used" if setting.data.in_memory else None


class PreprocessOnce(Stage):
    """Caches samples between the source and its datasets."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the training and the held-out data in caches.

        Raises:
            UsageError: Samples differ at each access, or the dataset has no samples by number.
        """
        from runner.api import describe_randomness, has_numbers

        source = cast("DatasetSource", pipeline.source)
        if not has_numbers(source.train):
            raise UsageError(f"preprocess_once needs samples by number, which {type(source.train).__name__} has not")
        if reason := describe_randomness(source):
            raise UsageError(f"preprocess_once would freeze random samples: {reason}")
        self.kept = Kept(source.train)
        held_out = source.held_out
        source.replace_data(self.kept, Kept(held_out) if has_numbers(held_out) else held_out)

    def closing_notes(self) -> Sequence[str]:
        """Returns how many samples were found in the cache; workers are not counted."""
        if not self.kept.found:
            return ()
        return (f"{len(self.kept.samples):,} samples made once, found again {self.kept.found:,} times",)


class Kept:
    """A map-style dataset with a cache of its samples."""

    def __init__(self, data: Any) -> None:
        from runner.api import SampleReader

        self.data = data
        self.samples = dict[int, Any]()
        # Numbers of samples that are copied tensor by tensor. They are examined when they are kept:
        # to examine one takes as long as to copy it.
        self._plain = set[int]()
        self.found = 0
        self._reader = SampleReader(data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        missing = [index for index in dict.fromkeys(indices) if index not in self.samples]
        # The dataset may reuse the memory of a sample, and a consumer may change it in place.
        if missing and hasattr(self.data, "__getitems__"):
            samples = self._reader.read_several(missing)
            if samples is None:
                # The random numbers of all samples together are those of a training without cache.
                return list(self.data.__getitems__(indices))
            for index, sample in zip(missing, samples, strict=True):
                self._keep(index, sample)
            self.found -= len(missing)
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> Any:
        """Returns a sample that was kept, or a new one, which is kept unless it is random."""
        if index in self.samples:
            self.found += 1
            return self._copied(index)
        sample, is_random = self._reader.read(index)
        if is_random:
            return sample
        self._keep(index, sample)
        return self._copied(index)

    def _keep(self, index: int, sample: Any) -> None:
        kept = copy_sample(sample)
        self.samples[index] = kept
        if _is_plain(kept):
            self._plain.add(index)

    def _copied(self, index: int) -> Any:
        sample = self.samples[index]
        return _cloned(sample) if index in self._plain else copy.deepcopy(sample)


def copy_sample(sample: Any) -> Any:
    """Returns a copy of a sample that shares no memory with it."""
    return _cloned(sample) if _is_plain(sample) else copy.deepcopy(sample)


def _cloned(sample: dict[Any, Any]) -> dict[Any, Any]:
    # The same as a deep copy, without its bookkeeping, and without the storage of a view: a row of
    # a batch would keep the entire batch in memory.
    return {key: value.clone() for key, value in sample.items()}


def _is_plain(sample: Any) -> bool:
    """Returns whether a sample is a dictionary of dense tensors without a gradient, each of which
    has its memory for itself.
    """
    import torch

    if type(sample) is not dict:
        return False
    for value in sample.values():
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.requires_grad:
            return False
    return len({value.untyped_storage().data_ptr() for value in sample.values()}) == len(sample)
