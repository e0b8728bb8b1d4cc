"""Ctrl-C before a command handles it."""

import signal
import time

from children import start

SLEEPING = """
import time
from pathlib import Path

Path({!r}).touch()
time.sleep(60)
"""


def test_ctrl_c_while_a_plugin_is_imported_is_one_word(tmp_path):
    reached = tmp_path / "reached"
    plugin = tmp_path / "sleeping.py"
    plugin.write_text(SLEEPING.format(str(reached)))
    child = start(tmp_path, "validate", "digits_classifier", "--plugin", str(plugin))
    while not reached.exists():
        assert child.running, child.stderr
        time.sleep(0.01)
    child.send(signal.SIGINT)
    assert child.wait() == 130
    assert child.stderr.splitlines()[-1] == "Interrupted."
    assert "Traceback" not in child.stderr


def test_sigterm_while_the_page_of_mlflow_starts_has_its_exit_code(tmp_path, migrated_workspace):
    child = start(tmp_path, "ui")
    while not list(migrated_workspace.glob("ui.log")):
        assert child.running, child.stderr
        time.sleep(0.01)
    child.send(signal.SIGTERM)
    assert child.wait() == 143, child.stderr
    assert "sys.exit" not in child.stderr
