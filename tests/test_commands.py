"""Every command of README and docs is run: those of a page one after the other, in a folder with its files."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from children import start
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from running import TRAINED, settings_of, train_here
from typer.testing import CliRunner

from runner.ablation import inference_ablation
from runner.child.spawn import Child
from runner.cli import app
from runner.plugin.registry import Registry
from runner.proof import interleaved_timing, warm_up
from runner.recipe.loader import load
from runner.verify import checks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SPANS = re.compile(r"`((?:runner|pip|pytest|mkdocs|python|ruff|mypy|optuna-dashboard) [^`\n]+)`")
FILE = re.compile(r"`([\w.]+\.(?:py|yaml|sbatch))`")
RUN = re.compile(r"\b(?:\w+-)?[0-9a-f]{8}\b")
"""A run by its name or its digits."""
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\.\.\.")
NAMED = re.compile(r"^\w+ (\w+|(data|models|study) \w+)$")
"""A verb that is spoken of."""
ASSIGNMENT = re.compile(r"([\w.]+)=")
CHECKS = (ROOT / ".ci" / "run").read_text()
BRIEF = ["--horizon", "0", "--updates", "3"]
"""Options that let ``verify`` look for a moment."""
ONE_STAGE = {"marl": "forward_cache", "digits": "fused_optimizer", "conv": "conv_backend"}
"""By the beginning of a recipe's name, the stage that ``verify`` looks at."""
LONG = ("runner ablate ", "runner verify ", "runner ui")
READING = tuple(
    f"runner {verb}"
    for verb in ("resume", "ls", "show", "compare", "ui", "evaluate", "serve", "models", "rm", "sync", "run .runner/")
)
"""Beginnings of commands that read what was trained before."""
OUTCOMES = {"verify": {0, 4}, "ablate": {0, 4}, "validate": {0, 2}, "ui": {130}, "serve": {130}, "models": {0, 3}}
"""Exit codes: how sure gate and clock are after a moment is not asked here, one recipe is wrong on
purpose, and what was not verified is not promoted."""
ELSEWHERE = {
    "postgresql://user:password@host/studies": "sqlite:///{}/elsewhere.db",
    "https://mlflow.example.org": "sqlite:///{}/server.db",
}
"""Servers that a page names."""
FOR_A_MOMENT = {
    "mine": ("train.epochs=1",),
    "my_net": ("train.epochs=1",),
    "digits": ("train.epochs=1",),
    "example_gan": ("train.updates=8", "train.log_every=4", "train.evaluate_every=8"),
    "example_simulator": ("train.env_steps=320", "data.warmup=64", "train.batch_size=16", "train.evaluate_every=160"),
    **dict.fromkeys(
        ("vae", "bert", "table", "two_tasks", "contrastive", "probe"),
        ("train.epochs=1", "train.evaluate_every=1", "tracking.system_metrics=false"),
    ),
    "ppo": ("train.updates=2", "train.batch_size=64", "train.evaluate_every=2", "tracking.system_metrics=false"),
    "best": (),
    "recipe.lock": (),
}
"""What makes the files of pages small, by name; for ``mine.yaml`` of the page on simulators, below."""
COSTLY = ("merged_critic_loss", "compile", "float32_matmul", "heap_retention", "stacked_agents", "fused_optimizer")
"""Stages of the flagship that an ablation for a moment goes without."""
FEW_KERNELS = ("model.hidden=[8]", "data.followers=1", "train.batch_size=16")
"""What leaves the compiler little to generate for the flagship."""
SHORTER = {"marl_phase": ("data.episode_limit=6",), "digits": ("data.limit={train: 0.3, held_out: 0.2}",),
           "conv": ("data.limit={train: 0.1, held_out: 0.05}",)}  # fmt: skip
"""Further settings of recipes that ship, by the beginning of a name: flights, which are drawn step by step, and
samples."""
FEWER = {"data.kind=shape_grasps": ("data.shapes=3",)}
"""What else is small with a setting."""
MOMENTS = {"FEWEST_SECONDS": inference_ablation, "BLOCK_SECONDS": interleaved_timing, "WINDOW_SECONDS": warm_up}
"""Seconds that the comparison of a trained model waits for."""
SIMULATED = ("train.env_steps=64", "data.warmup=32", "data.evaluation.episodes=2", "train.batch_size=16",
             "train.evaluate_every=64", "model.hidden=[8]")  # fmt: skip


