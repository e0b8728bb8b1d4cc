"""Names that ``--json`` prints and that files store are part of the interface: a program reads them.

After a deliberate change, ``python tests/test_json_fields.py`` writes ``json_fields.json`` again.
"""

import dataclasses
import json
import sys
import typing
from importlib import import_module
from pathlib import Path

STORED = Path(__file__).with_name("json_fields.json")
ROOTS = (
    "runner.ablation.analysis:Result",
    "runner.ablation.inference_ablation:InferenceResult",
    "runner.ablation.memory_profile:MemoryProfile",
    "runner.ablation.memory_result:MemoryResult",
    "runner.ablation.profile:Profile",
    "runner.cli.diagnosis:Diagnosis",
    "runner.memory.plan:MemoryPlan",
    "runner.plugin.files:DataFile",
    "runner.proof.difference:Difference",
    "runner.proof.interleaved_timing:Timing",
    "runner.proof.operator_search:DivergingOperator",
    "runner.proof.verdict:Verdict",
    "runner.proof.warm_up:WarmUp",
    "runner.recipe.lock:Drift",
    "runner.study.plan:StudyPlan",
    "runner.study.summary:Summary",
    "runner.tracking.trash:Removal",
    "runner.tracking.versions:Version",
    "runner.training.evaluate:Evaluation",
    "runner.training.init_from:Start",
    "runner.training.result:RunResult",
    "runner.training.seeds:SeedsResult",
    "runner.training.stage_watch:StageReport",
    "runner.verify.explanation:Explanation",
    "runner.verify.verification:Verification",
)
"""Classes that commands print or store, as ``module:class``; those that they contain are found."""


def fields_of(cls):
    """Returns the names of the fields of a dataclass or a named tuple; None for another class."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return list(getattr(cls, "_fields", ())) or None


def contained(cls):
    """Yields the classes in the annotations of a class, as far as its module knows them."""
    namespace = vars(sys.modules[cls.__module__])
    for annotation in vars(cls).get("__annotations__", {}).values():
        try:
            hint = eval(annotation, namespace) if isinstance(annotation, str) else annotation
        except NameError:  # imported for type checkers only
            continue
        queue = [hint]
        while queue:
            part = queue.pop()
            queue += typing.get_args(part)
            if isinstance(part, type):
                yield part


def json_fields():
    """Returns the fields of all classes, by ``module:class``."""
    queue = [getattr(import_module(root.partition(":")[0]), root.partition(":")[2]) for root in ROOTS]
    classes = dict.fromkeys(queue)
    for cls in queue:
        new = [part for part in contained(cls) if part not in classes and part.__module__.startswith("runner")]
        new = [part for part in new if fields_of(part)]
        classes |= dict.fromkeys(new)
        queue += new
    return {cls.__name__: fields_of(cls) for cls in sorted(classes, key=lambda cls: cls.__name__)}


def test_no_name_in_printed_or_stored_json_changes_unnoticed():
    assert json_fields() == json.loads(STORED.read_text())


if __name__ == "__main__":
    STORED.write_text(json.dumps(json_fields(), indent=1) + "\n")
