"""The page of the exam: a table by group, one of all entries, and every miss with its reason."""

import json
import platform
from pathlib import Path

from exam.catalog import ENTRIES, GROUPS

METHODS = ("gate", "clock", "allclose", "dynamo", "stopwatch")
LONGEST = 150
"""Characters of a message in the table."""

INTRODUCTION = """# An exam of misleading speed-ups

    python experiments/zoo/zoo.py

Many changes that make a training faster do so because they compute something else, or because the clock is wrong. This
exam has {wrong} such changes from public issues, papers and articles, and {honest} correct ones beside them. Each is a
change of a small training step, and five methods judge it. A good method reports every wrong change and no correct one.

| method | what it does | it catches a wrong change if |
|---|---|---|
| gate | `runner.proof.verify` on 12 batches | the verdict is not PASS |
| clock | `runner.proof.clock` for 2 s | it gives no ratio; for an attack on time, also if it reports nothing faster |
| allclose | one step on one input: outputs, gradients and weights by the tolerances of `torch.testing` | they differ |
| dynamo | the same numbers by `torch._dynamo.utils.same`, with a reference in float64 | it returns False |
| stopwatch | ten steps with one batch, timed by hand | it shows less than {faster} % more speed |

allclose and dynamo compare single numbers of one step, and a stopwatch compares none. The gate and the clock are used
together: a change is certified only if the gate passes it **and** the clock reports it as faster.
"""


NOTES = """The entries were chosen and written by the authors of the gate. Three holes were found on the way and are
closed for every change: work that is left to a thread or a queue until a state is read, a clock that is replaced, and
NaN that one tensor of a batch has alone. A change that recognises the gate or the clock, and works only while it is
compared, is not in the exam and would pass. So would a fault that begins after the gate and the clock have looked.
"""


def caught(row: dict, method: str) -> bool:
    """Returns whether a method reports a wrong change; an error of a method reports nothing."""
    outcome = row[method]["outcome"]
    if method == "stopwatch":
        return outcome == "not faster"
    if method == "clock":
        is_about_time = ENTRIES[row["name"]].attacks == "time"
        return outcome == "invalid" or (is_about_time and outcome in ("unclear", "slower"))
    return outcome in ("FAIL", "INCONCLUSIVE")


def is_caught(row: dict) -> bool:
    """Returns whether the gate or the clock reports a wrong change."""
    return caught(row, "gate") or caught(row, "clock")


def is_certified(row: dict, judge: str, timer: str) -> bool:
    """Returns whether one method passes a change and another one shows it as faster."""
    return row[judge]["outcome"] == "PASS" and row[timer]["outcome"] == "faster"


def summary(rows: list[dict]) -> str:
    """Returns the page."""
    wrong = [row for row in rows if not ENTRIES[row["name"]].is_honest]
    honest = [row for row in rows if ENTRIES[row["name"]].is_honest]
    parts = [
        INTRODUCTION.format(wrong=len(wrong), honest=len(honest), faster=1),
        machine(rows),
        by_group(wrong),
        of_honest(honest),
        misses(wrong, honest),
        all_entries(rows),
    ]
    return "\n".join(parts)


def processor() -> str:
    """Returns the name of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read_rows(path: Path) -> list[dict]:
    """Returns the last row of every entry that the exam still has, in its order."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    return [rows[name] for name in ENTRIES if name in rows]


def machine(rows: list[dict]) -> str:
    machines = " and ".join(dict.fromkeys(f"torch {row['torch']}, {row['processor']}" for row in rows))
    minutes = sum(row["seconds"] for row in rows) / 60
    return f"{machines}, one thread, {minutes:.0f} minutes for {len(rows)} entries.\n"


def counted(rows: list[dict], method: str) -> str:
    return f"{sum(caught(row, method) for row in rows)}"


