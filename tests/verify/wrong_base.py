"""What stages that are wrong on purpose have in common: how one is registered, and how it takes hold of slots.

Every file ``wrong_*.py`` beside this one is a plugin file. A stage says in its docstring what is wrong with it, and
when it is registered which hole it goes for, on which recipe, and what it falsely promises.
"""

import inspect
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runner.api import Close, Exact, Stage, StageConfig, Statistical

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
    12: "samples of different sizes: masks, padding, sums",
    13: "decoding and sampling with a trained model",
    14: "simulators and what remembers them",
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
SPREAD = (
    "model.hidden=[8]",
    "data.envs=2",
    "data.warmup=64",
    "data.replay={kind: uniform, capacity: 300}",
    "data.updates_per_step=0.5",
    "train.env_steps=4000",
    "train.batch_size=16",
    "data.evaluation.episodes=1",
)
MLP = ("model.widths=[16]", "data.scale=1", "train={epochs: 36, batch_size: 64}")
CONV = ("model.width=8", "data.scale=1", "train={updates: 400, batch_size: 64}")
FOLDER = (
    "model.widths=[8]",
    "data={kind: image_folder, folder: IMAGES, side: 8, grey: true}",
    "train={epochs: 12, batch_size: 16}",
)
MAMBA = (
    "model.layers=1",
    "model.width=16",
    "model.head_width=8",
    "model.state=4",
    "data.context=16",
    "data.held_out=0.005",
    "train.batch_size=4",
    "optimization.chunked_scan={chunk: 8}",
)
SYNTHETIC = ("data.synthetic=true",)
GCN = (*SYNTHETIC, "model.width=8")
SMALL_TRANSFORMER = ("model.layers=1", "model.width=16", "model.heads=2")
PGT = (
    *SYNTHETIC,
    *SMALL_TRANSFORMER,
    "data.context=16",
    "data.steps=1",
    "data.components=8",
    "train.batch_size=16",
)
# Synthetic molecules are all padded to one size, so no mistake of sizes would be one.
MOLECULES = (*SMALL_TRANSFORMER, "data.file=freesolv.csv", "train.batch_size=16")
GRASPS = (
    *SYNTHETIC,
    *SMALL_TRANSFORMER,
    "model.centres=8",
    "model.neighbours=4",
    "data.points=32",
    "data.grasps=4",
    "data.scenes=8",
    "train={updates: 400, batch_size: 4, ema: 0.995}",
)
VIEWS = (
    *SYNTHETIC,
    "model.width=8",
    "model.layers=2",
    "model.latent=4",
    "model.samples=4",
    "model.patch=8",
    "data.held_out=24",
)
SETTINGS = {
    "marl_baseline": MARL,
    "marl_spread": SPREAD,
    "digits_classifier": DIGITS,
    "conv_classifier": CONV,
    "mlp": MLP,
    "image_folder": FOLDER,
    "shakespeare_gpt": GPT,
    "mamba2_shakespeare": MAMBA,
    "gcn_cora": GCN,
    "emma_cora": GCN,
    "pgt_cora": PGT,
    "gps_esol": MOLECULES,
    "graphgpt_esol": MOLECULES,
    "grasp_diffusion": (*GRASPS, "model.steps=10", "model.sampling_steps=5"),
    "grasp_cvae": GRASPS,
    "graf": VIEWS,
}
"""What makes a recipe small, and leaves its training long: the first updates are not the last ones, too."""
FAMILIES = {
    "UAV simulator": ("marl_baseline",),
    "PettingZoo": ("marl_spread",),
    "images": ("digits_classifier", "conv_classifier", "mlp"),
    "folders of images": ("image_folder",),
    "text, transformer": ("shakespeare_gpt",),
    "text, Mamba-2": ("mamba2_shakespeare",),
    "one graph": ("gcn_cora", "emma_cora", "pgt_cora"),
    "molecules": ("gps_esol", "graphgpt_esol"),
    "grasps": ("grasp_diffusion", "grasp_cvae"),
    "posed views": ("graf",),
}
"""Recipes by what they train on."""
IMAGES_PER_CLASS = 70

_CONTRACTS = {"exact": Exact, "close": Close, "statistical": Statistical}


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


def family_of(recipe: str) -> str:
    """Returns the family of a recipe."""
    return next(family for family, recipes in FAMILIES.items() if recipe in recipes)


def shipped_recipe(recipe: str) -> str:
    """Returns the shipped recipe on which a key of ``SETTINGS`` is based."""
    return "digits_classifier" if recipe == "image_folder" else recipe


def settings_of(recipe: str) -> list[str]:
    """Returns the settings of a recipe; a folder of images is generated if they need one."""
    settings = []
    for setting in SETTINGS[recipe]:
        if "IMAGES" in setting:
            setting = setting.replace("IMAGES", str(image_folder()))
        settings.append(setting)
    return settings


@cache
def image_folder() -> Path:
    """Writes a folder of images of three classes whose files have the same names."""
    import numpy as np
    from PIL import Image

    folder = Path(tempfile.gettempdir()) / "runner_wrong_images"
    generator = np.random.default_rng(0)
    for brightness, name in enumerate(("dark", "medium", "bright")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(IMAGES_PER_CLASS):
            levels = generator.integers(0, 120, (16, 16)) + 60 * brightness
            Image.fromarray(levels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


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
            "__annotations__": {"promise": Literal["exact", "close", "statistical"]},
            "kind": kind,
            "phase": 1,
            "promise": said,
            "wraps": _held(works),
            "contract": lambda self, setting: _CONTRACTS[self.promise](),
            "implementation": works,
            **face,
        }
        # There are no docstrings of attributes, and to look for them takes long.
        own = type(StageConfig)(f"{works.__name__}Config", (StageConfig,), namespace)
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

        def wrapper(step):
            return lambda *args, **kwargs: changed(step, *args, **kwargs)

        self.slots.wrap(name, wrapper)

    def wrap_method(self, owner, name, changed):
        """The same with a method of one object, which is no slot."""
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: changed(method, *args, **kwargs))

    def count(self):
        """Counts updates from now on."""
        self.wrap("update", self._counted)

    def _counted(self, step, *args):
        output = step(*args)
        self.updates += 1
        return output
