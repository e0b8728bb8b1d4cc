"""The gate's verdict on one stage, asked in a process of its own, because what is wrong may reach all of a process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
WRONG_STAGES = ROOT / "tests" / "verify"
sys.path += [str(WRONG_STAGES), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

PRELOADED = (
    "runner.verify.gate", "runner.plugins.marl.uav.source", "runner.plugins.marl.stacked",
    "runner.plugins.vision.classifier", "runner.plugins.sequences.gpt", "sklearn.datasets", "torch._inductor.config",
    "runner.plugins.graphs.citation", "runner.plugins.grasps.cube", "runner.plugins.radiance.views",
)  # fmt: skip
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([*PRELOADED])

INACTIVE, REFUSED, CRASHED, LATE = "inactive", "refused", "crashed", "out of time"
"""What may come of it beside PASS, FAIL and INCONCLUSIVE."""


def in_child(function: Callable[..., dict[str, Any]], *arguments: Any, timeout: float = 1800.0) -> dict[str, Any]:
    """What a function returns in a process of its own."""
    receiver, sender = _processes.Pipe(duplex=False)
    process = _processes.Process(target=_answer, args=(sender, function, arguments))
    began = time.perf_counter()
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(timeout) else {"verdict": LATE, "summary": f"after {timeout:.0f} s"}
    except EOFError:
        found = {"verdict": CRASHED, "summary": "the process died"}
    process.kill()
    process.join()
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def _answer(sender: Any, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    # Numbers are asked about, not speed: a processor without bf16 arithmetic emulates it.
    capabilities = torch.cpu.get_capabilities() | {"avx512_bf16": True, "amx_bf16": True}
    torch.cpu.get_capabilities = lambda: capabilities
    try:
        found = function(*arguments)
    except Exception as error:  # it is the answer
        found = {"verdict": CRASHED, "summary": f"{type(error).__name__}: {error}"[:300]}
    sender.send(found)
    sender.close()


def verdict_of(
    kind: str,
    recipe: str,
    sets: Sequence[str],
    files: Sequence[Path] = (),
    updates: int | None = None,
    quick_first: bool = False,
) -> dict[str, Any]:
    """What ``runner verify`` says of one stage of a recipe that ships; nothing is trained for it.

    Args:
        kind: The stage.
        recipe: The name of the recipe.
        sets: Settings of it, as ``--set`` has them.
        files: Of plugins.
        updates: Compared one by one; as many as the gate's own, if None.
        quick_first: Whether what is drawn and evaluated is compared before all else, which takes less time. A FAIL is
            one in any order, but another thing may be named.
    """
    from runner.plugin.registry import Registry
    from runner.recipe.loader import load
    from runner.system.errors import UsageError
    from runner.verify.gate import Gate, verify_recipe
    from runner.verify.options import Options

    registry = Registry(files)
    # A verdict is the same without the search for an operator, which repeats the failing update.
    options = Options(updates or Options.updates, budget=0.0, stages=(kind,), names_operators=False)
    try:
        # The recipe's own stages stay on: only the one that is named is judged, with what it requires.
        loaded = load(ROOT / "recipes" / f"{recipe}.yaml", ["device=cpu", f"optimization.{kind}=on", *sets], registry)
        if quick_first:
            verdict = _quick_failure(Gate(loaded, registry, options, lambda _: None), (kind,))
            if verdict is not None:
                return _told(verdict.outcome, verdict.contract, verdict.summary, verdict.evidence)
        report = verify_recipe(loaded, registry, options, lambda _: None)
    except UsageError as error:
        idle = "does anything here" in str(error) or "no active stage" in str(error)
        return {"verdict": INACTIVE if idle else REFUSED, "summary": str(error)}
    (row,) = report.rows
    return _told(row.verdict, row.contract, row.summary, row.evidence)


def _quick_failure(gate: Any, stages: tuple[str, ...]) -> Any:
    """Returns the FAIL of the checks of sampled batches, resumed trainings or evaluations; None without one."""
    from runner.proof.isolation import StepError
    from runner.verify.checks.evaluations import EvaluationsCheck
    from runner.verify.checks.resumed_training import ResumedTrainingCheck
    from runner.verify.checks.sampled_batches import SampledBatchesCheck
    from runner.verify.subjects import BuildError

    pair = gate.pair(stages)
    try:
        for check in (SampledBatchesCheck(), ResumedTrainingCheck(), EvaluationsCheck()):
            verdict = check.run(pair, gate.coverage) if check.applies(pair) else None
            if verdict is not None and verdict.outcome == "FAIL":
                return verdict
    except (BuildError, StepError):
        # The complete gate reports these.
        return None
    return None


def _told(verdict: str, contract: str, summary: str, evidence: dict[str, Any]) -> dict[str, Any]:
    difference = evidence.get("contract", evidence).get("difference") or {}
    return {
        "verdict": str(verdict),
        "contract": contract,
        "summary": summary,
        "slot": difference.get("slot"),
        "tensor": difference.get("tensor"),
        "update": difference.get("update"),
    }
