"""How often other tools' rules, and the runner's, are wrong about the speed of a change.

    python experiments/instrument/clocks.py            # continues where it was interrupted
    python experiments/instrument/clocks.py --fresh    # all of it again

Times are simulated as in ``ablation.py``: 3 % noise from value to value, and on top the luck of a process, by which it
is slower for as long as it lives. The rules are ours in code, after what the tools do (read in November 2026):

* Hugging Face kernels: 100 iterations of both in one process; faster if the upper end of the kernel's 95 % interval is
  below the mean of the reference, whose own error is left out.
* pyperf: 20 processes with 3 values each; Student's t-test of all values, two-sided, at 5 %.
* asv: 2 processes with 10 values each; Mann-Whitney's test at p < 0.002; ``asv continuous`` also wants a factor of 1.1.
* TorchBench: 20 values of one process each; the medians differ by more than 7 %.
* By hand: ten steps of each; the means differ by more than 1 %.
* ``runner ablate``: five processes with 20 rounds, and 15 with 60; the figures are those of ``ablation.json``.

Every figure is written to ``clocks.json`` as soon as it is known; the table goes to ``clocks.md``. Two minutes on one
core.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ablation import LUCKS, NOISE, share
from scipy import stats

from runner.proof.ratios import Effect

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "clocks.json", HERE / "clocks.md"
TRIALS = 2_000
GAINS = (0.0, 0.05)
LUCK = {name: size for name, (size, kind) in LUCKS.items() if kind == "normal"}
Sample = Callable[[int, int, float], np.ndarray]
"""Draws values [processes, values] that are faster by a gain."""


def kernels(sample: Sample, gain: float) -> Effect:
    reference = sample(1, 100, 0.0).ravel()
    kernel = sample(1, 100, gain).ravel()
    upper = kernel.mean() + 1.96 * kernel.std() / np.sqrt(kernel.size)
    return Effect.FASTER if upper < reference.mean() else Effect.UNCLEAR


def pyperf(sample: Sample, gain: float) -> Effect:
    reference = sample(20, 3, 0.0).ravel()
    changed = sample(20, 3, gain).ravel()
    if stats.ttest_ind(reference, changed).pvalue >= 0.05:
        return Effect.UNCLEAR
    return _by_size(reference.mean() / changed.mean(), 1.0)


def asv(sample: Sample, gain: float, factor: float = 1.0) -> Effect:
    reference = sample(2, 10, 0.0).ravel()
    changed = sample(2, 10, gain).ravel()
    if stats.mannwhitneyu(reference, changed).pvalue >= 0.002:
        return Effect.UNCLEAR
    return _by_size(np.median(reference) / np.median(changed), factor)


def asv_with_factor(sample: Sample, gain: float) -> Effect:
    return asv(sample, gain, 1.1)


def torchbench(sample: Sample, gain: float) -> Effect:
    return _by_size(np.median(sample(1, 20, 0.0)) / np.median(sample(1, 20, gain)), 1.07)


def by_hand(sample: Sample, gain: float) -> Effect:
    return _by_size(sample(1, 10, 0.0).mean() / sample(1, 10, gain).mean(), 1.01)


def _by_size(ratio: float, least: float) -> Effect:
    if ratio > least:
        return Effect.FASTER
    return Effect.SLOWER if ratio < 1 / least else Effect.UNCLEAR


RULES = {
    "Hugging Face kernels": kernels,
    "pyperf": pyperf,
    "asv, significance alone": asv,
    "asv with factor 1.1": asv_with_factor,
    "TorchBench, 7 % threshold": torchbench,
    'ten steps by hand, "1 %"': by_hand,
}
ROUNDS = {"`runner ablate`, 20 rounds": 20, "`runner ablate`, 60 rounds": 60}


def rate(rule: str, luck: str, gain: float) -> float:
    """How often a gain is seen, or an effect where there is none."""
    if rule in ROUNDS:
        rows = json.loads((HERE / "ablation.json").read_text())["restarted"]
        row = next(row for row in rows if (row["luck"], row["rounds"]) == (luck, ROUNDS[rule]))
        return float(row[f"said_of_{gain:.0%}"])
    draw = np.random.default_rng(len(rule))

    def sample(processes: int, values: int, faster_by: float) -> np.ndarray:
        logarithms = draw.normal(0, LUCK[luck], (processes, 1)) + draw.normal(0, NOISE, (processes, values))
        return np.exp(logarithms) / (1 + faster_by)

    return share((RULES[rule](sample, gain) for _ in range(TRIALS)), gain)


def table(results: dict[str, float]) -> str:
    columns = " / ".join(LUCK)
    lines = [
        "# How often rules about speed are wrong",
        "",
        "Made by `clocks.py` from `clocks.json`: simulated times, noise of 3 % from value to value, and the luck of a",
        f"process with a standard deviation of {columns}. The script describes every rule.",
        "",
        f"| rule | does nothing, called faster or slower, % (luck {columns}) | 5 % faster, called faster, % |",
        "|---|---|---|",
    ]
    for rule in (*RULES, *ROUNDS):
        cells = [
            " / ".join(f"{100 * results[f'{rule}, {luck}, {gain:.0%}']:.{digits}f}" for luck in LUCK)
            for gain, digits in zip(GAINS, (1, 0), strict=True)
        ]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fresh", action="store_true", help="forget the figures that there are")
    arguments = parser.parse_args()
    results = {} if arguments.fresh or not RESULTS.exists() else json.loads(RESULTS.read_text())
    for rule in (*RULES, *ROUNDS):
        for luck in LUCK:
            for gain in GAINS:
                name = f"{rule}, {luck}, {gain:.0%}"
                if name not in results:
                    results[name] = rate(rule, luck, gain)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                    print(f"{name}: {results[name]:.1%}", flush=True)
    TABLE.write_text(table(results))


if __name__ == "__main__":
    main()
