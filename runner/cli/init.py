"""The command ``init``: writes a plugin, its recipe and its test as a start."""

import keyword
import re
import shlex
from pathlib import Path
from string import Template
from typing import Annotated

from typer import Argument

from runner.cli.common import emit, say
from runner.system.errors import UsageError

TEMPLATES = Path(__file__).parent / "template"
FILES = {"{name}.py": "plugin.py.txt", "{name}.yaml": "recipe.yaml.txt", "test_{name}.py": "test.py.txt"}
"""Templates by the names of the files that they become."""
NAME = re.compile(r"[a-z][a-z0-9_]*")
Folder = Annotated[
    Path,
    Argument(metavar="FOLDER", help="A new folder; its name is that of the plugin, such as my_net."),
]


def init(folder: Folder) -> None:
    """Write a plugin, a recipe and a test that train as they are, as a start for your model.

    [bold]runner init my_net[/]
    """
    name = folder.name
    _check_name(name)
    class_name = "".join(word.capitalize() for word in name.split("_"))
    values = {"name": name, "Name": class_name, "folder": folder.as_posix()}
    # The folder is new, so no file of the user is overwritten.
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{folder} exists already, and is not overwritten") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror or error}") from None
    for target, template in FILES.items():
        path = folder / target.format(name=name)
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        path.write_text(Template(text).substitute(values), encoding="utf-8")
        emit(path)
    plugin = shlex.quote(str(folder / f"{name}.py"))
    recipe = shlex.quote(str(folder / f"{name}.yaml"))
    say(f"train it: runner run {recipe} --plugin {plugin}")
    say(f"test it: pytest {shlex.quote(str(folder))}")


def _check_name(name: str) -> None:
    """Raises a UsageError if a plugin cannot have this name."""
    from runner.plugin.registry import Registry

    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(
            f"'{name}' cannot name a plugin: take lower-case letters, digits and underscores, and begin with a letter"
        )
    # Two plugins of one name would be refused by every later command.
    registry = Registry()
    taken = {kind for section in ("model", "data") for kind in registry.kinds(section)}
    if not taken.isdisjoint({name, f"{name}_data"}):
        raise UsageError(f"'{name}' is a plugin already; take another name")
