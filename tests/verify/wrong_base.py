"""What stages that are wrong on purpose have in common: how one is registered, and how it takes hold of slots.

Every file ``wrong_*.py`` beside this one is a plugin file. A stage says in its docstring what is wrong with it, and
when it is registered which hole it goes for, on which recipe, and what it falsely promises.
"""

import inspect
import re
import sys
from functools import cache
from typing import Any, Literal, NamedTuple

from runner.api import Close, Exact, Stage, StageConfig

HOLES = {
    0: "the update itself",
    1: "changes of the process, which affect the baseline too",
    2: "torch's settings, changed in silence",
    3: "caches by identity or address",
    4: "acting, predicting, evaluating and collecting, with a correct update",
    5: "what surrounds the update: batches, noise, feedback, counts",
    6: "regions that the first updates never reach",
    7: "now and then, or in some states",
    8: "state under other names",
    9: "late and rare",
    10: "what is returned, and overwritten",
    11: "never called",
}
"""The ways in which a wrong stage may stay unseen, by number."""

MARL = (
    "data.followers=1",
    "data.envs=64",
    "model.hidden=[8]",
    "model.gamma=0.95",
    "model.tau=0.01",
    "optimizer.critic.lr=0.003",
    "optimizer.temperature.lr=0.0003",
    "data.replay={kind: prioritized, capacity: 4000}",
    "data.normalize_rewards=false",
    "data.training_limit=null",
    "data.repeat_failures=0.0",
    "model.initial_temperature=1.0",
    "lr_scheduler={kind: constant}",
    "train.env_steps=20000",
    "data.warmup=1920",
    "data.updates_per_step=0.05",
    "train.batch_size=64",
    "data.evaluation.episodes=5",
)
DIGITS = ("model.widths=[8]", "train={epochs: 36, batch_size: 64}")
GPT = (
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "data.context=16",
    "data.held_out=0.005",
    "train.batch_size=4",
)
SETTINGS = {"marl_baseline": MARL, "digits_classifier": DIGITS, "shakespeare_gpt": GPT}
"""What makes a recipe small, and leaves its training long: the first updates are not the last ones, too."""

_CONTRACTS = {"exact": Exact, "close": Close}


class Case(NamedTuple):
    """A stage that is wrong, and where to try it."""

    kind: str
    hole: int
    recipe: str
    sets: tuple[str, ...]
    promise: str
    about: str


CASES: dict[str, Case] = {}
"""Those of all files that were loaded, by kind; what is called honest is none."""


def stage(
    kind: str,
    promise: Any = None,
    *,
    hole: int = 0,
    recipe: str = "marl_baseline",
    sets: tuple[str, ...] = (),
    **face: Any,
):
    """Registers a stage's works under a kind, with settings that promise the same bits unless told.

    More attributes of its settings, such as ``requires``, are given by name; the recipe may say ``promise``, too.
    """
    said = type(promise or Exact()).__name__.lower()

    def register(works):
        namespace = {
            "__module__": works.__module__,
            "__doc__": works.__doc__,
            "__annotations__": {"promise": Literal["exact", "close"]},
            "kind": kind,
            "phase": 1,
            "promise": said,
            "wraps": _held(works),
            "contract": lambda self, setting: _CONTRACTS[self.promise](),
            "implementation": lambda self: works,
            **face,
        }
        # There are no docstrings of attributes, and to look for them takes long.
        own = type(StageConfig)(f"{works.__name__}Config", (StageConfig,), namespace, use_attribute_docstrings=False)
        setattr(sys.modules[works.__module__], own.__name__, own)
        if not kind.startswith("honest"):
            CASES[kind] = Case(kind, hole, recipe, sets, said, " ".join(works.__doc__.split()))
        return works

    return register


@cache
def _source(cls):
    return inspect.getsource(cls)


def _held(works):
    """The slots that a stage takes hold of by name, as its code says."""
    written = "".join(_source(each) for each in works.__mro__[:-3] if each is not Wrong)
    counted = {"update"} if "self.count()" in written else set()
    return frozenset(re.findall(r'(?:wrap|replace)\(\s*"(\w+)"', written)) - {"collect"} | counted  # which a source has


class Wrong(Stage):
    """Takes hold of slots."""

    def attach(self, pipeline):
        self.pipeline, self.slots = pipeline, pipeline.slots
        self.learner, self.source = pipeline.learner, pipeline.source
        self.updates = 0
        """Whole updates so far, where they are counted."""
        self.take_hold()

    def wrap(self, name, changed):
        """Replaces a slot by ``changed(step, *args)``."""
        self.slots.wrap(name, lambda step: lambda *args: changed(step, *args))

    def wrap_method(self, owner, name, changed):
        """The same with a method of one object, which is no slot."""
        own = getattr(owner, name)
        setattr(owner, name, lambda *args: changed(own, *args))

    def count(self):
        """Counts updates from now on."""
        self.wrap("update", self._counted)

    def _counted(self, step, *args):
        output = step(*args)
        self.updates += 1
        return output
