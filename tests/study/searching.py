"""Studies small enough for a test: every trial trains in a second."""

import json
import textwrap
from pathlib import Path

import optuna
from children import start
from running import TINY_UAV

from runner.study.attempts import ATTEMPTS
from runner.study.store import StudyStore
from runner.study.summary import CAUSE, REASON
from runner.tracking import Workspace

SETS = [*TINY_UAV, "train.env_steps=96", "train.evaluate_every=32", "data.evaluation.episodes=2"]
PLANT = '''
import os, signal, time
from typing import ClassVar
from runner.api import Exact, Stage, StageConfig

class PlantConfig(StageConfig):
    """Goes wrong on purpose.

    When it helps: never.
    When it hurts: always.
    """
    kind: ClassVar[str] = "plant"
    implementation = "Plant"
    phase: ClassVar[int] = 3
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})

    how: str = "none"
    """What goes wrong."""
    marker: str = ""
    """A file that says that it has gone wrong once."""

    def contract(self, setting):
        return Exact()

class Plant(Stage):
    def attach(self, pipeline):
        self.count = 0
        self.hoard = []
        how, marker = self.config.how, self.config.marker

        def around(inner):
            def update(batch, noise, progress):
                output = inner(batch, noise, progress)
                self.count += 1
                if self.count != 3 or (marker and os.path.exists(marker)):
                    return output
                if marker:
                    open(marker, "w").close()
                if how == "memory":
                    while True:
                        self.hoard.append(bytearray(os.urandom(1)) * 2**26)
                        time.sleep(0.02)
                if how == "hang":
                    time.sleep(3600)
                if how == "nan":
                    return {name: value * float("nan") for name, value in output.items()}
                if how == "segfault":
                    os.kill(os.getpid(), signal.SIGSEGV)
                if how == "exit":
                    os._exit(0)
                if how == "error":
                    raise ValueError("planted")
                return output

            return update

        pipeline.slots.wrap("update", around)
'''


def write_study(folder, name="tiny", **settings):
    """A study's file; ``settings`` replace those of a small one."""
    whole = {
        "kind": "study",
        "name": name,
        "recipe": "marl_phase1",
        "set": SETS,
        "space": {
            "optimizer.actor.lr": {"float": [1e-4, 1e-2], "log": True},
            "optimization.forward_cache": {"choice": ["off", "on"]},
            "optimization.merged_critic_loss": {"choice": ["off", "on"]},
        },
        "objectives": {"eval/return": "maximize"},
        "sampler": {"startup": 2},
        "budget": {"trials": 3},
        **settings,
    }
    path = Path(folder) / f"{name}.yaml"
    path.write_text(json.dumps(whole))
    return path


def write_plugin(folder):
    path = Path(folder) / "plant.py"
    path.write_text(textwrap.dedent(PLANT))
    return path


def search(folder, path, *arguments, **variables):
    """Starts ``runner study run``."""
    return start(Path(folder), "study", "run", str(path), *arguments, **variables)


def trials_of(name="tiny", root=None):
    """The trials of a study, from the storage of a workspace."""
    store = StudyStore.open(Workspace(root))
    trials = optuna.load_study(study_name=name, storage=store).trials
    store.engine.dispose()
    return trials


def came_to(trials):
    """What must not depend on interruptions."""
    return [
        (each.number, each.state.name, each.params, each.values, each.intermediate_values, each.user_attrs.get(CAUSE))
        for each in trials
    ]


__all__ = ["ATTEMPTS", "CAUSE", "REASON", "SETS", "came_to", "search", "trials_of", "write_plugin", "write_study"]
