"""Wrong caches of samples, and images that are augmented at random: a plugin file for tests."""

from typing import Any, ClassVar

import torch

from runner.plugins.stages import sample_cache, sample_key
from runner.plugins.stages.sample_cache import CachedBatches, SampleCache, SampleCacheConfig
from runner.plugins.vision.stored_config import Hdf5ImagesConfig
from runner.plugins.vision.stored_images import Hdf5Images


class NoNumberBatches(CachedBatches):
    def find(self, index: int) -> Any:
        return super().find(0)

    def keep(self, index: int, sample: Any) -> None:
        super().keep(0, sample)


class WithoutNumber(SampleCache):
    def wrap(self, data: Any, key: str | None) -> Any:
        return NoNumberBatches(data, str(key), self.memory, self.disk, key)


class WithoutNumberConfig(SampleCacheConfig):
    """Finds the same sample for every number.

    When it helps: never. When it hurts: always.
    """

    kind: ClassVar[str] = "without_number"
    implementation = "WithoutNumber"


class Stale(SampleCache):
    def _key(self, data: Any, fingerprint: str | None) -> str | None:
        return sample_key._state(data)


class StaleConfig(SampleCacheConfig):
    """Finds samples of a file that has changed since.

    When it helps: never. When it hurts: always.
    """

    kind: ClassVar[str] = "stale"
    implementation = "Stale"


class FrozenSamples(sample_cache.CachedSamples):
    def __getitem__(self, index: int) -> Any:
        sample = self.find(index)
        if sample is None:
            sample = self.data[index]
            self.keep(index, sample)
        return sample


class Frozen(SampleCache):
    def attach(self, pipeline: Any) -> None:
        source = pipeline.source
        self._prepare_tiers(pipeline)
        self.caches = []
        train = FrozenSamples(source.train, "train", self.memory, None)
        source.replace_data(train, source.held_out)


class FrozenConfig(SampleCacheConfig):
    """Keeps augmented samples.

    When it helps: never. When it hurts: always.
    """

    kind: ClassVar[str] = "frozen"
    implementation = "Frozen"


class TwoSamples(SampleCache):
    """Confuses training samples with held-out ones of the same number."""

    def wrap(self, data: Any, key: str | None) -> Any:
        return CachedBatches(data, "samples", self.memory, self.disk, "0" * 32)


class TwoSamplesConfig(SampleCacheConfig):
    """Finds a training sample for a held-out number.

    When it helps: never. When it hurts: always.
    """

    kind: ClassVar[str] = "without_dataset"
    implementation = "TwoSamples"


class Noisy(torch.utils.data.Dataset[Any]):
    """Adds noise to one of ``every`` images."""

    def __init__(self, data: Any, every: int) -> None:
        self.data = data
        self.every = every
        self.targets = data.targets

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        sample = self.data[index]
        if index % self.every == self.every - 1:
            noise = torch.randint(0, 40, sample["image"].shape, dtype=torch.uint8)
            sample["image"] = sample["image"] ^ noise
        return sample


class NoisyConfig(Hdf5ImagesConfig):
    """Images that are augmented at random."""

    kind: ClassVar[str] = "noisy_images"
    implementation = "NoisyImages"

    declares: bool = False
    every: int = 1

    def draws_samples(self) -> bool:
        return self.declares


class NoisyImages(Hdf5Images):
    def datasets(self, config: Any) -> Any:
        train, held_out = super().datasets(config)
        return Noisy(train, config.every), held_out
