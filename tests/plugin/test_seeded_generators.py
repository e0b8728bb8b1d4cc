"""Random generators that a dataset owns are seeded for every batch, wherever they are."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from records import Source, drawn, source_of
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from runner.plugin.generators import HostGeneratorStates, find_generators, seeded
from runner.plugin.repeatability import describe_randomness

OF_MODULE = np.random.default_rng(0)


class Noisy(Dataset):
    """Its samples are the next number of a function."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"x": torch.tensor(float(self.draw()))}


class Noise(nn.Module):
    """A transform in a list of a dictionary, with a generator in a slot."""

    class Slotted:
        __slots__ = ("__generator",)

        def __init__(self, generator):
            self.__generator = generator

        def draw(self):
            return self.__generator.random()

    def __init__(self):
        super().__init__()
        self.steps = {"noise": [self.Slotted(random.Random(0))]}

    def __call__(self):
        return self.steps["noise"][0].draw()


class OfClass:
    generator = np.random.RandomState(0)

    def __call__(self):
        return self.generator.rand()


class Lazy:
    generator = None

    def __call__(self):
        if self.generator is None:
            self.generator = np.random.Generator(np.random.Philox(0))
        return self.generator.random()


def in_closure():
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.rand((), generator=generator)


def of_module():
    return OF_MODULE.random()


def joined():
    inner = [Noisy(np.random.default_rng(number).random) for number in range(2)]
    return Subset(ConcatDataset(inner), range(12, 36))


DATASETS = {
    "method": lambda: Noisy(np.random.RandomState(np.random.PCG64(0)).rand),
    "module": lambda: Noisy(Noise()),
    "class": lambda: Noisy(OfClass()),
    "closure": lambda: Noisy(in_closure()),
    "global": lambda: Noisy(of_module),
    "argument": lambda: Noisy(partial(lambda generator: generator.random(), random.Random(0))),
    "lazy": lambda: Noisy(Lazy()),
    "joined": joined,
}


def values(batches):
    return [batch["x"].tolist() for batch in batches]


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
def test_the_number_of_a_batch_seeds_the_generators_of_a_dataset(make):
    source = source_of(make(), held_out=make())
    batches = values(drawn(source, 8))
    assert len({number for batch in batches for number in batch}) == 32
    resumed = source_of(make())
    resumed.load_state_dict({"consumed": 5})
    assert values(drawn(resumed, 3)) == batches[5:]
    assert values(source.held_out_batches()) == values(source.held_out_batches())


def test_workers_draw_the_numbers_of_a_training_without_them():
    plain, loaded = (source_of(Noisy(Noise()), workers=workers) for workers in (0, 2))
    assert values(drawn(plain, 4)) == values(drawn(loaded, 4))


def test_a_collate_is_seeded_with_the_generators_of_its_source(monkeypatch):
    def collate(self, samples):
        return {"x": torch.tensor([self.generator.random() for _ in samples])}

    monkeypatch.setattr(Source, "collate", collate)
    monkeypatch.setattr(Source, "generator", np.random.default_rng(0), raising=False)
    resumed = source_of([0] * 24)
    resumed.load_state_dict({"consumed": 2})
    assert values(drawn(resumed, 2)) == values(drawn(source_of([0] * 24), 4))[2:]


def test_generators_of_one_owner_draw_different_numbers_and_are_restored():
    owner = [np.random.default_rng(0), np.random.default_rng(0), [random.Random(0)]]
    owner.append(owner)
    generators = find_generators(owner)
    assert generators == [owner[0], owner[1], owner[2][0]]
    states = HostGeneratorStates(generators)
    with seeded(0, generators=generators):
        assert len({generator.random() for generator in generators}) == 3
        assert states.have_changed()
    assert not states.have_changed()
    owner[1].random()
    assert states.have_changed()
    states.restore()
    assert owner[0].random() == owner[1].random()


def test_global_generators_and_those_without_a_seed_are_left_out():
    system = random.SystemRandom()
    names = [np.random.mtrand._rand, random._inst, torch.default_generator, system, np.random.RandomState]
    assert find_generators(names, random.random, np.random.rand) == []


@pytest.mark.parametrize("make", [DATASETS["method"], DATASETS["closure"]])
def test_samples_of_a_dataset_with_a_generator_are_random(make):
    assert describe_randomness(source_of(make())) == "sample 0 of the training data uses random numbers"
