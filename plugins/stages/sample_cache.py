"""Keeps samples in memory and on disk."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import platformdirs
from pydantic import field_validator, model_validator

from runner.api import (
    Anchor,
    DatasetConfig,
    Exact,
    Pipeline,
    Setting,
    Stage,
    StageConfig,
    format_size,
    parse_size,
)

if TYPE_CHECKING:
    from runner.api import DatasetSource

    from .sample_tiers import DiskTier, MemoryTier


class SampleCacheConfig(StageConfig):
    """Keeps samples as they were made, in memory up to a limit and in files up to another.

    Both tiers keep the most recently used samples. A sample that leaves the memory is written to a
    file; workers write each new one, because their memory ends with them. The files are shared by
    workers and runs. The key of a sample consists of the fingerprint of the data, the dataset's
    attributes and code, the installed packages and the sample's number: files of other data are
    never found. A sample that used random numbers is never kept, and a dataset whose samples differ
    when they are read again makes the stage inactive. A folder that cannot be written is one
    warning, and the training continues with the memory alone.

    When it helps: decompressing or decoding a sample costs more than reading and checking a file,
    and not all samples fit into memory; otherwise use ``preprocess_once``.
    When it hurts: samples that are cheap to make; each new one is copied, and written once. Each
    epoch reads every sample once, in random order: a memory for a part of them gains little over
    files alone (``memory: null``).
    """

    kind: ClassVar[str] = "sample_cache"
    implementation = "SampleCache"
    phase: ClassVar[int] = 1

    memory: str | None = "256 MiB"
    """Bytes with a unit in each process that loads samples; null keeps none."""
    disk: str | None = "4 GiB"
    """Bytes with a unit of all files in the folder; null writes none."""
    folder: Annotated[str | None, Anchor()] = None
    """Where the files are; ``samples`` in the user's cache, unless set."""

    @field_validator("memory", "disk")
    @classmethod
    def _is_a_size(cls, size: str | None) -> str | None:
        if size is not None:
            parse_size(size)
        return size

    @model_validator(mode="after")
    def _has_a_tier(self) -> SampleCacheConfig:
        if self.memory is None and self.disk is None:
            raise ValueError("set memory, disk, or both: without them no sample is kept")
        if self.disk is None and self.folder is not None:
            raise ValueError("folder has no effect with disk: null; remove it")
        return self

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: the same samples."""
        return Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns why no sample can be found again, or need not be; None otherwise."""
        data = setting.data
        if not isinstance(data, DatasetConfig):
            return f"'{data.kind}' is not a dataset: samples are never repeated"
        if data.in_memory:
            return "the data are in memory as they are used"
        if data.draws_samples():
            return f"'{data.kind}' changes samples at random at each access"
        if "preprocess_once" in setting.stages:
            return "'preprocess_once' keeps all samples in memory already"
        return None


class SampleCache(Stage):
    """Puts a cache between the source and its datasets."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the training and the held-out data in caches."""
        from runner.api import DatasetSource, Rows, describe_randomness, has_numbers

        source = cast("DatasetSource", pipeline.source)
        self.caches: list[CachedSamples] = []
        if isinstance(source.train, Rows):
            pipeline.deactivate("the data are in memory as they are used")
            return
        if not has_numbers(source.train):
            kind = type(source.train).__name__
            pipeline.deactivate(f"{kind} is a stream, whose samples have no numbers")
            return
        if reason := describe_randomness(source):
            pipeline.deactivate(f"{reason}: to keep it would freeze it")
            return
        self._prepare_tiers(pipeline)
        # The key of each dataset covers its files.
        is_default = type(source).fingerprint is DatasetSource.fingerprint
        fingerprint = None if is_default else source.fingerprint()
        train = self._cached(source.train, fingerprint)
        held_out = source.held_out
        if has_numbers(held_out):
            held_out = self._cached(held_out, fingerprint)
        source.replace_data(train, held_out)
        if self.disk is not None and any(cached.key is None for cached in self.caches):
            pipeline.note("no file: nothing identifies the data, or they cannot be pickled")

    def closing_notes(self) -> Sequence[str]:
        """Returns how many samples were found; workers are not counted."""
        calls = sum(cached.made for cached in self.caches)
        in_memory = sum(cached.found_in_memory for cached in self.caches)
        on_disk = sum(cached.found_on_disk for cached in self.caches)
        if not calls + in_memory + on_disk:
            return ()
        hits = f"found {in_memory:,} times in memory and {on_disk:,} times on disk"
        return (f"{calls:,} samples made, {hits}",)

    def _prepare_tiers(self, pipeline: Pipeline) -> None:
        from .sample_tiers import MemoryTier

        config: SampleCacheConfig = self.config
        self.memory = MemoryTier(parse_size(config.memory) if config.memory else 0)
        self.disk: DiskTier | None = None
        if config.disk is None:
            return
        user_cache = platformdirs.user_cache_dir("runner", appauthor=False)
        folder = Path(user_cache, "samples") if config.folder is None else Path(config.folder)
        disk = _disk_tier(folder.absolute(), parse_size(config.disk))
        if disk.is_on:
            self.disk = disk
            pipeline.note(f"at most {format_size(disk.limit)} of samples in {disk.folder}")

    def _cached(self, data: Any, fingerprint: str | None) -> Any:
        """Returns the data with a cache of each dataset in them."""
        from torch.utils.data import ConcatDataset, Subset

        # Parts and sums number their samples in another way than the dataset with the files.
        if type(data) is Subset:
            subset = copy.copy(data)
            subset.dataset = self._cached(data.dataset, fingerprint)
            return subset
        if type(data) is ConcatDataset:
            joined = copy.copy(data)
            joined.datasets = [self._cached(inner, fingerprint) for inner in data.datasets]
            return joined
        cached = self.wrap(data, self._key(data, fingerprint))
        self.caches.append(cached)
        return cached

    def _key(self, data: Any, fingerprint: str | None) -> str | None:
        from .sample_key import key_of_dataset

        return None if self.disk is None else key_of_dataset(data, fingerprint)

    def wrap(self, data: Any, key: str | None) -> CachedSamples:
        """Returns a cache of a dataset."""
        cls = CachedBatches if hasattr(data, "__getitems__") else CachedSamples
        # Datasets without a key differ by their position among the caches.
        name = key or f"dataset {len(self.caches)}"
        return cls(data, name, self.memory, self.disk if key else None, key)


