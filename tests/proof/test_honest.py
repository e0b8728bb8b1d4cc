"""A sample of the honest rewrites; ``experiments/instrument/honest.py`` judges all of them."""

import inspect

import pytest
import torch
from zoo import MODELS, Loop

from runner.proof import Close, Exact, verify

COMPILED = {"aot_eager", "inductor"}
REWRITES = [(name, way) for name, kind in MODELS.items() for way in kind.rewrites() if not way & COMPILED]
UPDATES, SAMPLE = 4, 6


def named(value):
    return value if isinstance(value, str) else ", ".join(sorted(value))


def judge(name, way, contract):
    draw = torch.Generator().manual_seed(1)
    batches = [MODELS[name].batch(draw) for _ in range(UPDATES)]
    return verify(*(lambda way=way: Loop(MODELS[name], way).subject() for way in (frozenset(), way)), batches, contract)


@pytest.mark.parametrize("name", [*MODELS][::6])
def test_a_model_has_the_same_bits_as_itself(name):
    assert judge(name, frozenset(), Exact())


@pytest.mark.parametrize(("name", "way"), REWRITES[:: len(REWRITES) // SAMPLE], ids=named)
def test_an_honest_rewrite_is_close(name, way):
    assert judge(name, way, Close())


@pytest.mark.parametrize("kind", MODELS.values())
def test_every_way_of_a_model_is_written_down_in_it(kind):
    sources = "".join(inspect.getsource(each) for each in kind.__mro__ if each.__module__.startswith("zoo."))
    assert all(sources.count(f'"{way}"') >= 2 for way in {*kind.own} - COMPILED)
