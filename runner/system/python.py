"""How this project starts Python: never with code from the current directory, where other people's files may lie."""

import os
import sys

PYTHON = (sys.executable, "-P")
"""An interpreter that imports nothing from the directory it is started in."""


def safe_environment() -> dict[str, str]:
    """This process's environment, in which the interpreters that a child starts are as careful."""
    return {**os.environ, "PYTHONSAFEPATH": "1"}
