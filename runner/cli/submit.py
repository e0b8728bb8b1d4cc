"""The command ``submit``: trains a recipe, or searches a study, by the scheduler of a cluster."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from runner.cli import completion
from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Sets,
    emit,
    load_recipe,
    print_json,
    registry_of,
    say,
    settings,
    tell,
)
from runner.cli.run import Note, Tags, parse_tag
from runner.system.errors import ExitCode, StorageError, UsageError
from runner.system.shared_storage import SQLITE_PROBLEM, require_server
from runner.system.suggestions import shown_path
from runner.system.workspace_paths import is_server, workspace_root

if TYPE_CHECKING:
    from runner.distributed.batch_job import BatchJob
    from runner.plugin.registry import Registry

_MLFLOW = "MLFLOW_TRACKING_URI"
_OPTUNA = "OPTUNA_STORAGE"


class Cluster(StrEnum):
    """Systems that run jobs."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"


RecipeOrStudy = Annotated[
    str,
    Argument(
        metavar="RECIPE|STUDY",
        help="Recipe file, name of a recipe that ships, or file of kind study.",
        autocompletion=completion.recipes,
    ),
]
Kind = Annotated[Cluster, Option("--kind", help="System of the cluster.")]
Print = Annotated[bool, Option("--print", help="Print the script on stdout instead of submitting it.")]
Seeds = Annotated[
    int | None, Option("--seeds", min=1, help="One task for each of N seeds: the recipe's and the next ones.")
]
Workers = Annotated[int | None, Option("--workers", min=1, help="Number of workers of a study; each is a task.")]
NodeCount = Annotated[int, Option("--nodes", min=1, help="Number of machines that train one model together (Slurm).")]
ProcessCount = Annotated[int, Option("--nproc", min=1, help="Number of processes on each machine.")]
Gpus = Annotated[int, Option("--gpus", min=0, help="Number of GPUs of each machine.")]
Cpus = Annotated[int | None, Option("--cpus", min=1, help="Number of cores of each machine.")]
Memory = Annotated[str, Option("--memory", metavar="SIZE", help="Memory of each machine, such as 16GiB.")]
TimeLimit = Annotated[
    str,
    Option("--time", metavar="TIME", help="Time limit of a task, such as 02:00:00 (Slurm)."),
]
FreeOptions = Annotated[
    list[str] | None,
    Option("--option", metavar="KEY=VALUE", help="Option of sbatch, such as partition=gpu. Repeatable."),
]
Image = Annotated[str, Option("--image", help="Image of the container (Kubernetes).")]
Claim = Annotated[
    str,
    Option("--claim", metavar="PVC", help="PersistentVolumeClaim that is the workspace (Kubernetes)."),
]
SecretReferences = Annotated[
    list[str] | None,
    Option(
        "--secret",
        metavar="VARIABLE=SECRET:KEY",
        help="Variable from a key of a Secret (Kubernetes). Repeatable.",
    ),
]


