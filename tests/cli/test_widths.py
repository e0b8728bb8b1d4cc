"""Every verb on a terminal of 80 and of 120 columns: no word is torn, and no line is longer than the screen."""

import io
import os
import re
import sys
from pathlib import Path

import pytest
import typer
from run_folders import run_folder, seed_group
from running import tiny

from runner.cli import app, main
from runner.plugin.registry import SECTIONS, Registry
from runner.recipe.lock import write_lock
from runner.system.contention import SINCE_START, Contention
from runner.tracking import Workspace
from runner.tracking.tracker import Tracker

WHOLE = 400
"""Columns in which nothing need be wrapped."""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FRAME = re.compile(r"[│╭╮╰╯─━╸╺]+")
ROOM = 30
"""Columns of a label, beside which a path or an address may be longer than the screen."""


def verbs(command, *above):
    """All of them, those below another too, as words."""
    for name, each in getattr(command, "commands", {}).items():
        yield (*above, name)
        yield from verbs(each, *above, name)


COMMAND = typer.main.get_command(app)
VERBS = list(verbs(COMMAND))
KINDS = [kind for section in SECTIONS for kind in Registry().kinds(section)]
NOTHING = [("show", "nothing"), ("resume", "nothing"), ("evaluate", "nothing"), ("rm", "nothing"), ("sync", "nothing"),
           ("compare", "nothing", "latest"), ("plugins", "nothing"), ("run", "nothing"), ("validate", "nothing"),
           ("data", "get", "nothing"), ("ls", "--kind", "nothing"), ("ls", "--since", "nothing"),
           ("verify", "marl_phase1", "train.batchsize=3"), ("profile", "nothing"), ("ablate", "nothing"),
           ("ablate", "nothing", "--metric", "memory"), ("profile", "nothing", "--memory"),
           ("study", "plan", "nothing"), ("study", "run", "nothing"), ("submit", "nothing")]  # fmt: skip
COMMANDS = [
    *(("--help",), *((*verb, "--help") for verb in VERBS)),
    *(("plugins",), *(("plugins", kind) for kind in KINDS)),
    *(("recipes",), ("data", "list"), ("doctor",), ("ls",), ("ls", "--kind", "seeds")),
    *(("show", name) for name in ("RUN", "OTHER", "GROUP", "marl_phase2")),
    *(("show", "marl_phase2", "--origin"), ("show", "RUN_DIR/recipe.lock.yaml", "--origin")),
    *(("validate", "marl_phase2", "digits_classifier"), ("validate", "marl_phase2", "train.batchsize=3", "seed=x")),
    ("plan", "digits_classifier"),
    *(("compare", "RUN", "OTHER"), ("compare", "RUN", "OTHER", "--all"), ("compare", "GROUP", "LATER_GROUP")),
    *NOTHING,
]


class Terminal(io.StringIO):
    """What a person sees."""

    def isatty(self):
        return True


def tracked(name, *sets):
    """The folder of a run that MLflow knows, and that ended before its first step."""
    recipe, registry = tiny(name, *sets), Registry()
    tags = {"stages": ",".join(recipe.stages), "stages.inactive.async_transfer": "nothing to do on a CPU"}
    tracker = Tracker.open(Workspace(), recipe, tags, {"reason": "to see"}, "what it is about " * 8)
    tracker.artifact(write_lock(recipe, tracker.run_dir, registry))
    tracker.log({f"eval/{metric}": len(name) / 7 for metric in recipe.headline}, 1)
    tracker.close("FINISHED", "", 30.0)
    return tracker.run_dir


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, migrated_database):
    """One with runs and groups of them, and what stands for their names in the commands."""
    root = tmp_path_factory.mktemp("wide") / ".runner"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNNER_WORKSPACE", str(root))
        root.mkdir()
        Path(root, "mlflow.db").write_bytes(migrated_database.read_bytes())
        run, other = tracked("marl_phase2"), tracked("marl_phase1", "optimizer.actor.lr=0.0001234")
        (group, _), (later, _) = seed_group(10, 14), seed_group(11, 17, began=9.0, status="KILLED", step=1)
        run_folder("a_recipe_with_a_name_that_is_very_long_indeed", status="FAILED", reason="out of luck " * 20)
        names = {"RUN": run.name, "OTHER": other.name, "GROUP": group.name, "LATER_GROUP": later.name}
        yield Workspace(), names | {"RUN_DIR": str(run)}


@pytest.fixture
def seen(workspace, monkeypatch):
    """What a command shows on a terminal of so many columns."""
    here, names = workspace
    monkeypatch.setenv("RUNNER_WORKSPACE", str(here.root))
    monkeypatch.setenv("PYTHONSAFEPATH", os.environ.get("PYTHONSAFEPATH", ""))
    monkeypatch.setenv("TERM", "xterm")
    # Otherwise doctor tells of another load at every width.
    monkeypatch.setattr(SINCE_START, "read", lambda: Contention(waited=0.5, other_cores=2.0))

    def shown(words, columns):
        screen = Terminal()
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(columns))
            patch.setattr("runner.cli.app", COMMAND)  # made once
            patch.setattr(sys, "argv", ["runner", *(re.sub(r"[A-Z_]+", lambda word: names[word[0]], each)
                                                    if each[0].isupper() else each for each in words)])  # fmt: skip
            patch.setattr(sys, "stdout", screen)
            patch.setattr(sys, "stderr", screen)
            with pytest.raises(SystemExit):
                main()
        return FRAME.sub(" ", ESCAPE.sub("", screen.getvalue()))

    return shown


def words_of(text):
    """Those with a letter: numbers may be others the next time."""
    return {word.strip(":,") for word in text.split() if re.search(r"[a-zA-Z]", word)}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_word_is_torn_and_no_line_is_longer_than_the_screen(seen, workspace, words):
    shown = words_of(seen(words, WHOLE))
    assert shown
    whole = shown | set(workspace[1].values())  # which stand on two lines at the head of a table
    for columns in (80, 120):
        text = seen(words, columns)
        assert words_of(text) - whole == set()
        assert "…" not in text
        longer = [line for line in text.splitlines() if len(line.rstrip()) > columns]
        assert [line for line in longer if max(map(len, line.split())) < columns - ROOM] == []


def test_every_verb_is_among_them_unless_its_own_tests_look_at_its_tables():
    own = {"run", "resume", "evaluate", "rm", "sync", "verify", "ablate", "profile", "schema", "ui", "study", "data"}
    own |= {"models", "serve", "init", "submit"}
    assert {verb[0] for verb in VERBS} - {words[0] for words in COMMANDS if "--help" not in words} <= own
