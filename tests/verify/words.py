"""The recipe of the small classifier of words, with stages for the gate: far cheaper than any that ships."""

from pathlib import Path

from runner.plugin.registry import Registry
from runner.recipe.loader import load

HERE = Path(__file__).parent
WORDS = HERE / "supervised.py"
REGISTRY = Registry([WORDS, HERE / "rounding.py"])
MIXED = tuple(f"optimization.{kind}=on" for kind in ("rounding", "fused_optimizer", "heap_retention"))
"""A stage that rounds, one of the same algebra, and one of the same bits."""


def words(*sets, registry=REGISTRY):
    small = ["device=cpu", "tracking.system_metrics=false"]
    return load(WORDS.with_suffix(".yaml"), [*small, *sets], registry)
