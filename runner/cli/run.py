"""The command ``run``: trains a recipe."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Quiet,
    RecipeName,
    Sets,
    load_lock,
    registry_of,
    run_folders,
    settings,
)
from runner.cli.data import fetched
from runner.cli.processes import (
    Nodes,
    Processes,
    Rendezvous,
    first_decides,
    follow,
    is_one_of_several,
    refuse_several,
    start_processes,
)
from runner.cli.resume import resume
from runner.cli.timing import process_start
from runner.cli.training import AllowDrift, KeepBatch, Retune, Takeover, display_of, end, say_drift
from runner.distributed.membership import current
from runner.system.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from runner.plugin.registry import Registry
    from runner.recipe.lock import Drift
    from runner.recipe.recipe import Recipe

GoOn = Annotated[
    bool,
    Option("--resume", help="Continue the newest unfinished run of this recipe, if there is one."),
]
Seeds = Annotated[int, Option("--seeds", min=1, help="Train with N seeds: the recipe's and the next ones.")]
Parallel = Annotated[int, Option("--parallel", min=1, help="Number of runs that train at the same time.")]
Folds = Annotated[
    int | None, Option("--folds", min=2, help="Cross-validate: train N times, each with another part held out.")
]
Smoke = Annotated[
    bool,
    Option(
        "--smoke",
        help="Try the recipe: a few updates, an evaluation and two checkpoints on 1 % of the data.",
    ),
]
Download = Annotated[bool, Option("--download", help="Fetch the published files that the data need.")]
Tags = Annotated[
    list[str] | None,
    Option("--tag", metavar="NAME=VALUE", help="Tag of the run, also in MLflow. Repeatable."),
]
Note = Annotated[str, Option(metavar="TEXT", help="Note about the run; its description in MLflow.")]


def run(
    recipe: RecipeName, bare: Bare = None, sets: Sets = None, plugin: Plugins = None, go_on: GoOn = False,
    allow_drift: AllowDrift = False, download: Download = False, tag: Tags = None, note: Note = "",
    seeds: Seeds = 1, folds: Folds = None, parallel: Parallel = 1, smoke: Smoke = False,
    takeover: Takeover = False, keep_batch: KeepBatch = False, retune: Retune = False,
    nproc: Processes = 1, nodes: Nodes = 1, rendezvous: Rendezvous = "", quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train a recipe and log it to MLflow.

    The folder of the run, with lock, metrics and checkpoints, is in [bold].runner/runs[/].
    RUNNER_WORKSPACE names another workspace, MLFLOW_TRACKING_URI another MLflow store.

    With --resume, the same command can be repeated, for example by a scheduler: it continues where
    the previous one was killed, and starts from the beginning only if there is nothing to continue.

    With --seeds, every seed is a run, and the means have confidence intervals. --resume continues
    the seeds that are not finished.

    With --folds, the samples are divided into N parts, and every run holds out another one. The
    means have confidence intervals; the predictions of all held-out samples are in one file.

    With several values of a setting, separated by commas, every combination is a run of one group.

    With --smoke, the run shows in seconds whether training, evaluation, checkpoints and logging work.
    It is marked, and its model cannot be registered.

    With --nproc, processes train one model together, each on a part of every batch; with --nodes, also
    those of other machines.

    [bold]runner run marl_phase2[/]

    [bold]runner run digits_classifier --seeds 5 --parallel 2[/]

    [bold]runner run digits_classifier --folds 5[/]

    [bold]runner run digits_classifier --smoke[/]

    [bold]runner run digits_classifier optimizer.lr=1e-3,3e-3 model.widths=[8],[16] --parallel 2[/]

    [bold]runner run recipes/marl_phase2.yaml data.followers=2 optimization.amp=off[/]
    """
    from runner.recipe.grid import grid_of
    from runner.recipe.loader import find, secret_assignments
    from runner.recipe.yaml_nodes import is_lock

    registry = registry_of(plugin, quiet)
    all_assignments = settings(sets, bare)
    varied, combinations = grid_of(all_assignments)
    assignments = combinations[0]
    _refuse_two_groups(varied, seeds, folds)
    path = find(recipe)
    own_tags = dict(map(parse_tag, tag or ()))
    changes: list[Drift] = []
    if is_lock(path):
        loaded, registry, changes = load_lock(path, assignments, registry, f"runner run {shlex.quote(recipe)}")
    else:
        loaded = _load(path, assignments, registry)
    if smoke:
        from runner.recipe.smoke import smoke_assignments

        shortened = smoke_assignments(loaded)
        combinations = [[*combination, *shortened] for combination in combinations]
        assignments = combinations[0]
        loaded = _load(path, assignments, registry)
    _download(loaded, download)
    is_group = varied or folds or seeds > 1
    if is_group and is_one_of_several(nproc * nodes):
        refuse_several("a group of runs")
    start_processes(loaded, nproc, nodes, rendezvous)
    if is_group:
        say_drift(changes)
        run_folders("run", quiet)
    if varied:
        from runner.cli.grid import run_grid

        recipes = {}
        for number, combination in enumerate(combinations, start=1):
            variant = _load(path, combination, registry)
            recipes[number] = replace(variant, tuning=None) if retune else variant
        smoke_option = ["--smoke"] if smoke else []
        options = [*smoke_option, "--parallel", str(parallel), "--resume"]
        command = _command(registry, recipe, all_assignments, options)
        run_grid(
            recipes, varied, registry, parallel, go_on, own_tags, note, command, quiet, as_json, takeover, allow_drift
        )  # fmt: skip
    if folds or seeds > 1:
        from runner.cli.seeds import run_seeds

        option: Literal["seeds", "folds"] = "folds" if folds else "seeds"
        counted = [f"--{option}", str(folds or seeds)]
        recipes = _repeated(loaded, path, assignments, registry, folds, seeds, retune)
        command = _command(registry, recipe, assignments, [*counted, "--parallel", str(parallel), "--resume"])
        run_seeds(
            recipes, registry, parallel, go_on, own_tags, note, command, quiet, as_json, takeover, option, allow_drift
        )  # fmt: skip
    name = first_decides(partial(_unfinished, loaded, takeover, quiet)) if go_on else None
    if name is not None:
        # The lock does not contain secrets.
        all_sets = [*secret_assignments(loaded), *assignments]
        resume(name, all_sets, None, allow_drift, plugin, takeover, keep_batch, retune, quiet, as_json)
    say_drift(changes)
    follow(loaded, registry)

    choices: Any = {"own_tags": own_tags, "note": note, "retune": retune, "started": process_start()}
    with display_of(loaded, quiet, keep_batch) as display:
        # The display has printed by then.
        from runner.tracking import Workspace
        from runner.training.run import run as train

        result = train(loaded, registry, Workspace(), display, processes=current(), **choices)
    end(result, loaded, as_json)


