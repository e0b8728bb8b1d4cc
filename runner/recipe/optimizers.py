"""The section ``optimizer``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner.plugin.optimizer import HOW_TO_COMPUTE, SPARED, OptimizerSettings, is_number, kinds, signature
from runner.system.names import suggestion

if TYPE_CHECKING:
    from runner.plugin.learner import LearnerConfig
    from runner.recipe.document import Node, Problem

_OWN = ("kind", "max_grad_norm", "spare")
"""Settings that are none of torch's."""


def optimizers(root: Node, model: LearnerConfig | None, problems: list[Problem]) -> dict[str, OptimizerSettings]:
    """The optimizer of every role of a learner, from one section for all of them or one for each."""
    if model is None:
        return {}
    nothing = replace(root, value={})
    section = root.get("optimizer") or nothing
    if not isinstance(section.value, dict):
        problems.append(section.problem("optimizer", f"should be a mapping, got {section.shown}"))
        return {}
    mixed = [key for key in section.value if key not in model.roles]
    by_role = len(mixed) < len(section.value)
    if by_role and mixed:
        one_by_one = ", ".join(f"optimizer.{role}.{mixed[0]}" for role in model.roles)
        message = f"roles are given one by one here: say {one_by_one}"
        problems.append(section.value[mixed[0]].key_problem(f"optimizer.{mixed[0]}", message))
        return {}
    found = {}
    for role, default in model.roles.items():
        node = section.value.get(role, nothing) if by_role else section
        kind = node.get("kind")
        name = default.get("kind", "adamw") if kind is None else kind.value
        wrong = list(_problems(node, name, f"optimizer.{role}" if by_role else "optimizer"))
        problems += wrong
        if wrong:
            continue
        if name != default.get("kind", "adamw"):  # another optimizer has other scales
            default = {key: value for key, value in default.items() if key in _OWN}
        merged = {**default, **node.plain()}
        settings = {key: merged.get(key, each.default) for key, each in signature(str(name)).items()}
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        norm, spare = merged.get("max_grad_norm"), tuple(merged.get("spare", SPARED))
        found[role] = OptimizerSettings(str(name), settings, None if norm is None else float(norm), spare)
    return found


def _problems(node: Node, kind: Any, path: str) -> Iterator[Problem]:
    if not isinstance(node.value, dict):
        yield node.problem(path, f"should be a mapping, got {node.shown}")
        return
    if kind not in kinds():
        given = node.value["kind"]
        yield given.problem(f"{path}.kind", f"unknown optimizer {given.shown}{suggestion(str(kind), kinds())}")
        return
    known = signature(kind)
    for key, child in node.value.items():
        value, dotted = child.plain(), f"{path}.{key}"
        if key in HOW_TO_COMPUTE:
            message = "says how to compute, not what: that is for stages (fused_optimizer, cuda_graph)"
            yield child.key_problem(dotted, message)
        elif key == "max_grad_norm":
            if value is not None and not (is_number(value) and value > 0):
                yield child.problem(dotted, f"should be a number above 0, got {child.shown}")
        elif key == "spare":
            if not isinstance(value, list) or not all(each in SPARED for each in value):
                yield child.problem(dotted, f"should be a list of {', '.join(SPARED)}")
        elif key in known:
            wrong = known[key].problem(value)
            if not wrong and key == "lr" and value < 0:
                wrong = "should not be below 0"
            if wrong:
                yield child.problem(dotted, f"{wrong}, got {child.shown}")
        elif key != "kind":
            hint = suggestion(key, (*known, *_OWN))
            yield child.key_problem(dotted, f"unknown key of torch.optim's '{kind}'{hint}")
