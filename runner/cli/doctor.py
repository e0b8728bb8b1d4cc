"""The command ``doctor``: checks this machine."""

from dataclasses import asdict

from typer import Exit

from runner.cli.common import AsJson, Plugins, output, registry_of, working
from runner.system.errors import ExitCode


def doctor(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Check this machine: devices, threads, bf16, packages, workspace, tracking store.

    The exit code is 1 if something is missing that every run needs.
    """
    with working("doctor", "looking at this machine"):
        from runner.cli.diagnosis import examine, show
        from runner.tracking import Workspace

        checks = examine(Workspace(), registry_of(plugin))
    ok = all(check.status != "fail" for check in checks)
    output(as_json, lambda: {"ok": ok, "checks": [asdict(check) for check in checks]}, show, checks)
    if not ok:
        raise Exit(ExitCode.FAILED)