def _load(path: "Path", assignments: list[str], registry: "Registry") -> "Recipe":
    """Loads a recipe, with the stages that its memory budget needs."""
    from runner.recipe.loader import load

    recipe = load(path, assignments, registry)
    if recipe.train.memory_budget is None:
        return recipe
    from runner.training.budget import fitted

    return fitted(recipe, registry)


def _refuse_two_groups(varied: Sequence[str], seeds: int, folds: int | None) -> None:
    """Raises a UsageError if the runs would be two groups at the same time."""
    if varied and seeds > 1:
        raise UsageError(f"--seeds: {varied[0]} has several values; write seed=0,1,2 instead")
    if folds and (varied or seeds > 1):
        raise UsageError("--folds: cannot be combined with --seeds or several values of a setting")


def _repeated(
    recipe: "Recipe",
    path: "Path",
    assignments: list[str],
    registry: "Registry",
    folds: int | None,
    seeds: int,
    retune: bool,
) -> "dict[int, Recipe]":
    """Returns a recipe with each fold or with consecutive seeds, without the tuning choices of a lock if they are not
    wanted.
    """
    if folds:
        _refuse_indivisible(recipe)
        variants = {fold: [f"data.folds.count={folds}", f"data.folds.index={fold}"] for fold in range(folds)}
    else:
        variants = {seed: [f"seed={seed}"] for seed in range(recipe.seed, recipe.seed + seeds)}
    recipes = {}
    for number, variant in variants.items():
        loaded = _load(path, [*assignments, *variant], registry)
        recipes[number] = replace(loaded, tuning=None) if retune else loaded
    if folds:
        from runner.training.fold_check import refuse_indivisible

        refuse_indivisible(recipes[0])
    return recipes


def _refuse_indivisible(recipe: "Recipe") -> None:
    """Raises a UsageError if the recipe's samples cannot be divided into folds."""
    from runner.plugin.configs import DatasetConfig

    kind = recipe.data.kind
    if not isinstance(recipe.data, DatasetConfig):
        raise UsageError(f"--folds: '{kind}' has no samples that could be divided: it needs a dataset")
    if not recipe.data.divisible:
        raise UsageError(f"--folds: '{kind}' needs all of its samples together")


def _unfinished(recipe: "Recipe", takeover: bool, quiet: bool) -> str | None:
    """Returns the name of the newest run of the same recipe that can be resumed."""
    for folder in run_folders("run", quiet):
        record = folder.record()
        if record is not None and record.digest == recipe.digest and not folder.obstacle(takeover):
            return folder.name
    return _restored(recipe, takeover)


def _restored(recipe: "Recipe", takeover: bool) -> str | None:
    """Restores the newest unfinished run of a recipe from its second copy, and returns its name; None without one."""
    url = recipe.tracking.second_copy
    if url is None:
        return None
    from runner.tracking.run_copy import find_copy, restore
    from runner.tracking.workspace import Workspace

    workspace = Workspace()
    copy = find_copy(url, recipe.digest, takeover)
    if copy is None or (workspace.runs / copy.rpartition("/")[2]).exists():
        return None
    return restore(copy, workspace).name


def _download(recipe: "Recipe", wanted: bool) -> None:
    """Fetches the published files that the recipe's data need, if that was requested."""
    if not wanted:
        return
    for file in recipe.data.absent():
        fetched(file)


def _command(registry: "Registry", recipe: str, assignments: Sequence[str], options: Sequence[str]) -> str:
    """Returns the command that trains a recipe with these assignments and options."""
    set_options = [word for assignment in assignments for word in ("--set", assignment)]
    return registry.command(shlex.join(["runner", "run", recipe, *set_options, *options]))


def parse_tag(text: str) -> tuple[str, str]:
    """Returns name and value of a --tag option."""
    name, equals, value = text.partition("=")
    if not equals or not name or name.startswith("mlflow."):
        raise UsageError(f"--tag '{text}': should be NAME=VALUE; names in 'mlflow.' are reserved")
    return name, value
