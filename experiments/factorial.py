"""Which settings does a recipe learn faster with? Trains the points of factorial designs; says what a factor is worth.

Seeds differ by more than most settings are worth, so every training has a seed of its own, and every setting is
compared between two halves of them.
"""

import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from curves import train

Settings = Mapping[str, float | str]
NORM = "max_grad_norm"  # of the actors' and the critics' optimizers alike


class Point(NamedTuple):
    """A training of a design."""

    settings: Settings
    seed: int


def two_levels(low: Settings, high: Settings, products: Sequence[Collection[int]], seed: int) -> list[Point]:
    """A fractional factorial design (Box, Hunter and Hunter 2005, chapter 6): all levels of the first factors.

    Args:
        low: one level of every factor.
        high: the other.
        products: of which of the first factors, by number, the levels of each of the last ones are the product.
        seed: of the first training.
    """
    free = len(low) - len(products)
    points = []
    for i, levels in enumerate(itertools.product((0, 1), repeat=free)):
        all_levels = (*levels, *(sum(levels[factor] for factor in of) % 2 for of in products))
        settings = {name: (low, high)[level][name] for name, level in zip(low, all_levels, strict=True)}
        points.append(Point(settings, seed + i))
    return points


def trained(recipe: str, points: Sequence[Point], sets: Sequence[str]) -> list[dict[str, Any]]:
    """Trains all of them, two at a time; the return by environment step of each."""

    def one(point: Point) -> dict[str, Any]:
        settings = dict(point.settings)
        if NORM in settings:
            norm = settings.pop(NORM)
            settings |= {f"optimizer.{role}.max_grad_norm": norm for role in ("actor", "critic")}
        own = [*(f"{name}={value}" for name, value in settings.items()), f"seed={point.seed}", "device=cpu"]
        found = train(recipe, [*sets, *own, "data.evaluation.episodes=200", "tracking.system_metrics=false"])
        curve = {str(step): metrics["return"] for step, metrics in found["curve"].items()}
        print(point, list(curve.values())[-1], flush=True)
        return {"settings": dict(point.settings), "seed": point.seed, "curve": curve}

    with ThreadPoolExecutor(2) as pairs:
        return list(pairs.map(one, points))


def effects(rows: Sequence[Mapping[str, Any]], low: Settings, high: Settings, since: int) -> None:
    """Prints how the mean return of the evaluations since a step differs between two levels, and the standard error."""
    for name in high:
        means = [
            [
                statistics.mean(value for step, value in row["curve"].items() if int(step) >= since)
                for row in rows
                if row["settings"][name] == level
            ]
            for level in (low[name], high[name])
        ]
        error = sum(statistics.variance(group) / len(group) for group in means) ** 0.5
        gain = statistics.mean(means[1]) - statistics.mean(means[0])
        print(f"{name}: {low[name]} -> {high[name]}: {gain:+.2f} +- {error:.2f}")
