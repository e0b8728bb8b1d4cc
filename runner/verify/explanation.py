"""Explains a verification before it runs: its checks, their subjects and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Column, Table

from runner.plugin.check import PairCheck
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.system.console import CleanText, Console
from runner.verify.options import Options
from runner.verify.variants import ALL, inactive_stages, nothing_to_judge

CONTRACTS = ("Exact", "Close", "Statistical")


@dataclass(frozen=True)
class ExplainedCheck:
    """A check with its cost for one recipe."""

    name: str
    question: str
    catches: str
    costs: dict[str, str]
    """The computations for one set of stages, by the contract of the set."""


@dataclass(frozen=True)
class Explanation:
    """The checks of a recipe's verification."""

    recipe: str
    sets: dict[str, str]
    """The contract of every set of stages that is judged, by name."""
    checks: tuple[ExplainedCheck, ...]

    def data(self) -> dict[str, Any]:
        """Returns it as one JSON object."""
        return asdict(self)


def explain(recipe: Recipe, registry: Registry, options: Options) -> Explanation:
    """Lists the checks of a verification in their order, without running one."""
    # The command line imports this module, and the import of the gate is slow.
    from runner.training.pipeline import resolve_device
    from runner.verify.gate import Gate

    gate = Gate(recipe, registry, options, lambda _: None)
    sets_of_stages = [stages for stages in gate.plan.judged_sets() if stages]
    if not sets_of_stages and not recipe.callbacks:
        device = resolve_device(recipe.device)
        raise nothing_to_judge(recipe, inactive_stages(recipe, recipe.stages, device))
    pairs = {
        _name(stages, gate.baseline.active): gate.pair(stages)
        for stages in sets_of_stages
    }
    by_contract = {pair.promise_name: pair for pair in pairs.values()}
    checks = []
    for check in gate.checks:
        costs = {
            contract: check.cost(by_contract[contract])
            for contract in CONTRACTS
            if contract in by_contract and check.applies(by_contract[contract])
        }
        checks.append(ExplainedCheck(check.name, check.question, check.catches, costs))
    sets = {name: pair.promise_name for name, pair in pairs.items()}
    # As in a verification, who names stages wants verdicts on these alone.
    if recipe.callbacks and not options.stages:
        checks.append(_callbacks(recipe, options))
        sets |= {f"callbacks.{kind}": "Exact" for kind in recipe.callbacks}
    return Explanation(recipe.name, sets, tuple(checks))


def _callbacks(recipe: Recipe, options: Options) -> ExplainedCheck:
    """Describes the comparison of trainings with and without each callback."""
    trainings = 1 + len(recipe.callbacks)
    cost = f"{trainings} x ({options.updates} updates and an evaluation), all together"
    return ExplainedCheck(
        "callbacks",
        "Does a callback leave the training as it is?",
        "callbacks that write into parameters, buffers or optimizers, or switch modes",
        {"Exact": cost},
    )


def _name(stages: tuple[str, ...], active: Sequence[str]) -> str:
    if stages == tuple(active) and len(stages) > 1:
        return ALL
    return stages[-1]


def show(explanation: Explanation, console: Console) -> None:
    """Prints the sets of stages, and one row for every check."""
    sets = ", ".join(
        f"{name} ({contract})" for name, contract in explanation.sets.items()
    )
    count = len(explanation.sets)
    heading = f"{explanation.recipe}: {count} sets of stages are judged: {sets}"
    console.print(CleanText(heading))
    columns = (Column("check", no_wrap=True), "question", "cost for each set")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for check in explanation.checks:
        cells = (check.name, check.question, _cost(check.costs))
        table.add_row(*map(CleanText, cells))
    console.print(table)


def _cost(costs: dict[str, str]) -> str:
    """Returns the costs, each with its contracts."""
    contracts: dict[str, list[str]] = {}
    for contract, cost in costs.items():
        contracts.setdefault(cost, []).append(contract)
    # Most checks have the same cost for all contracts.
    if len(contracts) == 1 and len(costs) > 1:
        return next(iter(contracts))
    texts = [f"{', '.join(names)}: {cost}" for cost, names in contracts.items()]
    return "; ".join(texts) or "not run"


def list_checks(checks: Sequence[PairCheck | type[PairCheck]]) -> str:
    """Returns the checks as the rows of a table in Markdown."""
    rows = ["| check | question | catches, for example |", "|---|---|---|"]
    rows += [
        f"| {check.name} | {check.question} | {check.catches} |" for check in checks
    ]
    return "\n".join(rows)
