"""Claims of the source reports and the answers that follow from measurements."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from claim_measurements import ROOT, ClaimError, Measurement, read_measurement

FOLDER = Path(__file__).parent
REPORTS = ("paths", "convolutions", "graphs", "grasps", "radiance")
"""Names of the data files, one for each source report, in the order of the page."""
TRUE = "true"
DEPENDS = "depends on"
PARTLY = "partly"
UNDECIDED = "undecided"
FALSE = "false"
UNMEASURED = "not measured"
ANSWERS = (TRUE, DEPENDS, PARTLY, UNDECIDED, FALSE, UNMEASURED)
FIGURE = r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d"
NEUTRAL = {"x": 1.0, "%": 0.5}
"""Figure of no effect by unit. A saving that is shown as 0 % is none, even if it was counted exactly."""
KEYS = {
    "technique",
    "claim",
    "where",
    "claimed",
    "here",
    "measured",
    "shown",
    "answer",
    "because",
    "cited",
}
REQUIRED = {"technique", "claim", "where", "here", "because"}


@dataclass(frozen=True)
class Claim:
    """A claim of a report about one technique.

    Attributes:
        technique: Name of the technique.
        claim: The claim in words, with its figure.
        where: The passage of the report.
        claimed: Lower and upper end of the claimed figure; None without a comparable figure.
        unit: Unit of the claimed figure.
        here: Stage, setting or plugin of this repository; "not built" if there is none.
        measurements: Measurements of the technique.
        shown: Path of a test that shows the answer; empty if there is none.
        stated: The reviewed answer; None if it follows from the figures.
        because: Reason, condition or what is missing.
        cited: Path of the page with the figures of ``because``; empty if there are none.
    """

    technique: str
    claim: str
    where: str
    claimed: tuple[float, float] | None
    unit: str
    here: str
    measurements: Sequence[Measurement]
    shown: str
    stated: str | None
    because: str
    cited: str

    @property
    def answer(self) -> str:
        """Returns one of ``ANSWERS``."""
        return self.stated or compare(self)

    def claimed_for(self, measurement: Measurement) -> tuple[float, float] | None:
        """Returns the claimed range that a measurement is compared with."""
        if measurement.published is not None:
            return (measurement.published, measurement.published)
        return self.claimed if measurement.unit == self.unit else None


@dataclass(frozen=True)
class Report:
    """A source report with its claims.

    Attributes:
        name: Name of its data file.
        title: Heading on the page.
        summary: Origin of the report and of its figures.
        claims: Its claims in the order of the report.
    """

    name: str
    title: str
    summary: str
    claims: Sequence[Claim]


def load_reports(folder: Path = FOLDER) -> list[Report]:
    """Reads the claims of all reports with their measurements.

    Raises:
        ClaimError: A data file is incomplete, or contradicts a result.
    """
    reports = []
    for name in REPORTS:
        data = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        claims = [parse_claim(fields, name) for fields in data["claims"]]
        reports.append(Report(name, data["title"], data["summary"], claims))
    return reports


def parse_claim(fields: Mapping[str, Any], report: str) -> Claim:
    """Checks the fields of a claim and reads its measurements.

    Raises:
        ClaimError: A field is missing, unknown or contradicts another one.
    """
    name = f"{report}: {fields.get('technique', 'a claim without a technique')}"
    if unknown := fields.keys() - KEYS:
        raise ClaimError(f"{name}: unknown fields {sorted(unknown)}")
    if missing := REQUIRED - fields.keys():
        raise ClaimError(f"{name}: missing fields {sorted(missing)}")
    claimed, unit = parse_claimed(fields.get("claimed"))
    claim = Claim(
        technique=fields["technique"],
        claim=fields["claim"],
        where=fields["where"],
        claimed=claimed,
        unit=unit,
        here=fields["here"],
        measurements=[read_measurement(entry) for entry in fields.get("measured", ())],
        shown=fields.get("shown", ""),
        stated=fields.get("answer"),
        because=fields["because"],
        cited=fields.get("cited", ""),
    )
    if problem := contradiction(claim):
        raise ClaimError(f"{name}: {problem}")
    return claim


def parse_claimed(text: str | None) -> tuple[tuple[float, float] | None, str]:
    """Returns range and unit of a figure such as ``1.2 to 1.5 x`` or ``50 %``."""
    if text is None:
        return None, ""
    figures, _, unit = text.rpartition(" ")
    low, _, high = figures.partition(" to ")
    return (float(low), float(high or low)), unit


def contradiction(claim: Claim) -> str:
    """Returns why the fields of a claim do not fit together; empty if they do."""
    if unsourced := uncited_figures(claim):
        return f"'because' has figures without a source: {', '.join(unsourced)}; name their page in 'cited'"
    comparable = [claim.claimed_for(measurement) for measurement in claim.measurements]
    evidence = bool(claim.measurements or claim.shown)
    if claim.stated is not None and claim.stated not in ANSWERS:
        return f"the answer '{claim.stated}' is none of {', '.join(ANSWERS)}"
    if claim.stated == UNMEASURED and claim.measurements:
        return f"it has measurements, and the answer is '{UNMEASURED}'"
    if claim.stated not in (None, UNMEASURED) and any(comparable):
        return "the answer follows from the figures: remove it"
    if claim.stated in ANSWERS[:-1] and not evidence:
        return "an answer needs a measurement or a test"
    if claim.stated is None and claim.measurements and not any(comparable):
        return "no measurement has the unit of the claim: state the answer"
    if claim.stated is None and claim.shown and not claim.measurements:
        return "a test has no figure: state the answer"
    return ""


def uncited_figures(claim: Claim) -> list[str]:
    """Returns the figures of ``because`` that neither the claim nor the cited page contains."""
    sources = claim.claim
    if claim.cited:
        sources += (ROOT / claim.cited).read_text(encoding="utf-8")
    known = set(re.findall(FIGURE, sources))
    return [figure for figure in re.findall(FIGURE, claim.because) if figure not in known]


def compare(claim: Claim) -> str:
    """Returns the answer that follows from claimed and measured figures.

    A measurement reaches the claim if its value is at least the lower end of the claimed range;
    if the claim is a gain, the measurement must be one beyond its interval, too. Without any gain
    the claim is undecided if no interval excludes its lower end.
    """
    reached = []
    gains = []
    possible = []
    for measurement in claim.measurements:
        claimed = claim.claimed_for(measurement)
        if claimed is None or measurement.value is None:
            continue
        neutral = NEUTRAL.get(measurement.unit, 0.0)
        lower_end = measurement.interval[0] if measurement.interval else measurement.value
        is_gain = lower_end > neutral
        gains.append(is_gain)
        upper_end = measurement.interval[1] if measurement.interval else measurement.value
        possible.append(upper_end >= claimed[0])
        reached.append(measurement.value >= claimed[0] and (is_gain or claimed[0] <= neutral))
    if not reached:
        return UNMEASURED
    if all(reached):
        return TRUE
    if any(reached):
        return DEPENDS
    if any(gains):
        return PARTLY
    return UNDECIDED if all(possible) else FALSE
