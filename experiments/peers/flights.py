"""Complete trainings of the flagship's task with BenchMARL's MASAC, and flights of what it has learned.

    python experiments/peers/flights.py
    python experiments/peers/flights.py --report

The task is that of ``recipes/marl_phase2.yaml``, with the same copies of the simulator, steps, updates, batches and
sizes of networks, which agents do not share. Learning rate, discount and averaging of targets are those of the
recipe's actors and leader, because those of BenchMARL's files are for millions of steps. Each training has one thread.
The last weights fly 2,000 fresh flights, which are those of the recipe's training with the same seed.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "marl_learning")]

from seeds import Results, SeedStudy, cells  # noqa: E402

VARIANTS = {"all rewards / 100": (0.01, 0.01), "leader's rewards / 100, followers' / 10": (0.01, 0.1)}
"""Factors of the leader's rewards and of the followers' by variant: the goal pays the leader 1,000, a follower earns
about 1 in a step, and BenchMARL clips gradients at a norm of 5.
"""


def train(variant: str, seed: int) -> dict[str, Any]:
    """Returns the flights after a training with BenchMARL, and its seconds."""
    # --report does not need BenchMARL.
    import flights_training

    return flights_training.train(VARIANTS[variant], seed)


def report(results: Results) -> None:
    """Prints one row for each variant."""
    from flagship import COLUMNS, FORMS

    print(f"| | seeds | {' | '.join(COLUMNS.values())} | seconds of the processor |")
    print(f"|---|---|{'---|' * len(COLUMNS)}---|")
    for variant in VARIANTS:
        runs = [run for name, run in sorted(results.items()) if name.startswith(f"{variant}, seed")]
        if runs:
            seconds = statistics.mean(run["cpu_seconds"] for run in runs)
            figures = " | ".join(cells([run["flights"] for run in runs], FORMS))
            print(f"| BenchMARL, {variant} | {len(runs)} | {figures} | {seconds:.0f} |")


study = SeedStudy(__file__, str(__doc__), list(VARIANTS), (1, 2, 3), HERE / "flights.json", train, report)

if __name__ == "__main__":
    study.main()
