"""N-grams of the characters of the text that the language models learn."""

import time

import numpy as np
from kneser_ney import KneserNey, windows_of
from results import Result

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble

ORDERS = (4, 5, 6, 7)


def measure(_seeds):
    """Returns the cross-entropy of all held-out characters; nothing depends on a seed."""
    source = assemble(load("mamba2_shakespeare", ["device=cpu"], Registry())).source
    train = source.train.tokens.numpy()
    # The held-out part starts with the last character of the training part.
    text = np.concatenate([train, source.held_out.tokens.numpy()[1:]])
    symbols = source.sizes["vocabulary"]
    for order in ORDERS:
        started = time.perf_counter()
        model = KneserNey(windows_of(train, order, order - 1), symbols)
        probability = model.probabilities(windows_of(text, order, len(train)))
        nats = float(-np.log(probability).mean())
        seconds = time.perf_counter() - started
        yield Result(
            "shakespeare_gpt, mamba2_shakespeare",
            f"Kneser-Ney, {order} characters",
            "nats_per_character",
            {None: nats},
            seconds,
        )