def paragraphs(page):
    """Text and blocks of code of a page in turns: ``(text, language, code)``."""
    parts = re.split(r"^( *)```(\w*)\n(.*?)^ *```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for text, indent, language, code in zip(*[iter([*parts, "", "", ""])] * 4, strict=True):
        yield text, language, re.sub(f"^{indent}", "", code, flags=re.MULTILINE)


def files_of(page):
    """Blocks of a page that are files, by the name that the text before gives them last."""
    found = {}
    for text, language, code in paragraphs(page):
        names = FILE.findall(text)
        if (
            names
            and language in ("python", "yaml", "bash")
            and names[-1].rpartition(".")[2][0] == language[0].replace("b", "s")
        ):
            found.setdefault(names[-1], code)
    return found


WITH_COMMANDS = ("", "console", "bash")
WITHOUT = ("json", "python", "text", "toml", "yaml")
"""Languages without commands; ``text`` has those that need files or a network that no test has."""


def commands_of(page):
    """Commands of a page in their order, and those within its text after them.

    Raises:
        AssertionError: a block has a language of which nobody knows whether it holds commands.
    """
    found, spans = [], []
    for text, language, code in paragraphs(page):
        assert language in (*WITH_COMMANDS, *WITHOUT), (page.name, language)
        lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        found += [line for line in lines if re.match(r"([A-Z_]+=\S+ )?(runner|pip|python) ", line)]
        spans += [span for span in SPANS.findall(text) if not PLACEHOLDER.search(span) and not NAMED.search(span)]
        code = code.replace("\\\n", "").replace("&&\n", "&& ")
        if language in ("console", ""):
            found += re.findall(r"^\$ (.*)$", code, re.MULTILINE)
        elif language == "bash" and not code.startswith("#!"):
            found += [part for line in code.splitlines() for part in line.split(" && ") if not part.startswith(". ")]
    return [*found, *(span for span in dict.fromkeys(spans) if span not in found)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("copied_children")
def test_the_commands_of_a_page_work_in_their_order(page, tmp_path, monkeypatch, migrated_workspace):
    for module in ("runner.ablation.measurement_rounds", "runner.child.group", "runner.verify.timed_gate"):
        monkeypatch.setattr(f"{module}.Child", quick_child)
    folder = tmp_path / "here"
    for name in ("recipes", "docs", "experiments"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.png", "*.jsonl", "build", "*.egg-info")
        )
    for name, code in files_of(page).items():
        (folder / name).write_text(code)
    for path in [*folder.glob("experiments/**/*.yaml"), *(folder / name for name in files_of(page))]:
        shrink(path)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RUNNER_WORKSPACE")
    migrated_workspace.rename(folder / ".runner")
    monkeypatch.setenv("RUNNER_DATA", str(tmp_path / "data"))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    commands, runs = commands_of(page), {}
    for index, command in enumerate(commands):
        if page.stem == "plugins" and "mine.py" in command:
            continue  # test_plugins_page.py runs these, and looks at what comes out
        if is_covered(command, page, commands[index + 1 :]):
            continue
        if is_measured_with_digits(command):
            words = shlex.split(command)
            recipe = load(words[2], [word for word in words[3:] if ASSIGNMENT.match(word)], Registry())
            assert words[1] == "run" or recipe.stages, command
            continue
        if "runner resume" in commands[index + 1 : index + 3] and command.startswith("runner run"):
            kill_in_the_middle(command.split()[1:], tmp_path)
        else:
            obey(command, page, runs, tmp_path, monkeypatch)


@cache
def repeatable():
    """Returns the pages' commands that take long even in small: page, and the words apart from numbers."""
    commands = [(page, command) for page in PAGES for command in commands_of(page)]
    return [
        (page, words_of(command))
        for page, command in commands
        if (command.startswith(LONG) or is_training(command)) and not is_measured_with_digits(command)
    ]


def is_training(command):
    """Whether a command trains a recipe that ships."""
    words = command.split()
    return words[:2] == ["runner", "run"] and words[2] in TRAINED


def words_of(command):
    return frozenset(re.sub(r"\d+", "0", command).split())


def is_covered(command, page, later):
    """Whether a command that takes long is run with these words, and perhaps more, on an earlier page or with more on
    another; a training that a later command of its page reads is run there.
    """
    is_needed = any(each.startswith(READING) or "--of" in each.split() for each in later)
    if not command.startswith(LONG) and (is_needed or not is_training(command)):
        return False
    words, number = words_of(command), PAGES.index(page)
    return any(words < others or (words == others and PAGES.index(other) < number) for other, others in repeatable())


def is_measured_with_digits(command):
    """Whether the stages or the seeds of a larger recipe are measured, which another page does with the digits and
    these options.

    An ablation that is a file measures the flagship; here it is asked whether the recipe and its settings exist.
    """
    words = shlex.split(command)
    is_measurement = words[:2] == ["runner", "ablate"] or (words[:2] == ["runner", "run"] and "--seeds" in words)
    if not is_measurement or words[2].startswith("digits") or words[2].endswith(".yaml"):
        return False
    smallest = f"runner {words[1]} digits_classifier "
    commands = [other for page in PAGES for other in commands_of(page) if other.startswith(smallest)]
    return any(form_of(other) == form_of(command) for other in commands)


def form_of(command):
    """Returns the options of a measurement of a recipe, apart from numbers."""
    return [re.sub(r"\d+", "0", word) for word in shlex.split(command)[3:] if not ASSIGNMENT.match(word)]


def kill_in_the_middle(words, tmp_path):
    """Of a training that has left a checkpoint."""
    before = set(Path(".runner/runs").glob("*/checkpoints/step-*"))
    small = in_small(words, settings_of(words[1]))
    # Its last part is trained by the command that resumes it, so it is as short as any other.
    child = start(tmp_path / "said", *small, RUNNER_FAULTS="checkpoint.renamed=kill")
    assert child.wait() == -signal.SIGKILL, child.stderr
    assert set(Path(".runner/runs").glob("*/checkpoints/step-*")) - before


def by_recipe(values, recipe):
    """Returns the value for the recipes whose names begin like this one."""
    return next(value for beginning, value in values.items() if recipe.startswith(beginning))


def quick_child(module, *arguments, **options):
    quick_module = "quick_" + module.rpartition(".")[2]
    name = quick_module if Path(__file__).with_name(f"{quick_module}.py").exists() else module
    return Child(name, *arguments, **options)


def shrink(path):
    """Makes a study or an ablation one that takes seconds."""
    small = shrunk(path.read_text()) if path.suffix == ".yaml" else None
    if small is not None:
        path.write_text(small)


@cache
def shrunk(text):
    """Returns the text of a small study or ablation; None for another file. All pages have the same files."""
    given = yaml.safe_load(text)
    if not isinstance(given, dict) or given.get("kind") not in ("study", "ablation"):
        return None
    recipe = Path(given["recipe"])
    given["recipe"] = recipe.stem
    given["set"] = small_settings(recipe.stem)
    if given["kind"] == "study":
        given |= {"budget": {"trials": 1}, "limits": {}}
        given.pop("constraints", None)
        given["space"] = {
            name: each
            for name, each in given["space"].items()
            if name == "optimization.fused_optimizer" or "lr" in name
        }
    else:
        given |= {"variants": ["all"], "rounds": {"least": 3, "most": 3}}
        given.pop("cases", None)
        if recipe.stem.startswith("marl"):
            given["set"] += [f"optimization.{kind}=off" for kind in ("amp", *COSTLY)]
    return yaml.safe_dump(given)


def obey(command, page, runs, tmp_path, monkeypatch):
    """Runs a command as a reader would, but for what makes it small."""
    for there, here in ELSEWHERE.items():
        command = command.replace(there, here.format(tmp_path))
    exported = command.startswith("export ")
    with monkeypatch.context() as beside:
        while assignment := re.match(r"(?:export )?([A-Z_]+)=(\S+)(?: |$)", command):
            (monkeypatch if exported else beside).setenv(assignment[1], os.path.expandvars(assignment[2]))
            command = command[assignment.end() :]
        command, _, target = command.partition(" > ")
        words = shlex.split(with_runs(command, runs, tmp_path))
        program = Path(words[0]).name if words else "export"
        if program == "runner":
            said = run(words[1:], page, tmp_path)
            if target:
                Path(target).write_text(said)
        elif program == "pip":
            install(words, tmp_path, monkeypatch)
        elif program != "export":
            assert program in ("python3", "pytest", "mkdocs"), f"{page.name}: nothing runs '{command}'"
            # These are run on a clean checkout.
            checks = [part for line in CHECKS.splitlines() for part in line.partition(" #")[0].split(" && ")]
            assert command in checks, command


def with_runs(command, runs, tmp_path):
    """The command with runs that there are; each name stands for the same one as long as the page goes on.

    Args:
        command: may name runs that only its author has.
        runs: by the digits that the page has, those that stand for them; a new name is the newest that has none, of
            its recipe if it says that, and is trained if there is none, or killed in the middle if it is to be resumed.
        tmp_path: where the output of a killed training goes.
    """
    for name in RUN.findall(command):
        recipe, digits = name[:-9], name[-8:]
        if digits not in runs:
            if recipe and command.startswith("runner resume"):
                kill_in_the_middle(["run", recipe], tmp_path)
            there = [path for path in Path(".runner/runs").glob(f"{recipe or '*'}-*") if path.name not in runs.values()]
            if not there:
                there = [
                    Path(train_here(recipe or "digits_classifier", *(() if recipe else ("train.epochs=1",))).run_dir)
                ]
            runs[digits] = max(there, key=lambda path: path.stat().st_mtime).name
        assert Path(".runner/runs", runs[digits]).is_dir(), f"'{command}' names a run that was removed"
        command = command.replace(name, runs[digits])
    return command


def run(words, page, tmp_path):
    """Runs the runner; returns what it printed."""
    verb = words[0]
    if "--of" in words:
        words += ["--budget", "2"] if verb == "ablate" else []
    elif verb == "ablate" and not words[1].endswith(".yaml"):  # a recipe has no setting for fewer rounds
        Path("ablation.yaml").write_text(f"kind: ablation\nname: small\nrecipe: {words[1]}\n")
        shrink(Path("ablation.yaml"))
        words[1] = "ablation.yaml"
        if "--budget" in words:  # on a loaded machine a process may take minutes to start
            words[words.index("--budget") + 1] = "9999"
    elif verb in ("run", "verify", "profile") and words[1:2] != ["--help"]:
        more = [setting for word in words for setting in FEWER.get(word, ())]
        words = in_small(words, [*small_settings(words[1], page), *more])
    elif "--compiled" in words:
        words = in_small(words, FEW_KERNELS)
    if verb == "verify" and "--of" not in words:
        words += [*BRIEF, "--stage", by_recipe(ONE_STAGE, words[1])]
    for option in ("--seeds", "--folds"):
        if option in words:
            words[words.index(option) + 1] = "2"
    is_group = "--seeds" in words or "--folds" in words
    is_here = words[:2] == ["study", "run"] or verb in ("verify", "ablate") or is_group
    # torch's launcher starts several processes with the words of a command line.
    is_launched = "--nproc" in words and verb != "ablate"
    if is_here and not is_launched:
        with ExitStack() as stack:
            if verb == "ablate" and "--of" in words:  # the gate of a training finds changed constants
                for constant, module in MOMENTS.items():
                    stack.enter_context(patch.object(module, constant, 0.01))
            # ``tests/verify`` has all of them.
            stack.enter_context(patch.object(checks, "CHECKS", checks.CHECKS[:2]))
            done = CliRunner().invoke(app, words)  # here, where children start in a moment
        assert done.exit_code in OUTCOMES.get(verb, {0}), (words, done.output, done.exception)
        return done.stdout
    # ``memory/test_compiled.py`` generates code.
    child = start(tmp_path / "said", *words, **({"TRACED_ONLY": "yes"} if "--compiled" in words else {}))
    if verb in ("ui", "serve"):
        while "http://" not in "".join(path.read_text() for path in (child.out, child.err) if path.exists()):
            assert child.running, child.stderr
            time.sleep(0.1)
        child.send(signal.SIGINT)
    code = child.wait()
    if verb == "data" or "--download" in words:
        assert code == 0 or re.search("put it into|get it with", child.stderr), (words, child.stderr)
    else:
        assert code in OUTCOMES.get(verb, {0}), (words, child.stdout, child.stderr)
    return child.stdout


def in_small(words, small):
    """The command with other settings in place of its own, where both say how large something is."""
    sizes = {setting.partition("=")[0] for setting in small}
    kept = []
    for word in words:
        if word.partition("=")[0] in sizes:
            if kept[-1] == "--set":
                kept.pop()
            continue
        kept.append(word)
    return [*kept, *small]


def small_settings(recipe, page=None):
    """What makes a recipe small; the files of studies and ablations are small already."""
    name = Path(recipe).stem
    if name == "mine" and page is not None and page.stem == "simulator":
        return list(SIMULATED)
    if name in FOR_A_MOMENT:
        return list(FOR_A_MOMENT[name])
    more = next((sets for beginning, sets in SHORTER.items() if name.startswith(beginning)), ())
    return [*settings_of(name), *more]


def install(words, tmp_path, monkeypatch):
    """Extras are known and pinned, and here already; a folder is installed."""
    (what,) = (word for word in words[2:] if not word.startswith("-") and word != "constraints.txt")
    assert what.startswith((".[", "./", "proven-runner[")), words
    assert ("-c" in words) == what.startswith(".[")  # who has the checkout has the pins
    extras = {extra for word in words for found in re.findall(r"\[(.*?)\]", word) for extra in found.split(",")}
    assert extras <= {extra for each in requires("proven-runner") for extra in re.findall(r'extra == "(\w+)"', each)}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for each in map(Requirement, requires("proven-runner")):
        if each.marker and any(each.marker.evaluate({"extra": extra}) for extra in extras):
            assert canonicalize_name(each.name) in {*pinned, "proven-runner"}
    for path in (word for word in words if word.startswith("./")):
        offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(tmp_path / "site")]
        subprocess.run([sys.executable, "-m", "pip", "install", *offline, path], check=True)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
