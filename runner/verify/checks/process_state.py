"""Compares the global state of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.proof.fingerprints import WHOLE_PROCESS
from runner.proof.verdict import Verdict
from runner.verify.global_patches import changed_values, files_of, patches

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class ProcessStateCheck(Check):
    """Looks for global functions, hooks, kernels and constants that a candidate has
    replaced.
    """

    name = "process state"
    question = "Does the change stay inside of its pipeline?"
    catches = (
        "patched functions of torch or of this package, hooks for every module, changed "
        "constants, dispatch modes"
    )

    def applies(self, pair: StagePair) -> bool:
        """Returns False for stages that are inactive."""
        return not pair.is_inactive

    def cost(self, pair: StagePair) -> str:
        """Returns that it looks at modules."""
        return "a look at the modules of this process"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Reports the first name that is another object than before."""
        stages = pair.recipe.stages
        configs = [type(stages[kind]) for kind in pair.stages if kind in stages]
        files = {*map(str, pair.registry.files), *files_of(configs)}
        for name in (*patches(files), *changed_values(pair.baseline.process)):
            summary = (
                f"the change reaches the baseline, too: {name} is another one "
                "for the whole process"
            )
            # No later comparison in this process is valid.
            return pair.failed(summary, {WHOLE_PROCESS: True})
        return pair.passed("nothing has changed for the whole process")
