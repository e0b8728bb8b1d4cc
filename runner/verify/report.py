"""What ``runner verify`` found, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.system.secrets import redact

if TYPE_CHECKING:
    from runner.verify.gate import Verification

_COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def show(report: Verification, console: Console) -> None:
    """Prints one row for every stage and one for the recipe as a whole."""
    data = report.data()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("contract")
    table.add_column("verdict", no_wrap=True)
    table.add_column("evidence", overflow="fold")
    for row in data["stages"]:
        verdict = Text(row["verdict"], style=_COLOURS[row["verdict"]])
        table.add_row(Text(row["name"]), row["contract"], verdict, Text(redact(row["summary"])))
    for kind, reason in report.inactive.items():
        table.add_row(Text(kind), "", "inactive", Text(redact(reason)), style="dim")
    console.print(table)
    console.print(
        Text.assemble(
            f"{report.recipe}: ", (str(report.outcome), _COLOURS[report.outcome]), f" in {report.seconds:.0f} s"
        )
    )
