"""How often ``NonInferiority`` is wrong, how often it passes what is harmless, and how often ``ratio`` holds the truth.

    python experiments/instrument/noninferiority.py

Simulated experiments, a few minutes on one core: the results go to ``noninferiority.json``, the tables to
``noninferiority.md``.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runner.proof.noninferiority import COLLAPSE, NonInferiority, hall
from runner.proof.ratios import of_rounds
from runner.proof.verdict import Outcome

HERE = Path(__file__).parent
EXPERIMENTS = 40_000  # of every figure
INTERVALS = 2_000  # of every coverage
SMALL = 0.1  # deviation in margins at which no difference counts as a collapse


class Family(NamedTuple):
    """A distribution of differences, upwards better."""

    draw: Callable[[int, torch.Generator], torch.Tensor]  # samples [EXPERIMENTS, n]
    mean: float
    median: float
    deviation: float


def normal(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(EXPERIMENTS, size, generator=generator, dtype=torch.float64)


def uniform(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(EXPERIMENTS, size, generator=generator, dtype=torch.float64)


def student(size: int, generator: torch.Generator) -> torch.Tensor:
    squares = torch.stack([normal(size, generator).square() for _ in range(3)])
    return normal(size, generator) / squares.mean(0).sqrt()


def exponential(sign: int) -> Family:
    return Family(lambda n, g: -sign * (1 - uniform(n, g)).log(), sign, sign * math.log(2), 1.0)


def lognormal(sign: int, sigma: float) -> Family:
    mean = math.exp(sigma**2 / 2)
    deviation = mean * math.sqrt(math.exp(sigma**2) - 1)
    return Family(lambda n, g: sign * (sigma * normal(n, g)).exp(), sign * mean, sign, deviation)


def bimodal(lower: float) -> Family:
    """Two normal modes, of which the lower one, two units below, has this share."""
    middle = 1 - 2 * lower
    deviation = math.sqrt(1 - middle**2 + 0.04)
    median = 0.0 if lower == 0.5 else math.nan
    draw = lambda n, g: 1 - 2 * (uniform(n, g) < lower).double() + 0.2 * normal(n, g)  # noqa: E731
    return Family(draw, middle, median, deviation)


SEVEN = {
    "normal": Family(normal, 0.0, 0.0, 1.0),
    "Student t, 3 degrees of freedom": Family(student, 0.0, 0.0, math.sqrt(3)),
    "uniform": Family(lambda n, g: uniform(n, g), 0.5, 0.5, math.sqrt(1 / 12)),
    "exponential, tail to the loss": exponential(-1),
    "exponential, tail to the gain": exponential(1),
    "lognormal (sigma 1), tail to the loss": lognormal(-1, 1.0),
    "bimodal, 1 : 1": bimodal(0.5),
}
FURTHER = {
    "lognormal (sigma 1), tail to the gain": lognormal(1, 1.0),
    "lognormal (sigma 0.5), tail to the loss": lognormal(-1, 0.5),
    "lognormal (sigma 1.5), tail to the loss": lognormal(-1, 1.5),
    "bimodal, 3 in 10 in the lower mode": bimodal(0.3),
}
COLLAPSES = {  # share and loss in margins of trainings that collapse; the others lose nothing
    "1 in 5 loses 20 margins": (0.2, 20.0),
    "1 in 5 loses 5 margins: one in the mean": (0.2, 5.0),
    "1 in 10 loses 20 margins": (0.1, 20.0),
    "1 in 10 loses 10 margins: one in the mean": (0.1, 10.0),
}
PLANS: dict[str, dict[str, Any]] = {
    "8 pairs": {"most": 8},
    "12 pairs": {"most": 12},
    "20 pairs": {"most": 20},
    "20 pairs, looks at 14, 17, 20": {"most": 20, "looks": (14, 17, 20)},
    "40 pairs": {"most": 40},
}


def ends(test: NonInferiority, gains: torch.Tensor) -> dict[str, float]:
    """How often experiments end how, and the pairs they take: what ``NonInferiority`` does, for all of them at once.

    Args:
        test: a plan with a margin of 1.
        gains: of the change, in margins [EXPERIMENTS, test.most].
    """
    outcome = torch.zeros(len(gains), dtype=torch.int8)
    used = torch.full((len(gains),), test.most)
    for look in test.looks:
        seen = gains[:, :look]
        passed = hall(seen + 1) > test.design.passes.get(look, math.inf)
        passed &= (seen > -COLLAPSE).all(1)
        failed = ~passed & (hall(-seen - 1) > test.design.fails[look])
        undecided = outcome == 0
        used[undecided & (passed | failed)] = look
        outcome[undecided & passed], outcome[undecided & failed] = 1, -1
    for row in range(50):  # and it is what NonInferiority does
        one = NonInferiority(1.0, test.most, looks=test.looks)
        for gain in gains[row].tolist():
            one.add(0.0, gain)
        assert one.conclude() is (Outcome.INCONCLUSIVE, Outcome.PASS, Outcome.FAIL)[outcome[row]]
    shares = {"pass": outcome == 1, "fail": outcome == -1}
    return {name: is_so.double().mean().item() for name, is_so in shares.items()} | {
        "pairs": used.double().mean().item()
    }


def student_passes(looks: tuple[int, ...], above: torch.Tensor) -> float:
    """How often Student's t would pass with bounds for normal differences, after the same looks."""
    null = normal(looks[-1], torch.Generator().manual_seed(9))
    passed = torch.zeros(len(above), dtype=torch.bool)
    crossed = torch.zeros(len(null), dtype=torch.bool)
    for look in looks:
        of_null, t = (math.sqrt(look) * x[:, :look].mean(1) / x[:, :look].std(1) for x in (null, above))
        spend = int(0.05 * look / looks[-1] * len(null)) - int(crossed.sum())
        bound = of_null[~crossed].sort(descending=True).values[spend]
        crossed |= of_null > bound
        passed |= t > bound
    return passed.double().mean().item()


