"""Writes the page of claims."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from claim_measurements import Measurement
from claim_model import ANSWERS, DEPENDS, FALSE, PARTLY, TRUE, UNDECIDED, UNMEASURED, Claim, Report

TITLES = ("technique", "the report claims", "here", "measured", "gate", "answer")
DETAILS = ("technique", "measured", "what", "gate", "method", "date and machine")
MOST_SHOWN = 3
"""Measurements that a cell lists; of more, it has the lowest and the highest."""
MEANINGS = {
    TRUE: "every measurement reaches the lower end of what is claimed",
    DEPENDS: "some do: the column names the lowest and the highest",
    PARTLY: "none does, but at least one is a gain beyond its interval, or a part of the claim holds",
    UNDECIDED: "none is a gain beyond its interval, and no interval excludes the lower end of what is claimed",
    FALSE: "none is a gain, or a test shows the opposite",
    UNMEASURED: "no figure here; the reason is given",
}
INTRODUCTION = """<!-- Written by experiments/claims/claims.py from the YAML files next to it; edit those. -->
# Which promises are true?

This page compares {count} claims of five reports about faster, smaller or better trainings with measurements of
this repository. Each row has the claimed figure, what was measured, and an answer.

{shares}

Nothing here is an estimate. Speeds are ratios, most with a 95 % interval; above 1 is faster. Learned results are
those of paired trainings, in percent of the metric; positive is better. The machine is one or two cores of an AMD
EPYC without a GPU, so claims about GPUs are *not measured*; [the list](#every-measurement) has method, date and
machine of each figure.

| answer | meaning | claims |
|---|---|---|
{answers}

{reports}

Refused here, with a measurement of each: {refused} ([why](../experiments/refused/README.md)).

![Claimed ranges as bars and measured values as points, for speed, saved memory and learned results](claims.png)

*Claimed ranges (bars) and measurements (points with intervals), by report. Techniques without a comparable
figure are only in the tables.*
"""


def write_page(reports: Sequence[Report]) -> str:
    """Returns the page in Markdown."""
    claims = [claim for report in reports for claim in report.claims]
    counts = Counter(claim.answer for claim in claims)
    introduction = INTRODUCTION.format(
        count=len(claims),
        shares=summary(counts),
        answers="\n".join(row(answer, MEANINGS[answer], str(counts[answer])) for answer in ANSWERS),
        reports=table(("report", *ANSWERS[:-1]), report_rows(reports)),
        refused=", ".join(refused_techniques(claims)),
    )
    sections = [introduction]
    for report in reports:
        rows = [claim_row(claim) for claim in report.claims]
        sections.append(f"## {report.title}\n\n{report.summary}\n\n{table(TITLES, rows)}\n")
    sections.append(details(claims))
    return "\n".join(sections)


def summary(counts: Counter[str]) -> str:
    """Returns the numbers of answers as a sentence."""
    measured = sum(counts.values()) - counts[UNMEASURED]
    return (
        f"**Of {measured} claims that could be checked, {counts[TRUE]} are true, {counts[DEPENDS]} depend on the "
        f"model or the machine, {counts[PARTLY]} are partly true, {counts[UNDECIDED]} are undecided "
        f"and {counts[FALSE]} are false.** "
        f"{counts[UNMEASURED]} more are not measured."
    )


def report_rows(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Returns a row for each report: how many claims are not measured, and the number of each
    answer.
    """
    rows = []
    for report in reports:
        counts = Counter(claim.answer for claim in report.claims)
        numbers = [str(counts[answer]) for answer in ANSWERS[:-1]]
        name = f"[{report.title}](#{anchor(report.title)}), {counts[UNMEASURED]} {UNMEASURED}"
        rows.append((name, *numbers))
    return rows


def refused_techniques(claims: Sequence[Claim]) -> list[str]:
    """Returns the techniques that are not offered although they were measured, each once."""
    return list(dict.fromkeys(claim.technique for claim in claims if claim.here.startswith("refused")))


def claim_row(claim: Claim) -> tuple[str, ...]:
    """Returns the row of a claim."""
    return (
        claim.technique,
        f"{claim.claim} ({claim.where})",
        claim.here,
        measured_cell(claim),
        verdicts(claim.measurements),
        f"**{claim.answer}**: {claim.because}",
    )


def measured_cell(claim: Claim) -> str:
    """Returns the measurements of a claim, or the lowest and the highest of many."""
    measurements = claim.measurements
    if not measurements:
        return f"test `{claim.shown}`" if claim.shown else "-"
    if len(measurements) <= MOST_SHOWN:
        return "; ".join(map(figure, measurements))
    ordered = sorted(measurements, key=lambda measurement: measurement.value or 0.0)
    return f"{figure(ordered[0])} to {figure(ordered[-1])}, {len(ordered)} measurements"


def figure(measurement: Measurement) -> str:
    """Returns a measured figure with a link to its report."""
    if not measurement.label:
        return f"[{measurement.text}](../{measurement.report})"
    # Two brackets in a row would be a link of Markdown.
    return f"{measurement.text} ([{measurement.label}](../{measurement.report}))"


def verdicts(measurements: Sequence[Measurement]) -> str:
    """Returns the gate's verdicts, with their number if there are different ones."""
    counts = Counter(filter(None, (measurement.verdict for measurement in measurements)))
    if not counts:
        return "-"
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{verdict} {count}" for verdict, count in sorted(counts.items()))


def details(claims: Sequence[Claim]) -> str:
    """Returns the section with all measurements."""
    rows = list(dict.fromkeys(detail_rows(claims)))
    introduction = (
        "The linked report contains the command of a measurement, its raw data and more figures. A dash in the column "
        "*gate* means that the gate has not judged it. For memory, the verdict is that on the stage in the ablation of "
        "the same recipe."
    )
    return f"## Every measurement\n\n{introduction}\n\n{table(DETAILS, rows)}\n"


def detail_rows(claims: Sequence[Claim]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each measurement."""
    for claim in claims:
        for measurement in claim.measurements:
            yield (
                claim.technique,
                measurement.text,
                f"[{measurement.label or 'report'}](../{measurement.report})",
                measurement.verdict or "-",
                measurement.method,
                f"{measurement.date}; {measurement.machine}",
            )


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    return "\n".join([row(*titles), row(*["---"] * len(titles)), *(row(*cells) for cells in rows)])


def row(*cells: str) -> str:
    """Returns one line of a table."""
    return f"| {' | '.join(cells)} |"


def anchor(title: str) -> str:
    """Returns the anchor of a heading, as the site and the repository make it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
