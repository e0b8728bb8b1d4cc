"""Rules for changed settings of a resumed run: they are applied or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runner.plugin.optimizer import kinds, settings_of
from runner.plugin.progress import UNITS
from runner.plugin.registry import Registry, Section
from runner.recipe.dumping import is_same
from runner.recipe.recipe import (
    Recipe,
    SystemConfig,
    TrackingConfig,
    TrainConfig,
    flatten,
)
from runner.system.errors import UsageError

REMEDY = "start a new run, with model.init_from to start with the weights of this one"
"""The fix for a setting that cannot change."""


@dataclass(frozen=True)
class Rule:
    """The treatment of a changed setting in a resumed run.

    Attributes:
        action: Whether the value is applied from then on, or the run is refused.
        reason: Why, or how far, in one clause.
    """

    action: Literal["applied", "refused"]
    reason: str


@dataclass(frozen=True)
class Change:
    """A changed setting of a resumed run; ``None`` means that it has no value."""

    path: str
    before: Any
    after: Any


_REFUSED = {
    "name": "it names the run's folder",
    "seed": "it determines the samples and random numbers of the run",
    "model.kind": "the checkpoint is of another model",
    "model.init_from": "the weights were read when the run started",
    "data.kind": "a position in the data is not valid in other data",
    "train.batch_size": "the place in the data is counted in batches",
    "train.overfit_batches": "the training continues with the batches that it began with",
    "train.smoke": "it shortens the training and its data",
    "data.folds": "the place in the data is counted in its samples",
    "data.sampling": "the place in the data is counted in its draws",
    "data.limit": "the place in the data is counted in its samples",
    "data.test": "later evaluations would select by other samples",
    "system.threads": "a resumed run keeps its number of threads",
    "tracking.experiment": "the run is in that experiment of MLflow",
}
_APPLIED = {
    "device": "a checkpoint of another type of device is refused",
    "train.ema": "from the next update; it cannot be switched on or off",
    "train.evaluate_every": "from the next evaluation",
    "train.checkpoint_every": "from the next checkpoint",
    "train.keep": "from the next checkpoint",
    "train.log_every": "from the next report",
    "train.preemptible": "",
    "train.stall_s": "",
    "train.memory_budget": "the plan is compared with it before the next update",
    "train.sentinel": "no result depends on it",
    "train.on_nonfinite": "from the next update",
    "train.stop": "from the next evaluation or update",
    "system.wait": "",
    "system.deterministic": "other kernels may change the last digits",
    "tracking.system_metrics": "",
    "tracking.render_every": "from the next evaluation",
    "tracking.sinks": "a sink gets the run from its beginning",
    "tracking.second_copy": "all checkpoints are copied there again",
}
_SECTIONS = {
    "model": "the model is built with it; a checkpoint that does not fit is refused",
    "data": "the source is built with it, and data that differ are a drift",
    "lr_scheduler": "at the share of the training that is over",
    "optimization": "the stage is built with it",
    "inference": "when the model is used",
    "callbacks": "the callback is made with it",
    "serve": "when the model is served",
}
_STATE_SHAPING = frozenset({"amsgrad", "centered", "initial_accumulator_value"})
"""Settings that decide what an optimizer keeps of the updates before."""


def rule_of(path: str, fixed: frozenset[str] = frozenset()) -> Rule:
    """Returns the treatment of a changed setting in a resumed run.

    Args:
        path: Dotted path in the recipe.
        fixed: Dotted paths of settings of plugins that matter only at the start of a training.
    """
    # A setting may be a mapping, such as train.memory_budget.
    setting = ".".join(path.split(".")[:2])
    if setting in _REFUSED:
        return Rule("refused", _REFUSED[setting])
    if setting in _APPLIED:
        return Rule("applied", _APPLIED[setting])
    section, _, name = path.partition(".")
    if any(
        path == fixed_path or path.startswith(f"{fixed_path}.") for fixed_path in fixed
    ):
        return Rule("refused", "it decides how a training starts")
    if section == "train" and name in UNITS:
        return Rule("applied", "as the new length; another unit is refused")
    if section == "optimizer":
        # The name may follow a role.
        return _rule_of_optimizer(name.rpartition(".")[2])
    return Rule("applied", _SECTIONS[section])


def _rule_of_optimizer(name: str) -> Rule:
    if name == "kind":
        return Rule("refused", "the state of one optimizer is not valid for another")
    if name in _STATE_SHAPING:
        return Rule("refused", "it decides what the optimizer keeps of each update")
    if name == "spare":
        return Rule("refused", "the parameter groups follow from it")
    if name == "weight_decay":
        return Rule(
            "applied",
            "from the next update; where spare is not empty, not from or to 0",
        )
    if name == "momentum":
        return Rule("applied", "from the next update; of RMSprop, not from or to 0")
    if name == "groups":
        return Rule(
            "applied",
            "from the next update; patterns, spare and what an optimizer keeps are refused",
        )
    if name == "layer_decay":
        return Rule("applied", "from the next update; not from or to null")
    return Rule("applied", "from the next update")


def fixed_settings(recipe: Recipe) -> frozenset[str]:
    """Returns the dotted paths of plugin settings that matter only at the start of a training."""
    paths: set[str] = set()
    paths |= {f"model.{name}" for name in recipe.model.fixed}
    paths |= {f"data.{name}" for name in recipe.data.fixed}
    paths |= {f"lr_scheduler.{name}" for name in recipe.lr_scheduler.fixed}
    for kind, callback in recipe.callbacks.items():
        paths |= {f"callbacks.{kind}.{name}" for name in callback.fixed}
    for kind, stage in recipe.stages.items():
        prefix = f"optimization.{kind}"
        paths |= {f"{prefix}.{name}" for name in stage.fixed}
        # A stage that prepares has done so when a training is resumed.
        if stage.prepares:
            paths.add(prefix)
    return frozenset(paths)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Returns the settings that differ between two recipes, as ``Recipe.values`` returns them."""
    old_values = _nonempty_values(before)
    new_values = _nonempty_values(after)
    differences = []
    for path in sorted(old_values.keys() | new_values.keys()):
        old = old_values.get(path)
        new = new_values.get(path)
        # A stage that is not named is off.
        is_off = (
            path.startswith("optimization.")
            and old in (None, "off")
            and new in (None, "off")
        )
        if not is_off and not is_same(old, new):
            differences.append(Change(path, old, new))
    return differences