def submit(
    recipe: RecipeOrStudy, bare: Bare = None, sets: Sets = None, plugin: Plugins = None,
    seeds: Seeds = None, workers: Workers = None, tag: Tags = None, note: Note = "", kind: Kind = Cluster.SLURM,
    nodes: NodeCount = 1, nproc: ProcessCount = 1, gpus: Gpus = 0, cpus: Cpus = None, memory: Memory = "",
    time: TimeLimit = "", option: FreeOptions = None, image: Image = "", claim: Claim = "",
    secret: SecretReferences = None, print_only: Print = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train a recipe, or search a study, by Slurm or Kubernetes.

    The recipe is validated first. A task that the scheduler stops writes a checkpoint, and is put
    into the queue again, where it continues.

    [bold]runner submit digits_classifier --seeds 5 --gpus 1 --time 02:00:00 --print[/]

    [bold]runner submit digits_classifier --kind kubernetes --image IMAGE --claim PVC --print[/]
    """
    from runner.distributed.batch_job import BatchJob
    from runner.distributed.kubernetes import parse_secret
    from runner.distributed.slurm import validate_time

    secrets = dict(map(parse_secret, secret or ()))
    of_slurm = {"--nodes": nodes > 1, "--time": time, "--option": option}
    of_kubernetes = {"--image": image, "--claim": claim, "--secret": secrets}
    _refuse_other_cluster(kind, of_slurm, of_kubernetes)
    validate_time(time)
    assignments = settings(sets, bare)
    if _is_study(recipe):
        of_recipes = {"--seeds": seeds, "--nodes": nodes > 1, "--nproc": nproc > 1, "--tag": tag, "--note": note}
        _refuse_used(of_recipes, "is for recipes")
        task = _study_task(recipe, assignments, plugin, workers or 1)
        _require_server(task.count, secrets)
    else:
        _refuse_used({"--workers": workers}, "is for studies; a recipe has --seeds")
        task = _recipe_task(recipe, assignments, plugin, seeds, nodes * nproc)
    _warn_about_files(task.count, secrets)

    variables, hidden = _variables(kind)
    job = BatchJob(
        name=task.name,
        words=(*task.words, *_run_options(tag, note, nproc), *task.options),
        retry_code=task.retry_code,
        folder=str(Path.cwd()),
        workspace=str(workspace_root()),
        tasks=task.count,
        is_array=task.is_array,
        first_seed=task.first_seed,
        nodes=nodes,
        gpus=gpus,
        cpus=cpus,
        memory=_bytes(memory),
        time=time,
        variables=variables,
        secrets=hidden,
    )
    if kind == Cluster.KUBERNETES:
        _print_manifest(job, image, claim, secrets, print_only, as_json)
    else:
        _send_script(job, option or (), print_only, as_json)


@dataclass(frozen=True)
class _Task:
    """What the tasks of a job run.

    Attributes:
        name: Name of the recipe or the study.
        words: Command, its subject, settings and plugins.
        options: Options after those of the user.
        retry_code: Exit code of a task that a signal has stopped.
        count: Number of tasks.
        is_array: Whether the tasks are numbered.
        first_seed: Seed of the first task; None if tasks are alike.
    """

    name: str
    words: tuple[str, ...]
    options: tuple[str, ...]
    retry_code: int
    count: int
    is_array: bool
    first_seed: int | None = None


def _recipe_task(
    reference: str,
    assignments: list[str],
    plugin: list[Path] | None,
    seeds: int | None,
    processes: int,
) -> _Task:
    """Validates a recipe, and returns the task that trains it."""
    from runner.distributed.refusals import refuse_recipe
    from runner.recipe.grid import grid_of

    varied, _ = grid_of(assignments)
    if varied:
        raise UsageError(f"{varied[0]}: has several values; submit each, or several seeds with --seeds")
    recipe, registry = load_recipe("submit", reference, assignments, plugin)
    if processes > 1:
        refuse_recipe(recipe, processes)
    all_assignments = [*assignments, "train.preemptible=true"]
    return _Task(
        name=recipe.name,
        words=("run", reference, *_setting_words(all_assignments), *_plugin_words(registry)),
        options=("--resume", "--quiet"),
        retry_code=ExitCode.PREEMPTED,
        count=seeds or 1,
        is_array=seeds is not None,
        first_seed=None if seeds is None else recipe.seed,
    )


def _study_task(reference: str, assignments: list[str], plugin: list[Path] | None, workers: int) -> _Task:
    """Validates a study, and returns the task that is one of its workers."""
    from runner.study.definition import load_study

    registry = registry_of(plugin)
    definition = load_study(reference, assignments, registry)
    return _Task(
        name=definition.config.name,
        words=("study", "worker", reference, *_setting_words(assignments), *_plugin_words(registry)),
        options=("--quiet",),
        # A worker has no setting that makes a signal expected.
        retry_code=ExitCode.TERMINATED,
        count=workers,
        is_array=workers > 1,
    )


def _run_options(tags: list[str] | None, note: str, processes: int) -> list[str]:
    """Returns the options of the user for ``runner run``."""
    words = []
    for tag in tags or ():
        parse_tag(tag)
        words += ["--tag", tag]
    if note:
        words += ["--note", note]
    if processes > 1:
        words += ["--nproc", str(processes)]
    return words


def _is_study(reference: str) -> bool:
    from runner.recipe.loader import find
    from runner.recipe.yaml_nodes import read

    path = find(reference)
    # The messages about a file that is missing or wrong are those of a recipe.
    kind = read(path, []).get("kind") if path.is_file() else None
    return kind is not None and kind.value == "study"


def _setting_words(assignments: Sequence[str]) -> list[str]:
    """Returns the words that make these assignments on a command line."""
    # A bare word that begins with a dash would be an option.
    if any(assignment.startswith("-") for assignment in assignments):
        return [word for assignment in assignments for word in ("--set", assignment)]
    return list(assignments)


def _plugin_words(registry: "Registry") -> list[str]:
    return [word for path in registry.files for word in ("--plugin", shown_path(path))]


def _refuse_other_cluster(kind: Cluster, of_slurm: Mapping[str, object], of_kubernetes: Mapping[str, object]) -> None:
    """Raises a UsageError if an option belongs to another kind of cluster, or is missing."""
    if kind == Cluster.SLURM:
        _refuse_used(of_kubernetes, "is for --kind kubernetes")
        return
    _refuse_used(of_slurm, "is for --kind slurm")
    for name in ("--image", "--claim"):
        if not of_kubernetes[name]:
            raise UsageError(f"--kind kubernetes needs {name}; see runner submit --help")


def _refuse_used(options: Mapping[str, object], reason: str) -> None:
    """Raises a UsageError if one of these options is used."""
    for name, value in options.items():
        if value:
            raise UsageError(f"{name} {reason}")


def _require_server(workers: int, secrets: Mapping[str, object]) -> None:
    """Raises a UsageError if workers of several machines would share a file of SQLite."""
    if _OPTUNA in secrets or is_server(os.environ.get(_OPTUNA, "")):
        return
    if workers > 1:
        require_server(workers)
    say(f"warning: {_OPTUNA} names no server, so the study is a file in the workspace; {SQLITE_PROBLEM}")


def _warn_about_files(tasks: int, secrets: Mapping[str, object]) -> None:
    """Prints a warning if several tasks would share MLflow's file of SQLite."""
    if tasks == 1 or _MLFLOW in secrets or is_server(os.environ.get(_MLFLOW, "")):
        return
    say(
        f"warning: {_MLFLOW} names no server, so {tasks} tasks share a file of SQLite in the workspace; "
        f"{SQLITE_PROBLEM}"
    )


def _variables(kind: Cluster) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the variables of this process for the tasks, and the names of those with a secret."""
    from runner.distributed.batch_job import job_variables

    variables, secrets = job_variables(os.environ)
    if kind == Cluster.KUBERNETES:
        # A container does not have the files of this machine.
        variables = {name: value for name, value in variables.items() if is_server(value)}
    return variables, secrets


def _bytes(size: str) -> int | None:
    from runner.system.byte_size import parse_size

    try:
        return parse_size(size) if size else None
    except ValueError as error:
        raise UsageError(f"--memory: {error}") from None


def _print_manifest(
    job: "BatchJob",
    image: str,
    claim: str,
    secrets: Mapping[str, tuple[str, str]],
    print_only: bool,
    as_json: bool,
) -> None:
    from runner.distributed.kubernetes import render_manifest

    if not print_only:
        raise UsageError("--kind kubernetes needs --print; start the job with: kubectl apply -f FILE")
    _print_script(render_manifest(job, image, claim, secrets), as_json)


def _send_script(job: "BatchJob", options: Sequence[str], print_only: bool, as_json: bool) -> None:
    """Prints the batch script of a job, or submits it."""
    from runner.distributed import slurm
    from runner.system.files import make_folder

    script = slurm.render_script(job, _program(), options)
    folder = slurm.output_folder(job)
    if print_only:
        _print_script(script, as_json)
        if not folder.is_dir():
            say(f"before sbatch, create the folder of the output: {folder}")
        return
    try:
        make_folder(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    number = slurm.submit_script(script)
    if as_json:
        print_json({"job": number, "tasks": job.tasks, "output": str(folder), "script": script})
        return
    tell(f"job {number} with {job.tasks} {'task' if job.tasks == 1 else 'tasks'}")
    tell(f"state     squeue --job {number}")
    tell("runs      runner ls")
    tell(f"output    {folder}")


def _print_script(script: str, as_json: bool) -> None:
    if as_json:
        print_json({"script": script})
    else:
        emit(script, nl=False)


def _program() -> list[str]:
    """Returns the words that start the runner of this environment."""
    program = Path(sys.executable).with_name("runner")
    return [str(program)] if program.is_file() else [sys.executable, "-m", "runner"]
