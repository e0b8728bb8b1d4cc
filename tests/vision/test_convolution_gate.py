"""The gate passes the backends, and fails convolutions that are wrong on purpose."""

from pathlib import Path

import conv_mutants
import pytest
from running import tiny

from runner.plugin.registry import Registry
from runner.verify.gate import verify_recipe
from runner.verify.options import Options

REGISTRY = Registry([Path(conv_mutants.__file__)])
FEW = ("train.batch_size=4", "data.limit={train: 0.1, held_out: 0.02}")
MIXED = "conv_backend={forward: winograd, backward_data: fft, backward_weight: im2col}"


def verdict(kind, setting):
    recipe = tiny("conv_classifier", *FEW, f"optimization.{setting}", registry=REGISTRY)
    options = Options(2, budget=0.0, stages=(kind,), horizon=0, names_operators=False)
    (row,) = verify_recipe(recipe, REGISTRY, options, lambda _: None).rows
    return row


def test_three_backends_in_one_training_pass():
    row = verdict("conv_backend", MIXED)
    assert row.verdict == "PASS", row.summary


@pytest.mark.parametrize("kind", ["border_left_out", "input_kept_by_shape"])
def test_a_wrong_convolution_fails(kind):
    row = verdict(kind, f"{kind}=on")
    assert row.verdict == "FAIL", row.summary
