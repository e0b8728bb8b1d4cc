"""How often the gate is wrong about changes that are harmless.

    python experiments/instrument/honest.py                       # all, with one thread
    python experiments/instrument/honest.py --only Attention Flow # these models
    python experiments/instrument/honest.py --shard 1/2 --out 1.json

Every model of ``tests/proof/zoo`` is judged against itself with seven seeds, as Close and as Exact, and against every
rewrite of it: as Exact where the bits are the same, as a plain comparison of two trainings says that knows nothing of
the gate, else as Close. Parts are put together with ``--merge 1.json 2.json``.
"""

import argparse
import copy
import json
import os
import platform
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "proof"))

from zoo import MODELS, Loop  # noqa: E402

from runner.proof import Close, Exact, verify  # noqa: E402

HERE = Path(__file__).parent
SEEDS, UPDATES, FIRST_SEED = 7, 10, 100
CONTRACTS = {"Close": Close(), "Exact": Exact()}
REASONS = {
    "draws random numbers inside the step": "true: in float64 the same seeds give other random numbers",
    "in float64 the baseline itself rounds": "true: the baseline rounds its float64 numbers",
    "overflows in its original precision": "true: its float32 overflows earlier than the baseline's",
}
"""Of what does not pass, by a part of what the verdict says."""


OUTCOMES = ("PASS", "FAIL", "INCONCLUSIVE", "ERROR")
PASSED = ("model", "way", "seed", "contract", "outcome", "seconds")


class Pair(NamedTuple):
    """What is compared with the baseline of a model: nothing is rewritten in A/A."""

    model: str
    way: tuple[str, ...]
    seed: int

    def batches(self):
        draw = torch.Generator().manual_seed(self.seed)
        return [MODELS[self.model].batch(draw) for _ in range(UPDATES)]

    def builds(self):
        kind = MODELS[self.model]
        return [lambda way=frozenset(way): Loop(kind, way, self.seed).subject() for way in ((), self.way)]


def pairs():
    """All of them; each rewrite has a seed of its own."""
    same = [Pair(name, (), seed) for name in MODELS for seed in range(SEEDS)]
    ways = [(name, tuple(sorted(way))) for name, kind in MODELS.items() for way in kind.rewrites()]
    return same + [Pair(name, way, FIRST_SEED + number) for number, (name, way) in enumerate(ways)]


def have_the_same_bits(pair):
    """Whether two plain trainings come to the same outputs, gradients and states."""
    one, other = (recorded(build, pair) for build in pair.builds())
    return one == other


def recorded(build, pair):
    """What a training shows.

    Its last batch comes twice, then with the state from after the first update, then ten times as large: zeros get
    another sign where gradients are added to zeros, which is another bit.
    """
    with torch.random.fork_rng():
        torch.manual_seed(pair.seed)
        subject, found, early = build(), [], {}
        optimizers = [part for part in subject.state.values() if isinstance(part, torch.optim.Optimizer)]
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda each, *_: found.extend(bits(p.grad) for p in parameters(each)))
        batches = copy.deepcopy(pair.batches())
        larger = {name: 10 * each if each.is_floating_point() else each for name, each in batches[-1].items()}
        for number, batch in enumerate([*batches, batches[-1], batches[-1], larger]):
            if number > len(batches):
                for name, state in early.items():
                    subject.state[name].load_state_dict(state)
            found.append(flat(subject.step(batch)))
            found.append({name: flat(part.state_dict()) for name, part in subject.state.items()})
            if number == 0:
                early = {name: copy.deepcopy(part.state_dict()) for name, part in subject.state.items()}
    return found


def parameters(optimizer):
    return [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]


def flat(value):
    """Nested containers with bits for tensors, and without what says how an optimizer computes."""
    if isinstance(value, dict):
        own_way = ("foreach", "fused")
        return {str(k).replace("_orig_mod.", ""): flat(each) for k, each in value.items() if k not in own_way}
    if isinstance(value, list | tuple):
        return [flat(each) for each in value]
    return bits(value) if isinstance(value, torch.Tensor) else repr(value)


