"""The command ``ui``: opens MLflow's page."""

import os
import sys
from typing import Annotated

from typer import Option

from runner.cli.common import say, working

Port = Annotated[int, Option(min=1, max=65535, help="Port; another free port is used if it is taken.")]
Browser = Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")]
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Environment variables; if one of them is set, a browser can be opened."""


def ui(port: Port = 5000, browser: Browser = True) -> None:
    """Open MLflow's page for this workspace, on 127.0.0.1, until Ctrl-C.

    A browser opens it if this is a terminal on a machine with a screen.

    [bold]runner ui --port 5001[/]
    """
    import webbrowser

    with working("ui", "importing MLflow") as bar:
        from runner.tracking import Workspace
        from runner.tracking.ui import serve

        def announce(address: str) -> None:
            bar.close()
            say(address)
            has_screen = sys.platform == "darwin" or any(map(os.environ.get, _SCREENS))
            if browser and sys.stderr.isatty() and has_screen:
                webbrowser.open(address)

        serve(Workspace(), announce, port, bar.phase)
