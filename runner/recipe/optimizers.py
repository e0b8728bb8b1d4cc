"""The sections ``optimizer`` and ``lr_scheduler``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from runner.plugin.learner import LearnerConfig
from runner.plugin.lr_scheduler import ConstantConfig, LrSchedulerConfig
from runner.plugin.optimizer import HOW_TO_COMPUTE, SPARED, OptimizerSettings, is_number, kinds, signature
from runner.recipe.document import Node, Problem
from runner.recipe.fill import display, fill
from runner.system.names import suggestion

SCHEDULES = {model.model_fields["kind"].default: model for model in get_args(get_args(LrSchedulerConfig)[0])}
"""By kind."""
_OWN = ("kind", "max_grad_norm", "spare")


def optimizers(root: Node, model: LearnerConfig | None, problems: list[Problem]) -> dict[str, OptimizerSettings]:
    """The optimizer of every role, from one section for all of them or one for each.

    Args:
        root: the recipe.
        model: its learner, whose roles they are; None if it is not valid.
        problems: what is wrong is added to them.
    """
    if model is None:
        return {}
    section = root.get("optimizer") or Node({}, root.place)
    if not isinstance(section.value, dict):
        message = f"should be a mapping, got {display(section.value)}"
        problems.append(Problem(section.place, "optimizer", message))
        return {}
    by_role = {key: node for key, node in section.value.items() if key in model.roles}
    mixed = [key for key in section.value if key not in model.roles]
    if by_role and mixed:
        roles = ", ".join(f"optimizer.{role}.{mixed[0]}" for role in model.roles)
        place = section.value[mixed[0]].anchor
        problems.append(Problem(place, f"optimizer.{mixed[0]}", f"roles are given one by one here: say {roles}"))
        return {}
    found = {}
    for role, default in model.roles.items():
        node = by_role.get(role, Node({}, root.place)) if by_role else section
        path = f"optimizer.{role}" if by_role else "optimizer"
        wrong = list(_problems(node, default, path))
        problems += [problem for problem in wrong if problem not in problems]
        if not wrong:
            found[role] = _settings(node, default)
    return found


def lr_scheduler(root: Node, problems: list[Problem]) -> Any:
    """How learning rates move; constant if the recipe does not say."""
    node = root.get("lr_scheduler")
    if node is None:
        return ConstantConfig()
    if not isinstance(node.value, dict) or "kind" not in node.value:
        one_of = ", ".join(SCHEDULES)
        problems.append(Problem(node.anchor, "lr_scheduler", f"should be a mapping with a kind: one of {one_of}"))
        return None
    kind = node.value["kind"]
    if kind.value not in SCHEDULES:
        message = f"unknown kind {display(kind.value)}{suggestion(str(kind.value), SCHEDULES)}"
        problems.append(Problem(kind.place, "lr_scheduler.kind", message))
        return None
    return fill(SCHEDULES[str(kind.value)], node, "lr_scheduler", problems)


def _kind(node: Node, default: Mapping[str, Any]) -> Any:
    given = node.get("kind")
    return default.get("kind", "adamw") if given is None else given.value


def _problems(node: Node, default: Mapping[str, Any], path: str) -> Iterator[Problem]:
    if not isinstance(node.value, dict):
        yield Problem(node.place, path, f"should be a mapping, got {display(node.value)}")
        return
    kind = _kind(node, default)
    if kind not in kinds():
        message = f"unknown optimizer {display(kind)}{suggestion(str(kind), kinds())}"
        yield Problem(node.value["kind"].place, f"{path}.kind", message)
        return
    known = signature(kind)
    for key, child in node.value.items():
        if key in HOW_TO_COMPUTE:
            message = "says how to compute, not what: that is for stages (fused_optimizer, cuda_graph)"
            yield Problem(child.anchor, f"{path}.{key}", message)
        elif key == "max_grad_norm":
            norm: Any = child.value
            if norm is not None and not (is_number(norm) and norm > 0):
                yield Problem(child.place, f"{path}.{key}", f"should be a number above 0, got {display(child.value)}")
        elif key == "spare":
            names = [each.value for each in child.value] if isinstance(child.value, list) else [child.value]
            if not isinstance(child.value, list) or not set(names) <= set(SPARED):
                yield Problem(child.place, f"{path}.{key}", f"should be a list of {', '.join(SPARED)}")
        elif key not in known and key != "kind":
            message = f"unknown key of torch.optim's '{kind}'{suggestion(key, (*known, *_OWN))}"
            yield Problem(child.anchor, f"{path}.{key}", message)
        elif key in known:
            wrong = known[key].problem(_plain(child))
            if wrong:
                yield Problem(child.place, f"{path}.{key}", f"{wrong}, got {display(child.value)}")
    lr = node.get("lr")
    rate: Any = lr.value if lr is not None else 0.0
    if lr is not None and is_number(rate) and rate < 0:
        yield Problem(lr.place, f"{path}.lr", f"should not be below 0, got {display(rate)}")


def _settings(node: Node, default: Mapping[str, Any]) -> OptimizerSettings:
    assert isinstance(node.value, dict)
    kind = _kind(node, default)
    given = {key: _plain(child) for key, child in node.value.items()}
    if kind != default.get("kind", "adamw"):
        default = {key: value for key, value in default.items() if key in _OWN}  # another optimizer has other scales
    merged = {**default, **given}
    settings = {key: merged.get(key, each.default) for key, each in signature(kind).items()}
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    norm = merged.get("max_grad_norm")
    return OptimizerSettings(kind, settings, None if norm is None else float(norm), tuple(merged.get("spare", SPARED)))


def _plain(node: Node) -> Any:
    return [_plain(each) for each in node.value] if isinstance(node.value, list) else node.value
