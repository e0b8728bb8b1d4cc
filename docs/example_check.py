"""A check for ``runner verify``: parameters keep their type and shape."""

from runner.api import Check
from runner.proof import Outcome, Verdict


class ParameterTypes(Check):
    """Compares types and shapes of parameters after an update."""

    name = "parameter types"
    question = "Do parameters keep their type and shape?"
    catches = "a stage that converts weights, so that no other run can load them"

    def cost(self, pair):
        return "1 update of each"

    def run(self, pair, budget):
        baseline, candidate = (self.types(build(), pair.batches[0]) for build in pair.subjects())
        contract = type(pair.contract).__name__
        for name, expected in baseline.items():
            if candidate.get(name) != expected:
                summary = f"'{name}' is {candidate.get(name)}, and {expected} in the baseline"
                return Verdict(Outcome.FAIL, contract, summary)
        return Verdict(Outcome.PASS, contract, f"{len(baseline)} parameters keep their type")

    def types(self, subject, batch):
        subject.step(batch)
        return {name: (parameter.dtype, *parameter.shape) for name, parameter in subject.parameters()}
