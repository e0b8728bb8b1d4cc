"""A browser without a screen, in which pages are looked at as a person would."""

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser here: {', '.join(NAMES)}")
PATIENCE_MS = 200_000
"""Of the page's own clock, which stands still while an answer is waited for."""


def page(address, folder, *options, width=1600):
    """The document at an address as text, when its scripts have come to rest.

    Args:
        address: of the page.
        folder: for what the browser keeps.
        options: more of the browser's.
        width: of its window, in pixels.
    """
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *options]
    command += [f"--user-data-dir={Path(folder) / 'browser'}", f"--window-size={width},900", "--no-proxy-server"]
    command += [f"--virtual-time-budget={PATIENCE_MS}", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
