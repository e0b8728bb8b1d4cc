"""Recognizes samples that are random: read again, they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.plugin.batches import Plugins, fail, read_sample
from runner.plugin.dataset_epochs import depends_on_epoch
from runner.plugin.failures import Failure
from runner.plugin.generators import HostGeneratorStates, find_generators, seeded
from runner.plugin.inspection import is_stream
from runner.plugin.loading import load_batches
from runner.plugin.rows import Rows
from runner.system.tensor_trees import leaves

if TYPE_CHECKING:
    from runner.plugin.dataset import DatasetSource

_PROBED = 8
"""Samples that are read twice."""


class SecondReading(Dataset[Any]):
    """Reads samples twice, in whichever process it is requested."""

    def __init__(self, data: Any, data_name: str) -> None:
        # The first attribute: attributes are unpickled in order.
        self.plugins = Plugins()
        self.data = data
        self.data_name = data_name

    def __getitem__(self, count: int) -> str | Failure:
        """Returns why a sample is random; empty if none of ``count`` evenly spread samples is."""
        try:
            samples = len(self.data)
            numbers = sorted({samples * part // count for part in range(count)})
            return self._difference(numbers if samples else [])
        except Exception as error:
            return fail(error)

    def _difference(self, numbers: Sequence[int]) -> str:
        generators = find_generators(self.data)
        for number in numbers:
            readings = []
            for seed in (1, 2):
                with seeded(seed, generators=generators):
                    states = HostGeneratorStates(generators)
                    readings.append(read_sample(self.data, number, self.data_name))
                    if states.have_changed():
                        return f"sample {number} of the {self.data_name} uses random numbers"
            if not _same(*readings):
                return f"sample {number} of the {self.data_name} differs when it is read again"
        return ""


class SampleReader:
    """Reads samples of a map-style dataset, and notices which of them use random numbers."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self._generators: list[Any] | None = None
        self._is_random = False

    def read(self, index: int) -> tuple[Any, bool]:
        """Returns a sample, and whether reading it used random numbers."""
        states = self._states()
        sample = self.data[index]
        return sample, states.have_changed()

    def read_several(self, indices: Sequence[int]) -> list[Any] | None:
        """Returns samples read in one call; None, from then on, if that used random numbers.

        The generators are then as before the call.
        """
        if self._is_random:
            return None
        states = self._states()
        samples = list(self.data.__getitems__(indices))
        if not states.have_changed():
            return samples
        states.restore()
        self._is_random = True
        return None

    def _states(self) -> HostGeneratorStates:
        if self._generators is None:
            self._generators = find_generators(self.data)
        return HostGeneratorStates(self._generators)


def describe_randomness(source: DatasetSource) -> str:
    """Returns why samples of a source are random: it declares so, one of a few is, or they may
    depend on the epoch; otherwise an empty text.

    They are read by a worker if there is one, as are all other samples.
    """
    if source.config.draws_samples():
        return f"'{source.config.kind}' changes samples at random at each access"
    workers = min(source.config.workers, 1)
    parts = {"training data": source.train, "held-out data": source.held_out}
    for name, data in parts.items():
        if isinstance(data, Rows) or is_stream(data):
            continue
        if depends_on_epoch(data):
            return (
                f"the {name} have set_epoch, so their samples may differ between epochs"
            )
        generator = torch.Generator().manual_seed(0)
        reading = SecondReading(data, name)
        (reason,) = load_batches(reading, [_PROBED], workers, generator)
        if reason:
            return str(reason)
    return ""


def _same(left: Any, right: Any) -> bool:
    first = dict(leaves(left))
    second = dict(leaves(right))
    return first.keys() == second.keys() and all(
        _same_value(value, second[name]) for name, value in first.items()
    )


def _same_value(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(
            left.to_dense().nan_to_num(), right.to_dense().nan_to_num()
        )
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    try:
        # A NaN differs from itself.
        return bool(left == right) or bool(left != left and right != right)
    # Objects without a comparison are compared by what they contain elsewhere.
    except Exception:
        return True
