"""One check of the gate on one stage."""

from dataclasses import replace
from pathlib import Path

import wrong_base
from running import RECIPES

from runner.recipe.loader import load
from runner.verify.gate import Gate
from runner.verify.options import Options

HERE = Path(__file__).parent
SYNTHETIC = {"shakespeare_gpt": ("data.synthetic=true",)}
"""Texts of which no test may depend on a download."""
LONG = Options(updates=3, horizon=20, horizon_seconds=60.0, budget=0.0, names_operators=False)

SHORT = replace(LONG, horizon=0)


def recipe_of(kind, registry, promise=None):
    """Returns the recipe for which a wrong stage is made, with that stage."""
    case = wrong_base.CASES[kind]
    sets = [
        *wrong_base.settings_of(case.recipe),
        *case.sets,
        *SYNTHETIC.get(case.recipe, ()),
        "device=cpu",
        f"optimization.{kind}.promise={promise or case.promise}",
    ]
    return load(RECIPES / f"{wrong_base.shipped_recipe(case.recipe)}.yaml", sets, registry)


def pair_of(recipe, kind, registry, options=LONG):
    """Returns a pair with this stage, and the gate's budget."""
    gate = Gate(recipe, registry, replace(options, stages=(kind,)), lambda _: None)
    return gate.pair((kind,)), gate.coverage


def judge(check, kind, registry, promise=None, options=LONG):
    """Returns the verdict of a check on a wrong stage."""
    return check.run(*pair_of(recipe_of(kind, registry, promise), kind, registry, options))