def _nonempty_values(values: Mapping[str, Any]) -> dict[str, Any]:
    sections = {key: value for key, value in values.items() if value}
    return dict(flatten(sections))


def refuse_fixed(before: Mapping[str, Any], recipe: Recipe) -> list[Change]:
    """Returns the changes since a run was started.

    Args:
        before: The recipe of its lock.
        recipe: What it would be resumed with.

    Raises:
        UsageError: a setting has changed that cannot.
    """
    changes_since_start = changes(before, recipe.values())
    fixed = fixed_settings(recipe)
    # Another kind brings other settings with it, which are not the reason.
    for change in sorted(
        changes_since_start, key=lambda change: not change.path.endswith("kind")
    ):
        reason = _refusal(change, recipe, fixed)
        if reason:
            values = f"{_text(change.before)} cannot become {_text(change.after)} in a resumed run"
            raise UsageError(f"{change.path}: {values}: {reason}; {REMEDY}")
    return changes_since_start


def _refusal(change: Change, recipe: Recipe, fixed: frozenset[str]) -> str:
    section, _, name = change.path.partition(".")
    rule = rule_of(change.path, fixed)
    if rule.action == "refused":
        return rule.reason
    is_switched = None in (change.before, change.after)
    if section == "train" and name in UNITS and is_switched:
        return "a training is counted in one unit from its beginning to its end"
    if change.path == "train.ema" and is_switched:
        return "the checkpoint has the averages or it does not"
    if section == "optimizer":
        return _refusal_of_groups(change) or _refusal_of_zero(change, recipe)
    return ""


