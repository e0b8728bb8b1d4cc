"""Studies that nobody ran, summarised."""

from collections import Counter
from dataclasses import replace

from runner.study.attempts import Used
from runner.study.summary import Row, Summary, Worth

RETURN, SPEED = "eval/return", "perf/env_steps_per_second"
SETTINGS = {
    "optimization.merged_critic_loss": "on",
    "optimization.amp": "{dtype: bf16}",
    "optimizer.actor.lr": 0.000123456,
}


def row(number, *values, **changes):
    known = Row(
        number=number, state="COMPLETE", cause="done", reason="",
        values=dict(zip((RETURN, SPEED), values, strict=False)), settings=SETTINGS, verdict="", best=False,
        is_recipe=False, seconds=33.0, recipe=None,
    )  # fmt: skip
    return replace(known, **changes)


ROWS = [
    row(0, -1234.567, 9876.543, is_recipe=True),
    row(1, -0.0123456, 12345.678, best=True, verdict="PASS"),
    row(2, -98.7654, 45678.9, best=True),
    row(3, -50.5, 45.6, cause="infeasible", reason="perf/update_ms is 2.5 beyond its bound"),
    row(4, state="PRUNED", cause="out of memory", reason="its processes took\n5.1 GiB of host memory, of 4.0"),
    row(5, state="FAIL", cause="crashed", reason="its process was ended by SIGSEGV"),
    row(6, state="FAIL", cause="crashed", reason="another"),
    row(7, state="RUNNING", cause="running"),
    row(8, state="WAITING", cause="waiting", settings={}, seconds=0.0),
]
WORTH = [
    Worth("merged_critic_loss", RETURN, -12345.678, -9876.54321, -7654.321, -1234.5, 13, 11),
    Worth("amp", SPEED, 23456.789, 34567.891, -45678.912, -5678.9, 4, 20),
]


def summary(**changes):
    finished = [each for each in changes.get("rows", ROWS) if each.state not in ("RUNNING", "WAITING")]
    known = Summary(
        name="mine", file="/studies/mine.yaml", objectives={RETURN: "maximize", SPEED: "maximize"},
        budget={"trials": 24, "seconds": 780.0, "device_seconds": None, "parallel": 1}, used=Used(7, 400.4, 7300.0),
        seconds_left=300.0, rows=ROWS, worth=WORTH, causes=Counter(each.cause for each in finished),
        importance={RETURN: {"optimizer.actor.lr": 0.71, "optimization.amp": 0.287, "train.batch_size": 0.003}},
        overhead_s=3.21, disturbed=2, seeds=3, logarithmic=["optimizer.actor.lr"],
        dashboard="optuna-dashboard sqlite:////here/optuna.db",
    )  # fmt: skip
    return replace(known, **changes)


def single():
    """With one objective."""
    rows = [
        replace(each, values={name: value for name, value in each.values.items() if name == RETURN}) for each in ROWS
    ]
    return summary(objectives={RETURN: "maximize"}, rows=rows, worth=WORTH[:1])
