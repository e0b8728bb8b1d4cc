"""Draws the pictures of the ablations and of the search here again, from what they wrote down.

python experiments/pictures.py
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pydantic import TypeAdapter

from runner.measure.ablation_plots import draw
from runner.measure.analysis import CaseResult, Result
from runner.study import pictures
from runner.study.summary import Summary

HERE = Path(__file__).parent
NOW = {"work": "cost", "steps_per_second": "per_second", "sample": "draw", "inconclusive": "unclear",
       "model.actor_lr": "optimizer.actor.lr", "model.critic_lr": "optimizer.critic.lr"}  # fmt: skip
"""What older results call otherwise."""


def ablation(folder: Path) -> None:
    """Draws an ablation from its ``result.json``."""
    told = json.loads((folder / "result.json").read_text(), object_hook=_renamed)
    variants = told.pop("variants")
    for case in told["cases"]:
        own = [each for each in variants if each["case"] == case["name"]]
        case["variants"] = [{"verdict_summary": None} | each | {"ratio": _ratio(each)} for each in own]
    older = {"unit": "env_steps", "planned_updates": 0}  # which no picture shows
    cases = tuple(TypeAdapter(CaseResult).validate_python(older | case) for case in told["cases"])
    draw(Result(**told | {"cases": cases}), folder)


def search(folder: Path) -> None:
    """Draws what is shown of a search, from its ``summary.json`` and from its file."""
    told = json.loads((folder / "summary.json").read_text())
    space = yaml.safe_load(folder.with_suffix(".yaml").read_text())["space"]
    for row in told["rows"]:
        row["settings"] = {NOW.get(path, path): value for path, value in row["settings"].items()}
        row["recipe"] = None
    own = {"seeds": 1, "logarithmic": [path for path, each in space.items() if each.get("log")], "dashboard": ""}
    del told["schema_version"], told["best"]
    with TemporaryDirectory() as drawn:
        for picture in pictures.draw(TypeAdapter(Summary).validate_python(own | told), Path(drawn)):
            if (folder / picture.name).exists():
                shutil.copy(picture, folder)


def _ratio(variant: dict[str, Any]) -> dict[str, Any]:
    low, high = variant["ci95"]
    return {"value": variant["ratio"], "low": low, "high": high, "rounds": variant["rounds"]}


def _renamed(told: dict[str, Any]) -> dict[str, Any]:
    if told.get("effect") in NOW:
        told["effect"] = NOW[told["effect"]]
    return {NOW.get(name, name): value for name, value in told.items()}


if __name__ == "__main__":
    for path in sorted(HERE.glob("*/result.json")):
        ablation(path.parent)
    search(HERE / "marl_search")