def _refusal_of_groups(change: Change) -> str:
    """Returns why the parameter groups of an optimizer cannot be divided differently."""
    name = change.path.rpartition(".")[2]
    is_other = name == "layer_decay" and None in (change.before, change.after)
    if name == "groups":
        is_other = _structure(change.before) != _structure(change.after)
    return "the parameter groups follow from it" if is_other else ""


def _structure(groups: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, Any]]:
    """Returns the patterns of groups, with the settings on which an optimizer's state depends."""
    structure: list[tuple[str, Any]] = []
    for group in groups or ():
        for pattern, settings in group.items():
            fixed = {}
            for name, value in settings.items():
                if name in _STATE_SHAPING or name == "spare":
                    fixed[name] = value
                elif name in ("weight_decay", "momentum"):
                    fixed[name] = bool(value)
            structure.append((pattern, fixed))
    return structure


def _refusal_of_zero(change: Change, recipe: Recipe) -> str:
    """Returns why a setting of an optimizer cannot be switched on or off."""
    name = change.path.rpartition(".")[2]
    if bool(change.before) == bool(change.after):
        return ""
    roles = recipe.optimizer
    role = change.path.split(".")[1] if len(roles) > 1 else next(iter(roles))
    if name == "weight_decay" and roles[role].spare:
        return "the parameter groups follow from it"
    if name == "momentum" and roles[role].kind == "rmsprop":
        return "it decides what the optimizer keeps of each update"
    return ""


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def rows(registry: Registry) -> Iterator[tuple[str, Rule]]:
    """Yields the dotted path of every setting that a recipe can have, with its rule.

    If the settings of a section depend on its ``kind``, the path contains the kind after the
    section: ``model[gpt].width``.
    """
    for name in ("name", "seed", "device"):
        yield name, rule_of(name)
    for name in TrainConfig.model_fields:
        yield f"train.{name}", rule_of(f"train.{name}")
    yield "optimizer.kind", rule_of("optimizer.kind")
    for name in sorted(
        {name for kind in kinds() for name in settings_of(kind).model_fields}
    ):
        yield f"optimizer.{name}", rule_of(f"optimizer.{name}")
    for name in SystemConfig.model_fields:
        yield f"system.{name}", rule_of(f"system.{name}")
    for name in TrackingConfig.model_fields:
        yield f"tracking.{name}", rule_of(f"tracking.{name}")
    sections: tuple[Section, ...] = ("lr_scheduler", "model", "data")
    for section in sections:
        yield f"{section}.kind", rule_of(f"{section}.kind")
        yield from _plugin_rows(registry, section)
    yield from _plugin_rows(registry, "optimization")
    for path in ("inference.*", "callbacks.*", "serve.*"):
        yield path, rule_of(path)


def _plugin_rows(registry: Registry, section: Section) -> Iterator[tuple[str, Rule]]:
    is_stage = section == "optimization"
    for kind in registry.kinds(section):
        config = registry.get(section, kind)
        prefix = f"{section}.{kind}" if is_stage else section
        fixed = {f"{prefix}.{name}" for name in config.fixed}
        if is_stage:
            if config.prepares:
                fixed.add(prefix)
            yield prefix, rule_of(prefix, frozenset(fixed))
        # Settings of a learner or a source depend on its kind, which their path in a recipe does
        # not contain.
        label = prefix if is_stage else f"{section}[{kind}]"
        for name in config.model_fields:
            yield f"{label}.{name}", rule_of(f"{prefix}.{name}", frozenset(fixed))


def table(registry: Registry) -> str:
    """Returns the rules of all settings as a Markdown table; settings of one section and rule share
    a row.
    """
    grouped: dict[tuple[str, Rule], list[str]] = {}
    for path, rule in rows(registry):
        prefix, _, name = path.rpartition(".")
        if prefix.startswith("optimization."):
            prefix = "optimization"
            name = path.partition(".")[2]
        grouped.setdefault((prefix, rule), []).append(name)
    lines = ["| section | settings | another value is | |", "|---|---|---|---|"]
    for (prefix, rule), names in grouped.items():
        lines.append(
            f"| `{prefix or 'recipe'}` | {', '.join(names)} | {rule.action} | {rule.reason} |"
        )
    return "\n".join(lines) + "\n"
