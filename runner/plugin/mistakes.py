"""What went wrong in a plugin's own code, said as its writer can use it."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from runner.plugin.registry import FILES, packages
from runner.system.errors import PluginError, RunnerError
from runner.system.names import shown_path
from runner.system.secrets import redact


def mistake(error: BaseException) -> PluginError | None:
    """The message about an exception that passed through a plugin: where it was in there, and the lines that led to it.

    None if it did not, so that it is a mistake of the runner's, or if it only ends the process.
    """
    if not isinstance(error, Exception):
        return None
    known = packages()
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_of_plugin(frame, known)]
    if not own:
        return None
    places = [f"{shown_path(Path(frame.f_code.co_filename))}:{line}" for frame, line in own]
    names = [frame.f_code.co_qualname.replace(".<locals>", "") for frame, _ in own]
    said = "".join(traceback.format_exception_only(error)).strip()
    lines = [traceback.FrameSummary(frame.f_code.co_filename, line, "").line for frame, line in own]
    steps = [f"    {place}, {name}: {line}" for place, name, line in zip(places, names, lines, strict=True)]
    return PluginError(redact("\n".join([f"{names[-1]} in {places[-1]}: {said}", *steps])))


@contextmanager
def told() -> Iterator[None]:
    """Makes what a plugin raises inside the ``with`` a PluginError."""
    try:
        yield
    except RunnerError:
        raise
    except Exception as error:
        if said := mistake(error):
            raise said from error
        raise


def _is_of_plugin(frame: FrameType, known: frozenset[str]) -> bool:
    """Whether a frame is of an installed plugin's package, of a plugin file, or of what stands beside one."""
    module, path = str(frame.f_globals.get("__name__")), Path(frame.f_code.co_filename).resolve()
    if any(f"{module}.".startswith(f"{package}.") for package in known):
        return True
    beside = any(path.is_relative_to(file.parent) for file in FILES)
    return beside and module.partition(".")[0] != "runner" and not path.is_relative_to(sys.prefix)
