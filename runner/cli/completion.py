"""Names of recipes, runs and plugins that a shell completes in addition to options and files."""

from collections.abc import Iterator


def recipes(incomplete: str) -> list[str]:
    """Recipes that ship."""
    return _beginning(incomplete, _recipes())


def runs(incomplete: str) -> list[str]:
    """Runs of the workspace, the newest first."""
    return _beginning(incomplete, _runs("runs"))


def removable(incomplete: str) -> list[str]:
    """Runs, ablations and groups of seeds."""
    return _beginning(incomplete, [*_runs("runs"), *_runs("ablations"), *_runs("seeds")])


def comparable(incomplete: str) -> list[str]:
    """Runs and groups of seeds."""
    return _beginning(incomplete, [*_runs("runs"), *_runs("seeds")])


def recipes_and_runs(incomplete: str) -> list[str]:
    """Arguments of ``runner show``."""
    folders = ("runs", "ablations", "studies", "seeds")
    names = [name for folder in folders for name in _runs(folder)]
    return _beginning(incomplete, [*_recipes(), *names])


def studies(incomplete: str) -> list[str]:
    """Studies of the workspace."""
    return _beginning(incomplete, _runs("studies"))


def kinds(incomplete: str) -> list[str]:
    """Plugins of this environment."""
    from runner.plugin.schedule_kinds import SCHEDULE_KINDS

    return _beginning(incomplete, [*(kind for _, kind in _plugins()), *SCHEDULE_KINDS])


def stages(incomplete: str) -> list[str]:
    """Returns the kinds of stages of trainings."""
    return _beginning(incomplete, [kind for section, kind in _plugins() if section == "optimization"])


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _recipes() -> list[str]:
    from importlib.resources import files

    names = [path.name for path in files("runner.recipes").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if ".yaml" in name)


def _runs(folder: str) -> list[str]:
    from runner.system.workspace_paths import RECORD, workspace_root

    # Without the classes of the workspace, whose imports would delay every completion.
    records = (workspace_root() / folder).glob(f"*/{RECORD}")
    newest_first = sorted(records, key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent.name for path in newest_first]


def _plugins() -> Iterator[tuple[str, str]]:
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group="runner.plugins"), key=lambda entry: entry.name):
        section, _, kind = entry.name.partition(".")
        # These are in no section of a recipe.
        if section not in ("check", "sink"):
            yield section, kind
