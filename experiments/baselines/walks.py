"""N-grams of walks through molecules, whose atoms are named by their distance instead of a number."""

import math
import time

import numpy as np
from kneser_ney import KneserNey, windows_of
from results import TEST, Result

from runner.plugin.registry import Registry
from runner.plugins.sequences.walks import NUMBERS, VOCABULARY
from runner.recipe.loader import load
from runner.training.pipeline import assemble

ORDERS = (4, 8)
WALKS = 20
"""Walks of every training molecule; the model trains on about as many."""


FIRST_NUMBER = 7
"""The token of the atom with the number 0."""
DISTANCE = 200
"""The symbol of a distance of 0; those of other distances are around it."""
SYMBOLS = VOCABULARY + 2 * NUMBERS
"""More symbols than there are; a symbol that no training walk has gets its share of them."""


def relative(tokens):
    """Returns a walk in which the number of an atom is its distance from that of the atom before it.

    A new atom has the symbol 0, because its number follows from the walk so far. The probabilities of the symbols are
    those of the tokens: each can be computed from the other.
    """
    first = tokens[0]
    symbols = [0]
    seen = 1
    last = 0
    for token in tokens[1:]:
        number = (token - first) % NUMBERS
        if not is_number(token):
            symbols.append(token)
            continue
        symbols.append(0 if number == seen else DISTANCE + last - number)
        seen = max(seen, number + 1)
        last = number
    return symbols


def is_number(token):
    """Returns whether a token is the number of an atom."""
    return FIRST_NUMBER <= token < FIRST_NUMBER + NUMBERS


def rows_of(walks, order, number_of_symbol):
    """Returns the windows of all symbols of all walks except the first symbol of each."""
    before = [len(number_of_symbol)] * (order - 1)
    rows = []
    for walk in walks:
        numbers = np.array(before + [number_of_symbol[symbol] for symbol in walk])
        rows.append(windows_of(numbers, order, order))
    return np.concatenate(rows)


def measure(seeds):
    """Returns the perplexity of the tokens of held-out walks."""
    values = {order: {} for order in ORDERS}
    seconds = dict.fromkeys(ORDERS, 0.0)
    for seed in seeds:
        source = assemble(load("graphgpt_esol", ["device=cpu", f"seed={seed}", *TEST], Registry())).source
        molecules = range(len(source.train))
        train = [
            relative(source.train.walk(index, variant).tokens.tolist())
            for index in molecules
            for variant in range(WALKS)
        ]
        held_out = [relative(source.held_out[index].tokens.tolist()) for index in range(len(source.held_out))]
        symbols = sorted({symbol for walk in [*train, *held_out] for symbol in walk})
        number_of_symbol = {symbol: number for number, symbol in enumerate(symbols)}
        for order in ORDERS:
            started = time.perf_counter()
            base = len(symbols) + 1
            model = KneserNey(rows_of(train, order, number_of_symbol), SYMBOLS, base)
            probability = model.probabilities(rows_of(held_out, order, number_of_symbol))
            values[order][seed] = math.exp(float(-np.log(probability).mean()))
            seconds[order] = time.perf_counter() - started
    for order in ORDERS:
        yield Result(
            "graphgpt_esol", f"Kneser-Ney, {order} relative tokens", "perplexity", values[order], seconds[order]
        )
