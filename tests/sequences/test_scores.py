"""The numbers behind sampled symbols."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import tiny

from runner.training.pipeline import assemble

SETS = ("data.synthetic=true", "model.layers=1", "model.width=16", "data.context=8")
MODELS = {
    "shakespeare_gpt": (*SETS, "model.heads=2", "optimization.amp=off"),
    "mamba2_shakespeare": (*SETS, "model.head_width=8", "model.state=4"),
}
CONTEXT = 8
SYMBOLS = st.integers(0, 9)


@pytest.fixture(scope="module", params=sorted(MODELS))
def learner(request):
    return assemble(tiny(request.param, *MODELS[request.param])).learner


def inputs_of(rows, length, count, seed):
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(10, (rows, length), generator=generator)
    draws = torch.rand(rows, count, generator=generator)
    return {"prompt": prompt, "draws": draws, "temperature": torch.ones(rows, 1)}


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(1, CONTEXT + 2), st.integers(1, 5), st.integers(0, 10**6))
def test_scores_are_the_logits_of_the_complete_text(learner, rows, length, count, seed):
    inputs = inputs_of(rows, length, count, seed)
    scores = learner.scores(inputs)
    text = torch.cat([inputs["prompt"]] * (count + 1), dim=1)
    for step in range(count):
        window = text[:, : length + step]
        if hasattr(learner.module, "position"):
            window = window[:, -CONTEXT:]
        with torch.no_grad(), learner.evaluating():
            logits = learner.module(window)[:, -1]
        torch.testing.assert_close(scores[:, step], logits, rtol=1e-4, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6), st.floats(1e-4, 1e-2), st.data())
def test_a_decoder_that_is_off_in_one_step_shows(learner, length, count, seed, error, data):
    inputs = inputs_of(2, length, count, seed)
    wrong_step = data.draw(st.integers(0, count - 1))
    expected = learner.scores(inputs)
    make_decoder = learner.decoder

    def wrong_decoder():
        decode = make_decoder()
        steps = iter(range(count))
        return lambda symbols: decode(symbols) + error * (next(steps) == wrong_step)

    learner.decoder = wrong_decoder
    try:
        difference = (learner.scores(inputs) - expected).abs().amax(dim=(0, 2))
    finally:
        del learner.decoder
    assert difference[wrong_step] > 0.9 * error
    assert difference.sum() == difference[wrong_step]


def test_windows_of_symbols_have_no_scores_but_their_logits(learner):
    windows = torch.zeros(2, CONTEXT, dtype=torch.long)
    assert learner.scores(windows) is None
    assert learner.predict(windows).is_floating_point()