def bits(tensor):
    tensor = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def judged(pair, contract):
    """A row: what the gate says of a pair."""
    started = time.perf_counter()
    try:
        verdict = verify(*pair.builds(), pair.batches(), CONTRACTS[contract], seed=pair.seed)
        outcome, summary = str(verdict.outcome), verdict.summary
    except Exception as error:  # would be the gate's, or the model's
        outcome, summary = "ERROR", f"{type(error).__name__}: {error}"
    row = {**pair._asdict(), "contract": contract, "outcome": outcome, "summary": summary}
    if outcome != "PASS":
        row["reason"] = next((why for part, why in REASONS.items() if part in summary), "not known")
    return row | {"seconds": round(time.perf_counter() - started, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--way", help="rewrites with this in their name alone")
    parser.add_argument("--shard", default="1/1", help="the first of two parts: 1/2")
    parser.add_argument("--merge", nargs="+", type=Path, help="make the table of these parts, and judge nothing")
    parser.add_argument("--out", type=Path, default=HERE / "honest.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    if options.merge:
        parts = [json.loads(path.read_text()) for path in options.merge]
        rows = [row for part in parts for row in (*part["did not pass"], *part["passed"])]
        write(rows, sum(part["seconds"] for part in parts), options.out)
        return 0
    part, parts = map(int, options.shard.split("/"))
    chosen = [pair for pair in pairs() if pair.model in options.only]
    if options.way:
        chosen = [pair for pair in chosen if any(options.way in way for way in pair.way)]
    rows, started = [], time.perf_counter()
    for pair in chosen[part - 1 :: parts]:
        torch.compiler.reset()
        for contract in CONTRACTS if not pair.way else ("Exact",) if have_the_same_bits(pair) else ("Close",):
            row = judged(pair, contract)
            rows.append(row)
            if row["outcome"] != "PASS":
                print(f"{row['outcome']} {contract} {pair}: {row['summary']}", flush=True)
        write(rows, time.perf_counter() - started, options.out)
    return 0


def write(rows, seconds, path):
    """The figures, and beside them a page with the table."""
    rows = sorted(rows, key=lambda row: (list(MODELS).index(row["model"]), row["seed"], row["contract"]))
    found = {
        "machine": {
            "torch": torch.__version__, "processor": processor(), "python": platform.python_version(), "threads": 1
        },
        "updates": UPDATES,
        "seconds": round(seconds),
        "counts": {
            f"{kind}, {contract}": counted(row for row in rows if kind_of(row) == kind and row["contract"] == contract)
            for kind in ("A/A", "rewrites")
            for contract in CONTRACTS
        },
        "models": len({row["model"] for row in rows}),
        "rewrites": len({(row["model"], *row["way"]) for row in rows if row["way"]}),
        "did not pass": [row for row in rows if row["outcome"] != "PASS"],
        "passed": [{name: row[name] for name in PASSED} for row in rows if row["outcome"] == "PASS"],
    }  # fmt: skip
    path.write_text(json.dumps(found) + "\n")
    path.with_suffix(".md").write_text(page(found))


def kind_of(row):
    return "rewrites" if row["way"] else "A/A"


def counted(rows):
    counts = Counter(row["outcome"] for row in rows)
    return {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome] or outcome != "ERROR"}


def processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def page(found):
    rows = [*found["did not pass"], *found["passed"]]
    machine = found["machine"]
    lines = [
        "# How often the gate is wrong about changes that are harmless", "",
        "    python experiments/instrument/honest.py", "",
        f"{found['models']} training steps, each against itself with {SEEDS} seeds (A/A), and in {found['rewrites']} "
        "honest rewrites, alone and together. A rewrite is judged as Exact where it has the same bits in a plain "
        "comparison of two trainings that does not use the gate, else as Close. "
        f"torch {machine['torch']}, {machine['processor']}, one thread, {found['updates']} updates, "
        f"{found['seconds'] / 60:.0f} min. Made by the script from `honest.json`.", "",
        "| | PASS | FAIL | INCONCLUSIVE |", "|---|---|---|---|",
    ]  # fmt: skip
    counts = {**found["counts"], "all": counted(rows)}
    for name, count in counts.items():
        share = f" ({count['INCONCLUSIVE'] / max(1, sum(count.values())):.1%})"
        lines.append(f"| {name} | {count['PASS']} | {count['FAIL']} | {count['INCONCLUSIVE']}{share} |")
    lines += ["", "PASS of all, by model:", "", "| model | A/A | rewrites |", "|---|---|---|"]
    for model in dict.fromkeys(row["model"] for row in sorted(rows, key=lambda row: list(MODELS).index(row["model"]))):
        cells = []
        for kind in ("A/A", "rewrites"):
            own = [row["outcome"] for row in rows if row["model"] == model and kind_of(row) == kind]
            cells.append(f"{own.count('PASS')} of {len(own)}")
        what = " ".join(MODELS[model].__doc__.split())
        lines.append(f"| {model}: {what} | {' | '.join(cells)} |")
    lines += [
        "",
        "Comparisons that did not pass:",
        "",
        "| model | rewrite | contract | seed | verdict | reason |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["did not pass"]:
        cells = row["model"], ", ".join(row["way"]) or "none", row["contract"], str(row["seed"])
        lines.append(f"| {' | '.join(cells)} | {row['outcome']}: {row['summary']} | {row['reason']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
