"""How often ``runner ablate`` calls a variant faster or slower that does nothing, and how often one that is faster.

    python experiments/instrument/ablation.py

Simulated times of rounds, to which the runner's own intervals, orders and rules are applied; about five minutes on one
core. The results go to ``ablation.json``, the tables to ``ablation.md``.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from runner.ablation.case_log import CaseLog
from runner.ablation.experiment import PROCESSES, RoundsConfig
from runner.ablation.time_forecast import order
from runner.proof.ratios import Effect, effect, of_rounds
from runner.verify.variants import AGAIN, BASELINE

HERE = Path(__file__).parent
TRIALS = 3_000  # of every figure: the error of a rate of 5 % is 0.4 %
NOISE = 0.03  # standard deviation of the logarithm of a time, from round to round
GAINS = (0.0, 0.03, 0.05, 0.10)
LUCKS = {  # standard deviation of the logarithm of what a process is slower by for as long as it lives, and its kind
    "none": (0.0, "normal"),
    "1 %": (0.01, "normal"),
    "3 %": (0.03, "normal"),
    "3 %, two modes": (0.03, "modes"),
    "3 %, one process in five is 7.5 % slower": (0.03, "rare"),
}
LOADS = (0.1, 0.3)  # what a turn takes longer that a load meets


def luck_of(luck: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    size, kind = LUCKS[luck]
    if kind == "modes":
        return draw.choice([-size, size], shape)
    if kind == "rare":
        return size / 0.4 * (draw.random(shape) < 0.2)
    return draw.normal(0, size, shape)


def logs(luck: str, rounds: int, gain: float, variants: int = 1, trials: int = TRIALS) -> Iterator[CaseLog]:
    """What was measured of variants of which the first is faster by the gain, and the others do nothing."""
    draw = np.random.default_rng(rounds)
    length = RoundsConfig(least=3, most=rounds).a_process
    for _ in range(trials):
        own = luck_of(luck, (-(-rounds // length), variants + 2), draw).repeat(length, 0)[:rounds]
        own += draw.normal(0, NOISE, own.shape)
        own[:, 0] -= np.log(1 + gain)
        yield log(np.exp(own), length)


def log(times: np.ndarray, length: int) -> CaseLog:
    """The log of these times [round, name], of which the last two are baselines."""
    names = [*map(str, range(times.shape[1] - 2)), BASELINE, AGAIN]
    rounds = (dict(zip(names, own, strict=True)) for own in times.tolist())
    return CaseLog([{"process": number // length, "update": own} for number, own in enumerate(rounds)])


def said(of: CaseLog, variant: str = "0") -> Effect:
    return effect(of.ratio(variant), of.ratio(AGAIN, [BASELINE]))


def share(effects: Iterable[Effect], gain: float) -> float:
    """How often a gain was seen, or an effect where there is none."""
    return fmean(each is Effect.FASTER if gain else each is not Effect.UNCLEAR for each in effects)


def restarted(luck: str, rounds: int) -> dict[str, Any]:
    """What is said of a variant after a fixed number of rounds."""
    row: dict[str, Any] = {"luck": luck, "rounds": rounds}
    found = [each.ratio("0") for each in logs(luck, rounds, 0.0)]
    row |= {"processes": found[0].processes, "half_width": float(np.median([each.half_width for each in found]))}
    return row | {f"said_of_{gain:.0%}": share(map(said, logs(luck, rounds, gain)), gain) for gain in GAINS}


def one_process(luck: str, rounds: int) -> dict[str, Any]:
    """What ``clock`` would say of as many rounds of one process for each."""
    draw, found = np.random.default_rng(rounds), []
    for _ in range(TRIALS // 8):
        own = draw.normal(0, NOISE, (rounds, 4)) + luck_of(luck, (2,), draw).repeat(2)
        baseline, again, changed, too = np.exp(own.T)  # A/A is within one of the two
        both = of_rounds(((baseline + again) / (changed + too)).tolist())
        found.append(effect(both, of_rounds((baseline / again).tolist())))
    return {"luck": luck, "rounds": rounds, "said_of_0%": share(found, 0.0)}


def until_precise(luck: str, variants: int, precision: float) -> dict[str, Any]:
    """What is said if no more processes are started as soon as all intervals are within the precision."""
    row: dict[str, Any] = {"luck": luck, "variants": variants, "precision": precision}
    names, length, trials = [*map(str, range(variants))], RoundsConfig().a_process, TRIALS // 4
    for gain in (0.0, 0.05):
        found, rounds = [], 0
        for whole in logs(luck, RoundsConfig().most, gain, variants, trials):
            for count in range(PROCESSES * length, len(whole.entries) + 1, length):
                of = CaseLog(whole.entries[:count])
                if max(each.half_width for each in (of.ratio(AGAIN, [BASELINE]), *map(of.ratio, names))) <= precision:
                    break
            found += [said(of, name) for name in names[: 1 if gain else None]]
            rounds += count
        row |= {f"said_of_{gain:.0%}": share(found, gain), "rounds": rounds / trials}
    return row


def periodic(load: float, rounds: int, by_chance: bool) -> dict[str, Any]:
    """What is said of a variant that does nothing, if load comes back once a round and meets the same place in it."""
    draw, found = np.random.default_rng(rounds), []
    length = RoundsConfig(least=3, most=rounds).a_process
    for trial in range(TRIALS):
        own, place = draw.normal(0, NOISE, (rounds, 5)), draw.integers(5)
        for number in range(rounds):
            own[number, int(order("01234", trial * rounds + number)[place]) if by_chance else place] += np.log(1 + load)
        found.append(said(log(np.exp(own), length)))
    turns = "by chance" if by_chance else "fixed"
    return {"load": f"{load:.0%}", "order": turns, "rounds": rounds, "said_of_0%": share(found, 0.0)}


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> list[str]:
    """Rows in Markdown; shares in percent."""
    lines = [f"| {' | '.join(columns.values())} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [f"{100 * row[key]:.1f}" if key[:4] in ("said", "half", "prec") else
                 f"{row[key]:.0f}" if isinstance(row[key], float) else str(row[key]) for key in columns]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def page(results: dict[str, Any]) -> str:
    wrong = {"said_of_0%": "wrong, %"}
    power = {f"said_of_{gain:.0%}": f"{gain:.0%} seen, %" for gain in GAINS[1:]}
    fixed = {"luck": "luck", "rounds": "rounds", "processes": "processes"} | wrong | power
    stopped = {"luck": "luck", "variants": "variants", "precision": "precision, %", "rounds": "rounds"}
    return "\n".join([
        "# How often an ablation is wrong", "",
        "Made by `ablation.py` from `ablation.json`: simulated times, to which the rules of the runner are applied.",
        "**wrong** is how often a variant that does nothing is called faster or slower, **seen** how often one is",
        "called faster that is. **luck** is the standard deviation of the slowdown of a process, which is constant",
        f"while it lives; from round to round times vary by {NOISE:.0%}.", "",
        "## After a fixed number of rounds", "",
        *table(results["restarted"], fixed | {"half_width": "half an interval, %"}),
        "## If it stops as soon as every interval is precise enough", "",
        "After five processes at least, and 60 rounds at most.", "",
        *table(results["until_precise"], stopped | wrong | {"said_of_5%": "5% seen, %"}),
        "## One process for each, as `clock` has it", "",
        "With luck, a conclusion about two objects is wrong for the code that they represent.", "",
        *table(results["one_process"], {"luck": "luck", "rounds": "rounds"} | wrong),
        "## Load that comes back once a round", "",
        "It makes one of five turns longer, always in the same place of the round. Luck is zero here.", "",
        *table(results["periodic"], {"load": "longer by", "order": "order of turns", "rounds": "rounds"} | wrong),
    ])  # fmt: skip


def main() -> None:
    results = {
        "trials": TRIALS,
        "restarted": [restarted(luck, rounds) for luck in LUCKS for rounds in (5, 8, 20, 40, 60)],
        "until_precise": [until_precise(luck, n, 0.02) for luck in ("none", "1 %", "3 %") for n in (1, 8)],
        "one_process": [one_process(luck, rounds) for luck in ("none", "1 %", "3 %") for rounds in (8, 40)],
        "periodic": [
            periodic(load, rounds, chance) for load in LOADS for chance in (False, True) for rounds in (5, 8, 20, 40)
        ],
    }
    (HERE / "ablation.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "ablation.md").write_text(page(results))


if __name__ == "__main__":
    main()
