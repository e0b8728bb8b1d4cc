"""A source that has shapes and no data cuts batches as the outlined source would."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import tiny

from runner.memory.outlined import OutlinedSource
from runner.plugin.outline import SourceOutline, TensorOutline
from runner.plugin.registry import Registry
from runner.plugins.graphs.padding import padded_nodes
from runner.plugins.molecules.smiles import read
from runner.plugins.molecules.table import PUBLISHED_COUNTS, Table
from runner.plugins.sequences.walks import encode
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.training.planning import plan_memory
from runner.training.step import Step


def outlined_source(counts):
    """Returns a source whose samples of length n are ``counts[n]``."""
    buckets = tuple({"x": TensorOutline((count, length))} for length, count in sorted(counts.items()))
    whole = {"x": TensorOutline((sum(counts.values()), max(counts)))}
    source = object.__new__(OutlinedSource)
    source.device = torch.device("cpu")
    source.outline = SourceOutline(whole, buckets=buckets)
    source.layout = source.outline.layout
    return source


@given(
    st.dictionaries(st.integers(1, 9), st.integers(1, 7), min_size=1, max_size=5),
    st.data(),
)
def test_buckets_are_the_largest_samples_in_ascending_order(counts, data):
    source = outlined_source(counts)
    total = sum(counts.values())
    size = data.draw(st.integers(1, total))
    parts = list(source.buckets({"x": torch.zeros(size, max(counts))}))

    assert torch.cat([rows for rows, _ in parts]).tolist() == list(range(size))
    lengths = [part["x"].shape[1] for rows, part in parts for _ in rows]
    largest = sorted(length for length, count in counts.items() for _ in range(count))[-size:]
    assert lengths == largest


@pytest.mark.parametrize("name", PUBLISHED_COUNTS)
def test_counts_of_published_tables_are_those_of_the_files(name, published):
    table = Table(load("gps_esol", [f"data.file={published(name)}"], Registry()).data, 0)
    molecules = [read(text) for text in table.smiles]
    nodes = [padded_nodes(len(molecule.atoms), 2 * len(molecule.bonds)) for molecule in molecules]
    tokens = [-(-len(encode(molecule, random.Random(0))) // 16) * 16 for molecule in molecules]
    assert PUBLISHED_COUNTS[name] == (Counter(nodes), Counter(tokens))


@pytest.mark.parametrize("name", ["gps_esol", "graphgpt_esol"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_outlined_buckets_have_the_form_of_real_ones(name, batch_size):
    """No part of a real batch is larger than the outlined ones allow."""
    recipe = tiny(name, f"train.batch_size={batch_size}")
    outline = recipe.data.outline(batch_size)
    assert sum(bucket["target"].shape[0] for bucket in outline.buckets) == batch_size
    lengths = [next(iter(bucket.values())).shape[1] for bucket in outline.buckets]
    assert lengths == sorted(set(lengths))

    pipeline = assemble(recipe)
    batch = Step(pipeline).next().batch
    for _, part in pipeline.source.buckets(batch):
        assert next(iter(part.values())).shape[1] <= lengths[-1]


def test_a_plan_with_buckets_needs_less_than_one_without():
    plan = plan_memory(load("graphgpt_esol", ["device=cpu"], Registry()))
    whole = plan_memory(load("graphgpt_esol", ["device=cpu", "optimization.bucketing=off"], Registry()))
    assert plan.peak < 0.75 * whole.peak
    assert plan.largest == "the 32 longest walks of esol.csv, padded to 240 tokens"
