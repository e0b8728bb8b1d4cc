"""The command ``recipes``: lists the recipes that ship."""

from itertools import takewhile
from pathlib import Path
from typing import Annotated

from typer import Option

from runner.cli import completion
from runner.cli.common import AsJson, emit, print_json, say, tell
from runner.system.errors import UsageError

Copied = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Copy this recipe to NAME.yaml in the current folder.",
        autocompletion=completion.recipes,
    ),
]


def recipes(copy: Copied = None, as_json: AsJson = False) -> None:
    """List the recipes that ship, or copy one as a start.

    [bold]runner recipes --copy marl_phase2[/]
    """
    from runner.recipe.loader import shipped
    from runner.system.suggestions import suggestion

    paths = shipped()
    if copy is not None:
        name = copy.removesuffix(".yaml")
        if name not in paths:
            raise UsageError(f"no recipe '{copy}' ships{suggestion(name, paths)}")
        target = Path(f"{name}.yaml")
        try:
            # Mode x refuses a file that exists, without a gap between check and creation.
            with target.open("x", encoding="utf-8") as file:
                file.write(paths[name].read_text(encoding="utf-8"))
        except FileExistsError:
            raise UsageError(f"{target} exists already, and is not overwritten") from None
        emit(target)
        say("for completion in your editor: runner schema > recipe.schema.json")
        return
    listing = [{"name": name, "path": str(path), "summary": _first_comment(path)} for name, path in paths.items()]
    if as_json:
        print_json({"recipes": listing})
        return
    width = max(map(len, paths), default=0)
    for entry in listing:
        tell(f"{entry['name']:{width}}  {entry['summary']}".rstrip(), hang=width + 2)


def _first_comment(path: Path) -> str:
    """The first line of the comment at the top of a recipe, past the line for editors."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return next(
        (line.removeprefix("#").strip() for line in comment if "yaml-language-server" not in line),
        "",
    )
