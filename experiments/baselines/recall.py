"""N-grams of the sequences of associative recall, and the rule by which they are generated."""

import time

import numpy as np
import torch
from kneser_ney import KneserNey
from numpy.lib.stride_tricks import sliding_window_view
from results import Result

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble

ORDERS = (2, 4, 8)
SEQUENCES = 50_000
"""Training sequences that are counted."""


def answered(model, windows, symbols):
    """Returns the accuracy of an n-gram model, and its cross-entropy."""
    candidates = []
    for symbol in range(symbols):
        candidate = windows.copy()
        candidate[:, -1] = symbol
        candidates.append(model.probabilities(candidate))
    probabilities = np.stack(candidates)
    answers = windows[:, -1]
    accuracy = np.mean(probabilities.argmax(0) == answers)
    nats = -np.log(probabilities[answers, np.arange(len(answers))]).mean()
    return {"accuracy": float(accuracy), "nats_per_answer": float(nats)}


def followers(tokens, first_answer):
    """Returns for every answer the token after the earlier occurrence of its query."""
    answers = []
    for row in tokens.tolist():
        for position in range(first_answer, len(row), 2):
            query = row[position - 1]
            answers.append(row[row.index(query) + 1])
    return np.array(answers)


def measure(_seeds):
    """Returns the accuracy and cross-entropy of all answers of the test; nothing depends on a seed."""
    source = assemble(load("recall_gpt", ["device=cpu"], Registry())).source
    symbols = source.sizes["vocabulary"]
    first_answer = source.first_answer
    torch.manual_seed(0)
    train = source.train.take(torch.arange(SEQUENCES))["tokens"].numpy()
    test = source.test.tensors["tokens"].numpy()
    for order in ORDERS:
        started = time.perf_counter()
        windows = sliding_window_view(train, order, axis=1).reshape(-1, order)
        model = KneserNey(windows, symbols)
        # A window ends with its answer.
        tested = sliding_window_view(test, order, axis=1)[:, first_answer - order + 1 :: 2]
        metrics = answered(model, tested.reshape(-1, order), symbols)
        seconds = time.perf_counter() - started
        for metric, value in metrics.items():
            yield Result("recall_gpt", f"Kneser-Ney, {order} tokens", metric, {None: value}, seconds)

    started = time.perf_counter()
    is_correct = followers(test, first_answer) == test[:, first_answer::2].ravel()
    seconds = time.perf_counter() - started
    yield Result("recall_gpt", "the rule of the task", "accuracy", {None: float(is_correct.mean())}, seconds)