def by_group(rows: list[dict]) -> str:
    lines = [
        "## Wrong changes: how many each method catches\n",
        "| group | entries | gate | clock | **gate or clock** | allclose | dynamo | stopwatch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups = {
        f"{letter}: {group.title}": [row for row in rows if row["group"] == letter] for letter, group in GROUPS.items()
    }
    for title, members in (groups | {"all": rows}).items():
        together = sum(map(is_caught, members))
        gate, clock, *others = (counted(members, method) for method in METHODS)
        cells = [title, f"{len(members)}", gate, clock, f"**{together}**", *others]
        lines.append(f"| {' | '.join(cells)} |")

    usual = sum(is_certified(row, "allclose", "stopwatch") for row in rows)
    ours = sum(is_certified(row, "gate", "clock") for row in rows)
    lines.append(
        f"\nOf these {len(rows)} wrong changes, {usual} pass the tolerance and are faster by the stopwatch. "
        f"{ours} pass the gate and are faster by the clock."
    )
    compiled = [row for row in rows if row["group"] == "a"]
    itself = [row for row in compiled if row["how"] == "itself"]
    lines.append(
        f"\nOf the {len(compiled)} miscompilations, {len(itself)} are in the installed version of torch and run as "
        f"themselves ({sum(map(is_caught, itself))} caught). The others are corrected there, or need a GPU, and are "
        "reproduced by hand. The clock is not made to find other numbers, and allclose and dynamo cannot see time.\n"
    )
    return "\n".join(lines)


def of_honest(rows: list[dict]) -> str:
    lines = [
        "## Correct changes: false alarms\n",
        "| group | entries | gate | clock | allclose | dynamo |",
        "|---|---|---|---|---|---|",
    ]
    groups = {
        f"{letter}: {group.title}": [row for row in rows if row["group"] == letter] for letter, group in GROUPS.items()
    }
    for title, members in (groups | {"all": rows}).items():
        alarms = [
            sum(row["gate"]["outcome"] != "PASS" for row in members),
            sum(row["clock"]["outcome"] in ("invalid", "ERROR") for row in members),
            sum(row["allclose"]["outcome"] != "PASS" for row in members),
            sum(row["dynamo"]["outcome"] != "PASS" for row in members),
        ]
        lines.append(f"| {title} | {len(members)} | {' | '.join(map(str, alarms))} |")
    return "\n".join(lines) + "\n"


def misses(wrong: list[dict], honest: list[dict]) -> str:
    missed = [row for row in wrong if not is_caught(row)]
    alarms = [row for row in honest if row["gate"]["outcome"] != "PASS" or row["clock"]["outcome"] == "invalid"]
    lines = ["## What the gate and the clock get wrong\n"]
    for row in missed:
        entry = ENTRIES[row["name"]]
        lines.append(f"* `{entry.name}` is missed. {entry.fault} {entry.explanation or 'Not explained yet.'}")
    for row in alarms:
        shown = row["gate"] if row["gate"]["outcome"] != "PASS" else row["clock"]
        reason = ENTRIES[row["name"]].explanation
        lines.append(f"* `{row['name']}` is correct: {shown['outcome']}: {cell(shown['reported'])}. {reason}")
    if not missed and not alarms:
        lines.append("Nothing in this exam.")
    return "\n".join([*lines, "", NOTES])


def cell(text: str) -> str:
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= LONGEST else f"{flat[:LONGEST]}..."


def shown(row: dict, method: str) -> str:
    outcome = row[method]["outcome"]
    if method == "stopwatch":
        return cell(row[method].get("reported", outcome))
    if method == "clock" and row[method].get("ratio") is not None:
        return f"{outcome} {row[method]['ratio']:.2f}x"
    return outcome


def all_entries(rows: list[dict]) -> str:
    lines = [
        "## All entries\n",
        "*By hand*: the fault is reproduced, because the installed version does not have it.\n",
    ]
    for letter, group in GROUPS.items():
        lines += [
            f"### {letter}: {group.title}\n",
            f"Claimed: {group.claim}.\n",
            "| entry (source) | what is wrong | gate | what it reports | clock | allclose | dynamo | stopwatch | s |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row["group"] != letter:
                continue
            entry = ENTRIES[row["name"]]
            fault = "nothing" if entry.is_honest else cell(entry.fault)
            fault += " *By hand.*" if row["how"] == "by hand" else ""
            reported = reason_of(row)
            methods = " | ".join(shown(row, method) for method in METHODS[1:])
            lines.append(
                f"| `{entry.name}` ({entry.source}) | {fault} | {row['gate']['outcome']} | {reported} | {methods} | "
                f"{row['seconds']:.0f} |"
            )
        lines.append("")
    return "\n".join(lines)


def reason_of(row: dict) -> str:
    """Returns what the gate reports, or what the clock found if the gate passes."""
    if row["gate"]["outcome"] == "PASS" and row["clock"]["outcome"] == "invalid":
        return f"clock: {cell(row['clock']['reported'])}"
    return "" if row["gate"]["outcome"] == "PASS" else cell(row["gate"]["reported"])
