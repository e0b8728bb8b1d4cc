"""Writes docs/claims.md and its plot from the claims next to this file and the results of experiments.

python experiments/claims/claims.py
"""

from claim_measurements import ROOT
from claim_model import load_reports
from claim_page import write_page
from claim_plot import draw

PAGE = ROOT / "docs" / "claims.md"
PLOT = ROOT / "docs" / "claims.png"


def main() -> None:
    """Writes both files."""
    reports = load_reports()
    PAGE.write_text(write_page(reports), encoding="utf-8")
    draw(reports, PLOT)
    print(f"{PAGE.relative_to(ROOT)}: {sum(len(report.claims) for report in reports)} claims")


if __name__ == "__main__":
    main()
