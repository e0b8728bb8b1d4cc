"""Sends a group of runs to MLflow: its settings, its means and their plots."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.recipe.loader import assignments
from runner.recipe.recipe import Recipe, flatten
from runner.system.interval import Interval
from runner.system.secrets import redact_values
from runner.system.stored_json import json_number
from runner.system.suggestions import shown_path
from runner.system.text_lines import figure
from runner.tracking import RunFolder
from runner.tracking import seeds as seed_groups
from runner.tracking.description import DESCRIPTION, code, describe
from runner.tracking.keys import interval_keys, mlflow_key
from runner.tracking.record import REPEATED, Record
from runner.tracking.spool import Line, Shipper, Spool, lines
from runner.tracking.store import Store, params_of

if TYPE_CHECKING:
    from runner.training.seeds import GroupOutcome, SeedsResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupPublication:
    """The run of a group in MLflow.

    Attributes:
        store: MLflow.
        folder: The folder of the group.
        group: Its record.
        recipes: The recipes by seed.
        resume_command: The command that continues the group.
        varied: Dotted paths of the settings in which the recipes differ.
    """

    store: Store
    folder: RunFolder
    group: Record
    recipes: Mapping[int, Recipe]
    resume_command: str
    varied: Sequence[str]

    def publish(self, outcome: GroupOutcome | None = None) -> None:
        """Writes the group and its results to MLflow; a repetition changes only what is new.

        They are written to the spool of the group first, from which ``runner sync`` sends what
        MLflow does not take now.
        """
        name = self.group.name
        is_stored = False
        # MLflow raises whatever its database and network drivers raise.
        try:
            records = [*self._records(outcome)]
            is_stored = self._is_stored(records)
            shipper = Shipper(self.store, str(self.group.run_id), self.folder.spool)
            if is_stored:
                shipper.ship()
            else:
                # A full disk is no reason to send nothing.
                shipper.deliver(_lines(records))
        except Exception as error:
            reason = str(error).partition("\n")[0]
            if outcome is None:
                _log.warning(
                    "the settings of %s are not in MLflow yet: %s", name, reason
                )
                return
            hint = f"; send them with: runner sync {name}" if is_stored else ""
            _log.warning(
                "the results of %s are missing in MLflow: %s%s", name, reason, hint
            )

    def _is_stored(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Writes records to the spool, and returns whether the disk has taken all of them."""
        try:
            spool = Spool(self.folder.spool)
        except OSError as error:
            _log.warning("%s: %s", self.folder.spool, error.strerror)
            return False
        for record in records:
            spool.append(**record)
        return spool.close()

    def _records(self, outcome: GroupOutcome | None) -> Iterator[dict[str, Any]]:
        """Yields what MLflow gets; the status is the last, so that it follows all results."""
        values = {
            path: value
            for path, value in flatten(self._recipe.values())
            if path not in self.varied
        }
        if self.group.kind in REPEATED:
            values[self.group.kind] = sorted(self.recipes)
        result = None if outcome is None else outcome.result
        yield {"params": params_of(values), "tags": params_of(self._tags(result))}
        if outcome is not None:
            yield from self._results(outcome)
        yield {"status": "RUNNING" if result is None else result.status}

    def _results(self, outcome: GroupOutcome) -> Iterator[dict[str, Any]]:
        """Yields means and files."""
        milliseconds = time.time_ns() // 1_000_000
        # MLflow would store a mean twice that is sent again with another time.
        logged = {
            (line.step, *line.metrics): str(line.metrics)
            for line, _ in lines(self.folder.spool)
        }
        for name, step, mean in outcome.means:
            # MLflow stores no infinite bounds.
            metrics = {
                key: value
                for key, value in keyed_interval(name, mean)
                if not math.isinf(value)
            }
            if logged.get((step, *metrics)) == str(metrics):
                continue
            values = {key: json_number(value) for key, value in metrics.items()}
            yield {"t": milliseconds, "step": step, "metrics": values}
        for path in self._files(outcome):
            yield {"artifact": str(path.relative_to(self.folder.path))}

    @property
    def _recipe(self) -> Recipe:
        return next(iter(self.recipes.values()))

    def _files(self, outcome: GroupOutcome) -> list[Path]:
        """Returns the plots and the predictions of a group."""
        if self.group.kind not in REPEATED:
            return []
        word = self.group.kind.removesuffix("s")
        paths: list[Path] = []
        # Results are sent without their plots if these cannot be written.
        try:
            paths += seed_groups.draw(
                outcome.curves,
                self._recipe.headline,
                self._recipe.length[0],
                self.folder.path,
                self.group.bounds,
                f"one {word}",
                word,
                seed_groups.widening(self.group),
            )
        except OSError as error:
            _log.warning("the curves of %s are not plotted: %s", self.group.name, error)
        if outcome.result.predictions is not None:
            paths.append(Path(outcome.result.predictions))
        return paths

    def _tags(self, result: SeedsResult | None) -> dict[str, Any]:
        """Returns the tags of a group in MLflow, with its description."""
        recipe = self._recipe
        group = self.group
        overrides = [
            assignment
            for assignment in assignments(recipe.overrides)
            if assignment.partition("=")[0] not in self.varied
        ]
        digits = group.name.rpartition("-")[2]
        numbers = ", ".join(map(str, self.recipes))
        facts = {
            "recipe": f"{code(recipe.name)}, from {code(shown_path(recipe.path))}",
            "result": "",
            "seeds": numbers if group.kind == "seeds" else "",
            "folds": str(len(self.recipes)) if group.kind == "folds" else "",
            "grid": code(*self.varied) if group.kind == "grid" else "",
            "overridden": code(*overrides),
            "continue it": code(self.resume_command),
            "compare it": "",
        }
        if group.kind == "seeds":
            facts["compare it"] = code(f"runner compare {digits} OTHER_GROUP")
        if result is not None:
            means = _means_text(result.means, recipe.headline)
            facts["result"] = f"{result.status}; {means}"
            if result.status == "FINISHED":
                facts["continue it"] = ""
        return {
            **group.tags,
            "kind": group.kind,
            "overrides": ", ".join(overrides) or "none",
            "mlflow.source.name": str(recipe.path),
            DESCRIPTION: "\n\n".join(filter(None, (group.note, describe(facts)))),
        }


def _lines(records: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Returns records as the lines of a spool."""
    now = time.time_ns() // 1_000_000
    return [
        Line.model_validate({"t": now, **redact_values(record)}) for record in records
    ]


def keyed_interval(name: str, mean: Interval) -> Iterator[tuple[str, float]]:
    """Yields a mean and the bounds of its interval with their keys."""
    key = mlflow_key(seed_groups.logged_name(name))
    yield from zip((key, *interval_keys(key)), mean, strict=True)


def _means_text(means: Mapping[str, Interval], headline: Sequence[str]) -> str:
    """Returns the means with their intervals, the headline first."""
    names = dict.fromkeys([*(name for name in headline if name in means), *means])
    texts = []
    for name in names:
        mean = means[name]
        bounds = f"[{figure(mean.low)}, {figure(mean.high)}]"
        texts.append(f"{seed_groups.logged_name(name)} {figure(mean.mean)} {bounds}")
    return ", ".join(texts)