def family_row(test: NonInferiority, family: Family) -> dict[str, Any]:
    """What is said of a family whose mean, or median, loses just the margin, and of one that loses nothing."""
    draw = torch.Generator().manual_seed(7)
    raw = family.draw(test.most, draw) / family.deviation
    mean, median = family.mean / family.deviation, family.median / family.deviation
    at_margin = ends(test, SMALL * (raw - mean) - 1)
    harmless = ends(test, test.design.allowed_deviation * (raw - mean))
    low_noise = ends(test, 0.25 * (raw - mean))
    at_median = None if math.isnan(median) else ends(test, SMALL * (raw - median) - 1)["pass"]
    return {
        "false_pass": at_margin["pass"], "false_fail": at_margin["fail"],
        "student_false_pass": student_passes(tuple(test.design.passes), raw - mean),
        "pass_with_median_at_margin": at_median,
        "power": harmless["pass"], "harmless_fails": harmless["fail"], "pairs": harmless["pairs"],
        "power_at_a_quarter": low_noise["pass"], "pairs_at_a_quarter": low_noise["pairs"],
    }  # fmt: skip


def collapse_row(test: NonInferiority, share: float, loss: float) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(8)
    collapsed = (uniform(test.most, draw) < share).double()
    return ends(test, 0.25 * normal(test.most, draw) - loss * collapsed)


def coverage(rounds: int, noise: str) -> float:
    """How often the interval of ``ratio`` holds the true median of 1."""
    draw = torch.Generator().manual_seed(rounds)
    shape = (INTERVALS, rounds)
    numbers = torch.randn(shape, generator=draw, dtype=torch.float64)
    phase = torch.rand(INTERVALS, 1, generator=draw, dtype=torch.float64)
    logs = {
        "normal": 0.05 * numbers,
        "lognormal": 0.05 * (numbers.exp() - 1),  # of the ratio's logarithm: a tail to one side
        "periodic": 0.05 * (2 * math.pi * (torch.arange(rounds) / 6 + phase)).sin() + 0.02 * numbers,
    }[noise]
    found = [of_rounds(row) for row in logs.exp().tolist()]
    return sum(each.low <= 1 <= each.high for each in found) / INTERVALS


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}"


def tables(results: dict[str, Any]) -> str:
    lines = []
    for name, plan in results["plans"].items():
        lines += [
            f"### {name[0].upper()}{name[1:]}",
            "",
            f"PASS after {', '.join(map(str, plan['passes']))} pairs, FAIL after {', '.join(map(str, plan['fails']))}. "
            f"Deviation allowed: {plan['allowed_deviation']:.2f} margins.",
            "",
            "| differences | false PASS | with Student's t | false FAIL | PASS, median at the margin "
            "| power | pairs | power at 0.25 | pairs |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for family, row in plan["families"].items():
            cells = [
                row[key] for key in ("false_pass", "student_false_pass", "false_fail", "pass_with_median_at_margin")
            ]
            cells = [*map(percent, cells), percent(row["power"], 0), f"{row['pairs']:.1f}"]
            cells += [percent(row["power_at_a_quarter"], 0), f"{row['pairs_at_a_quarter']:.1f}"]
            lines.append(f"| {family} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["## Collapses", "", "| of the trainings | " + " | ".join(results["plans"]) + " |"]
    lines.append("|---" * (1 + len(results["plans"])) + "|")
    for name in COLLAPSES:
        rows = [plan["collapses"][name] for plan in results["plans"].values()]
        lines.append(
            f"| {name} | " + " | ".join(f"{percent(row['pass'])} / {percent(row['fail'])}" for row in rows) + " |"
        )
    lines += ["", "PASS / FAIL in %.", "", "## The interval of `ratio`", ""]
    lines += ["| noise | 5 rounds | 8 rounds | 20 rounds |", "|---|---|---|---|"]
    for noise, by_rounds in results["coverage"].items():
        lines.append(f"| {noise} | " + " | ".join(percent(share) for share in by_rounds.values()) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    plans: dict[str, Any] = {}
    for name, settings in PLANS.items():
        test = NonInferiority(1.0, **settings)
        plans[name] = {
            "passes": test.design.passes, "fails": test.design.fails,
            "allowed_deviation": test.design.allowed_deviation,
            "families": {family: family_row(test, of) for family, of in (SEVEN | FURTHER).items()},
            "collapses": {collapse: collapse_row(test, *of) for collapse, of in COLLAPSES.items()},
        }  # fmt: skip
        print(name, flush=True)
    covered = {
        noise: {str(rounds): coverage(rounds, noise) for rounds in (5, 8, 20)}
        for noise in ("normal", "lognormal", "periodic")
    }
    results = {"experiments": EXPERIMENTS, "intervals": INTERVALS, "plans": plans, "coverage": covered}
    (HERE / "noninferiority.json").write_text(json.dumps(results, indent=1) + "\n")
    page = HERE / "noninferiority.md"
    head = page.read_text().partition("## Families\n")[0] if page.exists() else ""
    page.write_text(f"{head}## Families\n\n{tables(results)}")


if __name__ == "__main__":
    main()