@cache
def _disk_tier(folder: Path, limit: int) -> DiskTier:
    """Returns the tier of a folder; a process warns once about a folder."""
    from .sample_tiers import DiskTier

    tier = DiskTier(folder, limit)
    tier.check()
    return tier


class CachedSamples:
    """A map-style dataset whose samples are kept in two tiers.

    Args:
        data: The dataset.
        name: Name of the dataset in the memory.
        memory: Samples in this process.
        disk: Samples in files; None keeps none.
        key: Name of the dataset on disk.
    """

    def __init__(
        self,
        data: Any,
        name: str,
        memory: MemoryTier,
        disk: DiskTier | None,
        key: str | None = None,
    ) -> None:
        from runner.api import SampleReader

        self.data = data
        self.reader = SampleReader(data)
        self.name = name
        self.memory = memory
        self.disk = disk
        self.key = key
        self.made = 0
        self.found_in_memory = 0
        self.found_on_disk = 0

    def __len__(self) -> int:
        return len(self.data)

    @property
    def targets(self) -> Any:
        """Returns the classes of the samples; None if the dataset has none."""
        return getattr(self.data, "targets", None)

    def __getitem__(self, index: int) -> Any:
        """Returns the sample with this number."""
        sample = self.find(index)
        if sample is not None:
            return sample
        sample, is_random = self.reader.read(index)
        self.made += 1
        if not is_random:
            self.keep(index, sample)
        return sample

    def find(self, index: int) -> Any:
        """Returns a copy of a sample that was kept; None if there is none."""
        from .sample_tiers import Slot

        slot = Slot(self.name, index)
        sample = self.memory.get(slot)
        if sample is not None:
            self.found_in_memory += 1
            return sample
        if self.disk is None:
            return None
        sample = self.disk.get(slot)
        if sample is not None:
            self.found_on_disk += 1
            # Without room for it, the copy would be for nothing.
            if self.memory.limit:
                self._remember(slot, sample)
        return sample

    def keep(self, index: int, sample: Any) -> None:
        """Keeps a copy of a sample, if it consists of tensors, arrays, numbers and texts."""
        from torch.utils.data import get_worker_info

        from .sample_files import UncachableError
        from .sample_tiers import Slot

        slot = Slot(self.name, index)
        try:
            self._remember(slot, sample)
        except UncachableError:
            return
        # The memory of a worker ends with it, at the latest after an evaluation.
        if self.disk is not None and get_worker_info() is not None:
            self.disk.put(slot, sample)

    def _remember(self, slot: Any, sample: Any) -> None:
        """Puts a copy of a sample into the memory, and on disk what has to leave it."""
        from .sample_files import copy_tree

        for old_slot, old_sample in self.memory.put(slot, copy_tree(sample)):
            if self.disk is not None:
                self.disk.put(old_slot, old_sample)


class CachedBatches(CachedSamples):
    """A dataset that reads several samples in one call."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples with these numbers, in this order."""
        samples = {index: self.find(index) for index in dict.fromkeys(indices)}
        missing = [index for index, sample in samples.items() if sample is None]
        if missing:
            new_samples = self.reader.read_several(missing)
            if new_samples is None:
                # The random numbers of all samples together are those of a training without cache.
                return list(self.data.__getitems__(indices))
            self.made += len(missing)
            for index, sample in zip(missing, new_samples, strict=True):
                self.keep(index, sample)
                samples[index] = sample
        # A sample that is drawn twice is not one object, which could be changed in place.
        repeated: set[int] = set()
        batch = []
        for index in indices:
            batch.append(copy.deepcopy(samples[index]) if index in repeated else samples[index])
            repeated.add(index)
        return batch
