"""Stages that need samples by number report a stream, also one that inherits ``__getitem__`` from torch."""

from types import SimpleNamespace

import pytest
from records import Itself, source_of

from runner.api import UsageError
from runner.plugin.inspection import has_numbers
from runner.plugins.stages.preprocess_once import Kept, PreprocessOnce, PreprocessOnceConfig
from runner.plugins.stages.sample_cache import CachedSamples, SampleCache, SampleCacheConfig
from runner.plugins.stages.sorted_evaluation import SortedEvaluation, SortedEvaluationConfig

SAMPLES = [{"index": number} for number in range(8)]
STAGES = {
    "preprocess_once": lambda: PreprocessOnce(PreprocessOnceConfig()),
    "sample_cache": lambda: SampleCache(SampleCacheConfig(disk=None)),
    "sorted_evaluation": lambda: SortedEvaluation(SortedEvaluationConfig()),
}


def stream():
    return Itself(8, again=True)


def attached(kind, train, held_out):
    """Attaches a stage, and returns the source and the reason if the stage is inactive."""
    reasons = []
    source = source_of(train, held_out)
    pipeline = SimpleNamespace(source=source, deactivate=reasons.append, note=print)
    STAGES[kind]().attach(pipeline)
    return source, "".join(reasons)


@pytest.mark.parametrize("kind", ["sample_cache", "sorted_evaluation"])
def test_a_stream_makes_a_stage_inactive(kind):
    assert attached(kind, stream(), stream())[1] == "Itself is a stream, whose samples have no numbers"


def test_a_stream_cannot_be_preprocessed_once():
    with pytest.raises(UsageError, match="preprocess_once needs samples by number, which Itself has not"):
        attached("preprocess_once", stream(), SAMPLES)


@pytest.mark.parametrize(("kind", "cache"), [("preprocess_once", Kept), ("sample_cache", CachedSamples)])
def test_a_held_out_stream_is_left_as_it_is(kind, cache):
    source, reason = attached(kind, SAMPLES, stream())
    assert not reason
    assert isinstance(source.train, cache)
    assert [len(batch["index"]) for batch in source.held_out_batches()] == [4, 4]


def test_only_datasets_with_an_index_have_numbers():
    assert has_numbers(SAMPLES)
    assert not has_numbers(stream())
    assert not has_numbers(None)
