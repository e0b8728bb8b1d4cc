"""The result of a baseline."""

from typing import NamedTuple

TEST = ("data.held_out=test",)
"""Settings of recipes by which their held-out part is the published test part."""


class Result(NamedTuple):
    """A metric of one baseline, on the data and the split of a recipe.

    Attributes:
        recipes: Recipes with this workload, separated by commas.
        baseline: What predicts.
        metric: Name of the metric in the recipes' evaluation.
        values: The metric by seed; the only key is None if nothing depends on the seed.
        seconds: Time for one seed, from the data in memory to the metric.
        note: What a reader has to know in addition.
    """

    recipes: str
    baseline: str
    metric: str
    values: dict
    seconds: float
    note: str = ""
